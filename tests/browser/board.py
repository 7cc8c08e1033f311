"""A dashboard over made-up instances and a made-up past, served in this process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdproxy.core.instance import Role, Source, State
from pdproxy.core.record import InstanceRecord
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.recorder import Recorder, wall_clock
from pdproxy.server.app import build_app
from tests.server.stage import Server, listening, server


class Past:
    """A clock that can be in the past while a history is filled."""

    def __init__(self) -> None:
        self.back_s = 0.0

    def __call__(self) -> float:
        return wall_clock() - self.back_s


def record(role: Role = Role.DECODE, instance: str = "10.0.0.1:7100", **fields) -> InstanceRecord:
    plain = {
        "source": Source.CONFIGURED,
        "state": State.ACTIVE,
        "state_age_s": 100.0,
        "requests": 0,
        "compute_tokens": 0,
        "kv_tokens": 0,
        "capacity_tokens": None,
        "ramp": 1.0,
        "ejections": 0,
        "is_dead": False,
        "last_error": "",
        "last_error_age_s": None,
        "engine": None,
    }
    return InstanceRecord(role=role, instance=instance, **{**plain, **fields})


def account(number: int, rng: random.Random, outcome: Outcome = Outcome.SUCCESS) -> Account:
    ttft_s, tokens = rng.lognormvariate(-1.5, 0.6), rng.randrange(20, 200)
    timeline = Timeline(0.0, first_content=ttft_s, last_content=ttft_s + 0.03 * tokens)
    made = Account(
        f"req-{number}",
        "/v1/chat/completions",
        "peer",
        timeline,
        model="demo",
        is_stream=True,
        output_tokens=tokens,
        prefiller="10.0.0.1:7100",
        decoder="10.0.1.1:7100",
        status=200 if outcome is Outcome.SUCCESS else 502,
    )
    if outcome is not Outcome.SUCCESS:
        made.fail(outcome, "the connection to the engine was lost before its answer ended")
    return made


def busy_past() -> Recorder:
    """Return a recorder with a quarter of an hour of requests, failures and recomputes."""
    rng = random.Random(7)
    past = Past()
    past.back_s = 900.0
    recorder = Recorder(past)
    for number in range(1500):
        past.back_s = 895.0 * (1 - number / 1500)
        is_bad = number % 40 == 0
        outcome = rng.choice([*Outcome]) if is_bad else Outcome.SUCCESS
        recorder.request_finished(account(number, rng, outcome))
        if number % 90 == 0:
            recorder.recompute_ended()
    past.back_s = 0.0
    return recorder


def crowd(count: int, rng: random.Random) -> list[InstanceRecord]:
    """Return half prefillers, half decoders, some of them in trouble."""
    made = []
    for number in range(count):
        role = Role.PREFILL if number < count // 2 else Role.DECODE
        state = rng.choices([*State][:4], weights=[2, 90, 3, 5])[0]
        kv_tokens = rng.randrange(400_000)
        made.append(
            record(
                role,
                f"gpu-node-{number:03}.cluster.example:7100",
                state=state,
                state_age_s=rng.uniform(0, 4000),
                requests=rng.randrange(200),
                compute_tokens=rng.randrange(60_000) if role is Role.PREFILL else 0,
                kv_tokens=kv_tokens,
                capacity_tokens=400_000 if number % 3 else None,
            )
        )
    return made


@asynccontextmanager
async def board(**options) -> AsyncIterator[Server]:
    """Serve the application; `made.roster.records` are the instances that it tells of."""
    async with server(p=[], d=[], **options) as made:
        made.roster.records = [record(Role.PREFILL), record(Role.DECODE, "10.0.1.1:7100")]
        async with listening(build_app(made.context)) as port:
            made.port = port
            yield made
