import random
from dataclasses import replace

import pytest

from pdproxy.core.api import Api, parse_generate
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import NO_LOAD, Cost, LoadBoard
from pdproxy.core.policy import Reason
from pdproxy.dispatch.attempt import attempt, failure_reason
from pdproxy.dispatch.legs import (
    Call,
    Handoff,
    _engine_id,
    decode_cost,
    learn_from,
    prefill_cost,
)
from pdproxy.dispatch.tracing import NO_SPAN
from pdproxy.errors import (
    BodyTooLarge,
    ClientStalled,
    EngineAnswered,
    InvalidRequest,
    Overloaded,
    UpstreamLost,
    UpstreamProtocol,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from tests.dispatch.stage import FirstOne, stage


def parse(body: bytes, api: Api = Api.COMPLETIONS):
    return parse_generate(api, body)


@pytest.mark.case("C38")
@pytest.mark.parametrize("client_id", [None, "same"])
async def test_no_two_of_many_requests_have_one_id_at_the_engines(client_id):
    async with stage(p=[], d=[]) as play:
        tools = replace(play.tools, rng=random.SystemRandom())
        call = Call(play.account, [], client_id)
        ids = {_engine_id(tools, call) for _ in range(10_000)}

    assert len(ids) == 10_000


async def test_exact_token_ids_need_no_estimate():
    async with stage(p=[], d=[]) as play:
        ids = parse(b'{"prompt": [1, 2, 3]}')
        text = parse(b'{"prompt": "' + b"x" * 398 + b'"}')

        assert prefill_cost(play.tools, ids).compute_tokens == 3
        assert prefill_cost(play.tools, text) == Cost(
            compute_tokens=100, body_bytes=text.body_bytes
        )


async def test_estimate_learns_from_text_only():
    async with stage(p=[], d=[]) as play:
        text = parse(b'{"model": "m", "prompt": "' + b"x" * 3998 + b'"}')
        before = prefill_cost(play.tools, text).compute_tokens
        learn_from(play.tools, parse(b'{"model": "m", "prompt": [1]}'), 10**6)
        assert prefill_cost(play.tools, text).compute_tokens == before

        for _ in range(200):
            learn_from(play.tools, text, 2000)

        assert prefill_cost(play.tools, text).compute_tokens == pytest.approx(2000, rel=0.02)


async def test_decode_cost_is_the_prompt_once_and_each_choices_output():
    async with stage(p=[], d=[]) as play:
        request = parse(b'{"prompt": "x", "max_tokens": 7, "n": 3}')

        assert decode_cost(play.tools, request, 100).kv_tokens == 100 + 3 * 7


def test_handoff_is_released_once():
    fleet = Fleet(LoadBoard(), {role: FirstOne() for role in Role}, lambda: 0.0)
    instance, _ = fleet.add(Role.PREFILL, Endpoint("h", 1), state=State.ACTIVE)
    handoff = Handoff("id", lease=fleet.lease(Role.PREFILL, Cost(kv_tokens=3)))

    handoff.release()
    handoff.release()

    assert fleet.load(instance) == NO_LOAD
    Handoff("id").release()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineAnswered(404, [], b""), "status_4xx"),
        (EngineAnswered(503, [], b""), "status_5xx"),
        (UpstreamUnreachable("x"), "connect"),
        (UpstreamLost("x"), "lost"),
        (UpstreamProtocol("x"), "protocol"),
        (UpstreamTimeout("x", phase="head"), "timeout"),
        (ClientStalled("x"), "client_stalled"),
        (Overloaded("x"), "overloaded"),
        (InvalidRequest("x"), "invalid_request"),
        (BodyTooLarge("x"), "body_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reason_is_from_a_closed_set(error, reason):
    assert failure_reason(error) == reason


@pytest.mark.parametrize(
    ("error", "state"),
    [
        pytest.param(UpstreamUnreachable("x"), State.EJECTED, id="refused-at-once"),
        pytest.param(UpstreamLost("x"), State.ACTIVE, id="lost-not-at-once"),
        pytest.param(EngineAnswered(400, [], b""), State.ACTIVE, id="clients-fault"),
        pytest.param(ClientStalled("x"), State.ACTIVE, id="slow-client"),
    ],
)
async def test_failure_is_told_to_the_fleet_if_it_was_the_instances(error, state):
    async with stage() as play:
        instance = play.instance(play.p[0])
        with (
            play.fleet.lease(Role.PREFILL, Cost()) as lease,
            pytest.raises(type(error)),
            attempt(play.tools, lease, NO_SPAN),
        ):
            raise error

        assert play.fleet.state(instance) is state
        assert play.observer.attempts[0][1] == "error"


async def test_success_clears_the_record():
    async with stage() as play:
        lease = play.fleet.lease(Role.PREFILL, Cost())
        for _ in range(4):
            for _ in range(2):
                with pytest.raises(UpstreamLost), attempt(play.tools, lease, NO_SPAN):
                    raise UpstreamLost("x")
            with attempt(play.tools, lease, NO_SPAN):
                pass

        assert play.fleet.state(lease.instance) is State.ACTIVE
        assert play.observer.routes == [(Role.PREFILL, Reason.ONLY_ONE)] * 12
