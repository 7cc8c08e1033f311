"""How instances join, come back, are given up and leave."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import asynccontextmanager

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.core.record import Change, EngineReport
from pdproxy.runtime.roster import FleetRoster
from pdproxy.runtime.watch import RosterRules
from pdproxy.upstream.prober import ProbeResult
from tests.fakes.waiting import until

H1, H2 = Endpoint("h", 1), Endpoint("h", 2)
QUICK = RosterRules(probe_interval_s=0.01, add_interval_s=0.01, add_attempts=3)
BUSY = (
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 7\nvllm:num_requests_waiting 2\n"
)
BUSY_REPORT = EngineReport(capacity_tokens=1600, kv_usage=0.5, running=7, waiting=2)
SLOW = RosterRules(probe_interval_s=60, add_interval_s=60, add_attempts=3)


class FakeProber:
    """Engines are up if their endpoint is in `up`; a probe of one in `hung` never ends."""

    def __init__(self) -> None:
        self.up: set[Endpoint] = set()
        self.hung: set[Endpoint] = set()
        self.refusing: set[Endpoint] = set()
        self.pages: dict[Endpoint, bytes] = {}
        self.probes: list[Endpoint] = []
        self.fault: Exception | None = None

    async def metrics(self, endpoint: Endpoint) -> bytes:
        return self.pages.get(endpoint, b"")

    async def probe(self, endpoint: Endpoint) -> ProbeResult:
        self.probes.append(endpoint)
        if self.fault is not None:
            raise self.fault
        if endpoint in self.hung:
            await asyncio.Event().wait()
        if endpoint in self.up:
            return ProbeResult(True)
        return ProbeResult(False, is_refused=endpoint in self.refusing, why="/health answered 503")


class Rig:
    def __init__(self, rules: RosterRules) -> None:
        self.now_s = 0.0
        policies = {role: POLICIES["least_load"](role, random.Random(0)) for role in Role}
        self.fleet = Fleet(LoadBoard(), policies, lambda: self.now_s)
        self.prober = FakeProber()
        self.gone: list[str] = []
        self.roster = FleetRoster(
            self.fleet,
            self.prober,  # type: ignore[arg-type]  # a fake with the one method that is used
            rules,
            random.Random(0),
            lambda endpoint: self.gone.append(str(endpoint)),
            lambda: self.now_s,
        )

    def state(self, endpoint, role=Role.DECODE):
        instance = self.fleet.find(role, endpoint)
        return State.GONE if instance is None else self.fleet.state(instance)

    def instance(self, endpoint, role=Role.DECODE):
        found = self.fleet.find(role, endpoint)
        assert found is not None
        return found


@asynccontextmanager
async def rig(rules=QUICK, *configured, up=(), wait_s=1.0):
    made = Rig(rules)
    made.prober.up |= set(up)
    await made.roster.start([(Role.DECODE, endpoint) for endpoint in configured], wait_s)
    try:
        yield made
    finally:
        await made.roster.stop()


# --- those of the configuration


@pytest.mark.case("C83")
async def test_engines_that_are_up_serve_from_the_start():
    async with rig(SLOW, H1, H2, up=[H1]) as made:
        assert made.state(H1) is State.ACTIVE
        assert made.state(H2) is State.JOINING


@pytest.mark.case("C83")
async def test_start_does_not_wait_for_a_hung_engine():
    made = Rig(SLOW)
    made.prober.up, made.prober.hung = {H1}, {H2}

    await made.roster.start([(Role.DECODE, H1), (Role.DECODE, H2)], 0.05)

    assert made.state(H1) is State.ACTIVE
    assert made.state(H2) is State.JOINING
    await made.roster.stop()


@pytest.mark.case("C83")
async def test_configured_engine_is_waited_for_without_end():
    async with rig(QUICK, H1) as made:
        await until(lambda: len(made.prober.probes) > 3 * QUICK.add_attempts)
        assert made.state(H1) is State.JOINING

        made.prober.up.add(H1)
        await until(lambda: made.state(H1) is State.ACTIVE)


@pytest.mark.case("C58", "C60")
async def test_ejected_engine_comes_back_by_a_good_probe_only():
    async with rig(QUICK, H1, up=[H1]) as made:
        made.prober.up.clear()
        made.fleet.report_failure(made.instance(H1), certain=True)
        made.now_s += 3600
        before = len(made.prober.probes)
        await until(lambda: len(made.prober.probes) > before + 2)
        assert made.state(H1) is State.EJECTED

        made.prober.up.add(H1)
        await until(lambda: made.state(H1) is State.ACTIVE)


async def test_engine_that_serves_is_probed_and_ejected_when_it_stops_answering(caplog):
    async with rig(QUICK, H1, H2, up=[H1, H2]) as made:
        made.prober.up.discard(H1)

        await until(lambda: made.state(H1) is State.EJECTED)

        assert made.state(H2) is State.ACTIVE
        assert "decode h:1 is ejected (1 ejection so far): /health answered 503" in caplog.text
        assert made.fleet.available(Role.DECODE) == [made.instance(H2)]


async def test_one_bad_probe_ejects_only_if_nobody_listens():
    async with rig(SLOW, H1, H2, up=[H1, H2]) as made:
        made.prober.up.clear()
        made.prober.refusing.add(H2)
        for endpoint in (H1, H2):
            await made.roster.watch.probe(made.instance(endpoint))

        assert made.state(H1) is State.ACTIVE
        assert made.state(H2) is State.EJECTED


async def test_panic_is_logged_once(caplog):
    async with rig(SLOW, H1, H2, up=[H1, H2]) as made:
        for endpoint in (H1, H2):
            for _ in range(3):
                made.fleet.report_failure(made.instance(endpoint), certain=False, why="status 500")

        assert caplog.text.count("more than half of the decode instances are ejected") == 1
        assert "is left" not in caplog.text


async def test_log_says_once_that_nobody_of_a_role_is_left_and_that_somebody_is_back(caplog):
    caplog.set_level(logging.INFO, "pdproxy")
    async with rig(SLOW, H1, H2, up=[H1, H2]) as made:
        for endpoint in (H1, H2):
            made.fleet.report_failure(made.instance(endpoint), certain=True, why="refused")
        lost = caplog.text
        made.fleet.judge.probe_succeeded(made.instance(H1))
        made.fleet.set_state(made.instance(H1), State.ACTIVE)

    assert lost.count("no decode instance is left that can serve") == 1
    assert "more than half" not in lost
    assert "there is a decode instance that can serve" in caplog.text[len(lost) :]


async def test_a_bug_in_one_round_does_not_end_the_watch(caplog):
    async with rig(QUICK, H1) as made:
        made.prober.fault = RuntimeError("x")
        await until(lambda: "failed by a bug" in caplog.text)
        made.prober.fault = None
        made.prober.up.add(H1)

        await until(lambda: made.state(H1) is State.ACTIVE)


async def test_what_an_engine_says_of_its_cache_is_known_unless_less_was_learned():
    rules = RosterRules(0.01, 0.01, 3, scrape_interval_s=0.01)
    async with rig(rules, H1, H2, up=[H1, H2]) as made:
        info = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
        made.prober.pages[H1] = info
        await until(lambda: made.fleet.capacity_tokens(made.instance(H1)) == 1600)
        with made.fleet.lease(Role.DECODE, Cost(kv_tokens=1000), avoid=[made.instance(H2)]):
            made.fleet.note_exhausted(made.instance(H1))
        made.prober.pages[H1] = info + b"vllm:num_requests_running 7\n"
        member = made.fleet.members.find(Role.DECODE, H1)
        await until(lambda: member.engine is not None and member.engine.running == 7)

        assert made.fleet.capacity_tokens(made.instance(H1)) == 900
        made.now_s += 301
        made.fleet.judge.forget_old_lessons()
        assert made.fleet.capacity_tokens(made.instance(H1)) == 1600
        assert made.fleet.capacity_tokens(made.instance(H2)) is None


@pytest.mark.parametrize("how", ["refusing", "silent", "without-page"])
async def test_what_an_engine_said_is_not_told_once_it_says_nothing_but_its_capacity_stays(how):
    rules = RosterRules(0.01, 0.01, 3, scrape_interval_s=0.02)
    async with rig(rules, H1, up=[H1]) as made:
        member = made.fleet.members.find(Role.DECODE, H1)
        made.prober.pages[H1] = BUSY
        await until(lambda: member.engine == BUSY_REPORT)
        if how == "without-page":
            made.prober.pages.clear()
        else:
            made.prober.up.clear()
            made.prober.refusing |= {H1} if how == "refusing" else set()
        await until(lambda: member.engine == EngineReport(capacity_tokens=1600))
        assert member.capacity_tokens == 1600

        made.prober.up.add(H1)
        made.prober.pages[H1] = BUSY
        await until(lambda: member.engine == BUSY_REPORT)


async def test_engine_that_comes_back_is_asked_at_once():
    rules = RosterRules(0.01, 0.01, 3, scrape_interval_s=60)
    async with rig(rules, H1, up=[H1]) as made:
        member = made.fleet.members.find(Role.DECODE, H1)
        made.prober.pages[H1] = BUSY
        made.prober.refusing.add(H1)
        made.prober.up.clear()
        await until(lambda: member.health.is_dead)
        made.prober.up.add(H1)

        await until(lambda: member.engine == BUSY_REPORT)


# --- those added by a call


@pytest.mark.case("C54")
async def test_added_engine_joins_when_it_answers():
    async with rig(QUICK) as made:
        assert await made.roster.add(Role.DECODE, H1) is Change.WAITING
        assert made.state(H1) is State.JOINING
        assert made.fleet.is_pending(made.instance(H1))
        made.prober.up.add(H1)

        await until(lambda: made.state(H1) is State.ACTIVE)
        await until(lambda: not made.fleet.is_pending(made.instance(H1)))


@pytest.mark.case("C54")
async def test_added_engine_is_given_up_visibly(caplog):
    async with rig(QUICK) as made:
        await made.roster.add(Role.DECODE, H1)

        await until(lambda: made.state(H1) is State.GONE)

        assert made.prober.probes == [H1] * QUICK.add_attempts
        assert made.gone == ["h:1"]
        (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "h:1" in warning.getMessage()
        made.prober.up.add(H1)
        assert await made.roster.add(Role.DECODE, H1) is Change.WAITING
        await until(lambda: made.state(H1) is State.ACTIVE)


@pytest.mark.case("C54")
async def test_hung_engine_does_not_hold_up_another():
    async with rig(QUICK) as made:
        made.prober.hung, made.prober.up = {H1}, {H2}
        await made.roster.add(Role.DECODE, H1)
        await made.roster.add(Role.DECODE, H2)

        await until(lambda: made.state(H2) is State.ACTIVE)


async def test_adding_twice_is_adding_once():
    async with rig(SLOW, H2, up=[H2]) as made:
        assert await made.roster.add(Role.DECODE, H1) is Change.WAITING
        assert await made.roster.add(Role.DECODE, H1) is not Change.WAITING
        assert await made.roster.add(Role.DECODE, H2) is not Change.WAITING


@pytest.mark.case("C59")
async def test_one_address_joins_in_both_roles():
    async with rig(QUICK) as made:
        made.prober.up.add(H1)
        assert await made.roster.add(Role.PREFILL, H1) is Change.WAITING
        assert await made.roster.add(Role.DECODE, H1) is Change.WAITING
        await until(lambda: {made.state(H1, role) for role in Role} == {State.ACTIVE})

        await made.roster.remove(Role.PREFILL, H1)

        assert made.state(H1, Role.PREFILL) is State.GONE
        assert made.state(H1) is State.ACTIVE


# --- leaving


async def test_idle_engine_is_gone_at_once():
    async with rig(SLOW, H1, up=[H1]) as made:
        await made.roster.remove(Role.DECODE, H1)

        assert made.state(H1) is State.GONE
        assert made.gone == ["h:1"]


@pytest.mark.case("C52", "C53")
async def test_busy_engine_drains_and_may_come_back():
    async with rig(SLOW, H1, up=[H1]) as made:
        with made.fleet.lease(Role.DECODE, Cost()):
            await made.roster.remove(Role.DECODE, H1)
            assert made.state(H1) is State.DRAINING
            assert made.fleet.available(Role.DECODE) == []

            assert await made.roster.add(Role.DECODE, H1) is not Change.WAITING
            assert made.state(H1) is State.ACTIVE
        assert made.state(H1) is State.ACTIVE


async def test_the_time_that_a_drain_has_left_is_told(caplog):
    async with rig(SLOW, H1, H2, up=[H1, H2]) as made:
        with made.fleet.lease(Role.DECODE, Cost()) as lease:
            endpoint = lease.instance.endpoint
            await made.roster.drain(Role.DECODE, endpoint, 60)
            before = [record.deadline_left_s for record in await made.roster.describe()]
            await made.roster.drain(Role.DECODE, endpoint, 0)
            await until(lambda: made.fleet.members.get(lease.instance).is_cut)
            assert "has not drained in time, which cuts 1 request" in caplog.text
            after = [record.deadline_left_s for record in await made.roster.describe()]
            await made.roster.undrain(Role.DECODE, endpoint)
            restored = [record.deadline_left_s for record in await made.roster.describe()]

    (left_s,) = [each for each in before if each is not None]
    assert 30 < left_s <= 60
    assert sorted(after, key=str) == [0, None]
    assert restored == [None, None]


@pytest.mark.parametrize("is_added", [True, False], ids=["added", "configured"])
async def test_engine_that_has_yet_to_join_can_be_removed(is_added):
    async with rig(SLOW, *([] if is_added else [H1])) as made:
        if is_added:
            await made.roster.add(Role.DECODE, H1)
        instance = made.instance(H1)

        await made.roster.remove(Role.DECODE, H1)

        assert made.state(H1) is State.GONE
        assert not made.fleet.is_pending(instance)


async def test_removal_during_a_probe_stays_one():
    async with rig(QUICK) as made:
        made.prober.hung.add(H1)
        await made.roster.add(Role.DECODE, H1)
        await until(lambda: made.prober.probes)
        await made.roster.remove(Role.DECODE, H1)
        made.prober.up.add(H1)
        made.prober.hung.clear()
        await asyncio.sleep(0.03)

        assert made.state(H1) is State.GONE


async def test_ejected_engine_leaves_at_once():
    async with rig(SLOW, H1, up=[H1]) as made:
        made.fleet.report_failure(made.instance(H1), certain=True)

        await made.roster.remove(Role.DECODE, H1)

        assert made.state(H1) is State.GONE


async def test_stop_leaves_no_task():
    before = len(asyncio.all_tasks())
    async with rig(SLOW, H1) as made:
        await made.roster.add(Role.DECODE, H2)
        await until(lambda: made.prober.probes)
        assert len(asyncio.all_tasks()) == before + 3

    assert len(asyncio.all_tasks()) == before
