"""What the recorder takes from accounts and attempts."""

from __future__ import annotations

import pytest

from pdproxy.core.durations import step_of
from pdproxy.core.instance import Endpoint, Instance, Role
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.recorder import Recorder, wall_clock

NOW_S = 1_800_000_001.0


@pytest.fixture
def recorder():
    return Recorder(lambda: NOW_S)


def account(**fields):
    timeline = Timeline(0.0, first_content=0.5, last_content=2.5, finished=3.0)
    made = Account("id", "/v1/chat/completions", "peer", timeline, model="m", is_stream=True)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


async def bucket(recorder):
    (found,) = (await recorder.recent()).buckets.values()
    return found


async def test_a_stream_counts_with_its_times_and_tokens(recorder):
    recorder.request_finished(account(output_tokens=21))

    found = await bucket(recorder)

    assert found.outcomes == {"success": 1}
    assert found.output_tokens == 21
    assert found.ttft == {step_of(0.5): 1}
    assert found.tpot == {step_of(0.1): 1}


async def test_time_per_token_is_that_of_the_metrics_of_streams_with_usage_only(recorder):
    recorder.request_finished(account(output_tokens=21, is_stream=False))
    recorder.request_finished(account())

    assert (await bucket(recorder)).tpot == {}


async def test_success_is_no_failure(recorder):
    recorder.request_finished(account())

    assert (await recorder.recent()).failures == []


async def test_a_failure_is_kept_with_what_an_operator_asks_for(recorder):
    made = account(prefiller="p:1", decoder="d:1", status=502)
    made.fail(Outcome.ENGINE_ERROR, "lost " * 1000)
    recorder.request_finished(made)

    (kept,) = (await recorder.recent()).failures

    assert (kept.at_s, kept.request_id, kept.outcome, kept.status) == (
        NOW_S,
        "id",
        "engine_error",
        502,
    )
    assert (kept.prefiller, kept.decoder, kept.model) == ("p:1", "d:1", "m")
    assert len(kept.why) == 300


async def test_failed_attempts_and_recomputes_are_kept(recorder):
    instance = Instance(Role.DECODE, Endpoint("d", 1), 0, 1)
    recorder.attempt_failed(instance, "refused")
    recorder.attempt_failed(instance, "status_4xx")
    recorder.recompute_ended()

    recent = await recorder.recent()

    assert [(e.role, e.name, e.reason, e.count) for e in recent.errors] == [
        ("decode", "d:1", "refused", 1)
    ]
    assert (await bucket(recorder)).recomputes == 1


def test_the_wall_clock_is_that_of_the_world():
    assert wall_clock() > 1_700_000_000
