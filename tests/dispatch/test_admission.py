"""The door: who is let in, who waits, who is told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from pdproxy.core.admission import Limits
from pdproxy.core.api import Api, parse_generate
from pdproxy.core.instance import Role
from pdproxy.core.load import Cost
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.batch import answer
from pdproxy.dispatch.in_flight import OwnInFlight
from pdproxy.dispatch.legs import Call
from pdproxy.errors import Overloaded, QueueFull, QueueTimeout
from tests.dispatch.stage import FakeDownstream, Stage, stage
from tests.fakes import behaviours
from tests.fakes.waiting import until

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
STREAM = {**CHAT, "stream": True}


class Held:
    """An engine that answers once it is let go."""

    def __init__(self, behaviour: Any) -> None:
        self.gate = asyncio.Event()
        self.most = self.now = 0
        self._behaviour = behaviour

    async def __call__(self, request: Any, answer: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            await self._behaviour(request, answer)
        finally:
            self.now -= 1


def ask(play: Stage, headers: Sequence[tuple[str, str]] = (), **more: Any) -> asyncio.Task[Any]:
    """Begin a request with an account of its own."""
    account = Account("id", Api.CHAT.value, "peer", Timeline(0.0))
    account.timeline.mark_received(play.clock())
    play.account = account
    request = parse_generate(Api.CHAT, orjson.dumps({**STREAM, **more}))
    headers = [("content-type", "application/json"), *headers]

    async def work() -> FakeDownstream:
        downstream = FakeDownstream()
        await answer(play.tools, request, Call(account, headers, None), downstream)
        return downstream

    return asyncio.get_running_loop().create_task(work())


async def results(*tasks: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def ends(play: Stage, *tasks: asyncio.Task[Any]) -> list[Any]:
    found = await results(*tasks)
    await until(lambda: play.tools.admission.waiting == 0)
    play.assert_idle()
    assert play.observer.queued == 0
    return found


async def test_no_more_requests_are_in_flight_than_may_be():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits(max_in_flight=2)) as play:
        tasks = [ask(play) for _ in range(5)]
        await until(lambda: play.tools.admission.waiting == 3)
        await until(lambda: d.now == 2)
        assert play.observer.queued == 3
        d.gate.set()
        answers = await ends(play, *tasks)

    assert all(isinstance(each, FakeDownstream) for each in answers)
    assert d.most == 2
    assert len(play.observer.waits) == 3
    assert play.account.timeline.waited_s > 0


async def test_too_many_are_refused_at_once_with_a_time_to_come_back():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits(max_in_flight=1, max_queue=1)) as play:
        running, waiting = ask(play), ask(play)
        await until(lambda: play.tools.admission.waiting == 1)
        (refused,) = await results(ask(play))
        d.gate.set()
        await ends(play, running, waiting)

    assert isinstance(refused, QueueFull)
    assert (refused.status, refused.retry_after_s) == (429, 1)


async def test_who_waits_too_long_is_refused():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits(max_in_flight=1, queue_s=0.05)) as play:
        running = ask(play)
        await until(lambda: d.now == 1)
        (refused,) = await results(ask(play))
        d.gate.set()
        await ends(play, running)

    assert isinstance(refused, QueueTimeout)
    assert refused.status == 429
    assert isinstance(refused, Overloaded)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        pytest.param({"max_in_flight": 1}, "(--max-in-flight 1)", id="turn"),
        pytest.param({"max_per_prefiller": 1}, "(--max-per-prefiller 1)", id="prefiller"),
        pytest.param({"max_per_decoder": 1}, "(--max-per-decoder 1)", id="decoder"),
    ],
)
async def test_a_refusal_names_the_limits_by_their_flags(limits, named):
    p, d = Held(behaviours.prefill), Held(behaviours.decode)
    async with stage(p=[p], d=[d], admission=Limits(**limits, max_queue=1, queue_s=0.2)) as play:
        running = ask(play)
        await until(lambda: p.now == 1)
        waiting = ask(play)
        await until(lambda: play.tools.admission.waiting == 1)
        refused, too_long = await results(ask(play), waiting)
        p.gate.set()
        d.gate.set()
        await ends(play, running)

    assert isinstance(refused, QueueFull)
    assert refused.message.startswith("the queue is full (--max-queue 1): no ")
    assert refused.message.endswith(named)
    assert isinstance(too_long, QueueTimeout)
    assert "(--queue-timeout 0.2)" in too_long.message
    assert too_long.message.endswith(named)


async def test_a_refusal_for_lack_of_kv_cache_names_the_switch():
    async with stage(admission=Limits(max_queue=0)) as play:
        play.fleet.set_capacity(play.instance(play.d[0]), 1000)
        with play.fleet.lease(Role.DECODE, Cost(kv_tokens=999)):
            (refused,) = await results(ask(play))

    assert isinstance(refused, QueueFull)
    assert refused.message == (
        "the queue is full (--max-queue 0): no decoder has room for its KV cache (--kv-queue on)"
    )


@pytest.mark.parametrize(
    "limits", [Limits(max_in_flight=1), Limits(max_per_prefiller=1), Limits(max_per_decoder=1)]
)
async def test_client_that_leaves_while_it_waits_leaves_nothing_behind(limits):
    p, d = Held(behaviours.prefill), Held(behaviours.decode)
    async with stage(p=[p], d=[d], admission=limits) as play:
        running = ask(play)
        await until(lambda: p.now == 1)
        waiting = [ask(play) for _ in range(3)]
        await until(lambda: play.tools.admission.waiting == 3)
        for task in waiting[:2]:
            task.cancel()
        await until(lambda: play.tools.admission.waiting == 1)
        p.gate.set()
        d.gate.set()
        first, *others = await ends(play, running, *waiting)

    assert isinstance(first, FakeDownstream)
    assert [type(each) for each in others] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
        FakeDownstream,
    ]
    assert play.calls == (2, 2)


async def test_client_that_leaves_as_it_is_let_in_gives_its_place_back():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits(max_in_flight=1)) as play:
        running = ask(play)
        await until(lambda: d.now == 1)
        leaving, last = ask(play), ask(play)
        await until(lambda: play.tools.admission.waiting == 2)
        # Let in and cancelled before it runs again.
        play.tools.admission.leave()
        leaving.cancel()
        play.tools.admission._in_flight.add(1)
        d.gate.set()
        _, second, third = await ends(play, running, leaving, last)

    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(third, FakeDownstream)


@pytest.mark.parametrize("role", list(Role))
async def test_no_more_legs_are_on_one_instance_than_may_be(role):
    held = [
        Held(behaviours.prefill if role is Role.PREFILL else behaviours.decode) for _ in range(2)
    ]
    engines: dict[str, Any] = {"p" if role is Role.PREFILL else "d": held}
    limits = Limits(max_per_prefiller=2) if role is Role.PREFILL else Limits(max_per_decoder=2)
    async with stage(**engines, admission=limits) as play:
        tasks = [ask(play) for _ in range(9)]
        await until(lambda: sum(each.now for each in held) == 4)
        assert play.tools.admission.waiting == 5
        for each in held:
            each.gate.set()
        answers = await ends(play, *tasks)

    assert all(isinstance(each, FakeDownstream) for each in answers)
    assert [each.most for each in held] == [2, 2]


async def test_more_important_requests_go_first():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits(max_in_flight=1)) as play:
        running = ask(play)
        await until(lambda: d.now == 1)
        order = [ask(play, priority=p, seed=p) for p in (3, -2, 0, 1)]
        await until(lambda: play.tools.admission.waiting == 4)
        d.gate.set()
        await ends(play, running, *order)
        seeds = [call.json.get("seed") for call in play.p[0].calls]

    assert seeds == [None, -2, 0, 1, 3]


async def test_header_of_priority_wins_over_the_body():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits(max_in_flight=1)) as play:
        running = ask(play)
        await until(lambda: d.now == 1)
        first = ask(play, priority=0, seed=0)
        await until(lambda: play.tools.admission.waiting == 1)
        second = ask(play, [("x-vllm-priority", "-3")], priority=9, seed=9)
        await until(lambda: play.tools.admission.waiting == 2)
        d.gate.set()
        await ends(play, running, first, second)
        seeds = [call.json.get("seed") for call in play.p[0].calls]

    assert seeds == [None, 9, 0]


async def test_prompt_waits_while_no_decoder_has_room_for_it():
    d = Held(behaviours.decode)
    async with stage(d=[d], admission=Limits()) as play:
        instance = play.instance(play.d[0])
        play.fleet.set_capacity(instance, 1000)
        with play.fleet.lease(Role.DECODE, Cost(kv_tokens=999)):
            task = ask(play)
            await until(lambda: play.tools.admission.waiting == 1)
            assert play.calls == (0, 0)
        d.gate.set()
        (answered,) = await ends(play, task)

    assert isinstance(answered, FakeDownstream)


async def test_prompt_goes_to_the_least_full_decoder_when_it_has_waited_long_enough():
    async with stage(admission=Limits(queue_s=0.1)) as play:
        play.fleet.set_capacity(play.instance(play.d[0]), 1000)
        with play.fleet.lease(Role.DECODE, Cost(kv_tokens=999)):
            (answered,) = await results(ask(play))

    assert isinstance(answered, FakeDownstream)
    assert len(play.observer.waits) == 2  # before the prefill and before the decode


async def test_prompt_goes_to_the_decoder_that_has_room():
    async with stage(d=[None, None]) as play:
        first, second = (play.instance(engine) for engine in play.d)
        for instance in (first, second):
            play.fleet.set_capacity(instance, 1000)
        with play.fleet.lease(Role.DECODE, Cost(kv_tokens=999)) as lease:
            assert lease.instance is first
            await ask(play)

    assert [len(engine.calls) for engine in play.d] == [0, 1]


async def test_prompt_that_fits_nowhere_is_not_kept_waiting():
    async with stage() as play:
        play.fleet.set_capacity(play.instance(play.d[0]), 1)
        (answered,) = await ends(play, ask(play))

    assert isinstance(answered, FakeDownstream)
    assert play.observer.waits == []


async def test_count_may_be_another_processes_too():
    class Shared(OwnInFlight):
        others = 1

        def count(self) -> int:  # type: ignore[explicit-override]  # typing has it from 3.12
            return super().count() + self.others

    async with stage(admission=Limits(max_in_flight=1)) as play:
        shared = play.tools.admission._in_flight = Shared()
        task = ask(play)
        await until(lambda: play.tools.admission.waiting == 1)
        shared.others = 0
        (answered,) = await ends(play, task)

    assert isinstance(answered, FakeDownstream)
    assert shared.count() == 0


@pytest.mark.parametrize("is_alone", [False, True])
async def test_without_a_prefiller_the_decoder_computes_the_prompt_if_it_may(is_alone):
    async with stage(p=[], decode_alone=is_alone) as play:
        (found,) = await ends(play, ask(play))

    if is_alone:
        assert isinstance(found, FakeDownstream)
        assert "kv_transfer_params" not in play.d[0].only_call.json
        assert play.observer.skipped == ["no_prefiller"]
    else:
        assert found.status == 503
        assert found.retry_after_s > 0


@pytest.mark.parametrize("failure", [behaviours.reset, behaviours.error(500)])
async def test_decoder_computes_the_prompt_when_all_prefills_failed_if_it_may(failure):
    async with stage(p=[failure], decode_alone=True) as play:
        (found,) = await ends(play, ask(play))

    assert isinstance(found, FakeDownstream)
    assert play.calls == (3, 1)
    assert play.observer.skipped == ["prefill_failed"]


async def test_clients_fault_is_told_though_a_decoder_may_go_alone():
    async with stage(p=[behaviours.error(400)], decode_alone=True) as play:
        (found,) = await ends(play, ask(play))

    assert found.engine_status == 400
    assert play.calls == (1, 0)
