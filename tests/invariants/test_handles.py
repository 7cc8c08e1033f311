"""Invariant 7: every KV handle received is used once or released."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from pdproxy.core.instance import Role
from tests.dispatch.stage import Stage, stage
from tests.fakes import behaviours
from tests.fakes.waiting import until
from tests.invariants.chaos import DECODERS, NO_REUSE, PREFILLERS, at_random, one_request


def handles_sent(play: Stage) -> Counter[str]:
    return Counter(
        str(call.json["kv_transfer_params"]["remote_request_id"])
        for engine in play.d
        for call in engine.calls
        if "kv_transfer_params" in call.json
    )


def handles_released(play: Stage) -> Counter[str]:
    return Counter(
        str(call.json["kv_transfer_params"]["remote_request_id"])
        for engine in play.d
        for call in engine.releases
    )


@pytest.mark.parametrize("seed", range(4))
async def test_no_handle_is_sent_twice_or_forgotten(seed):
    rng = random.Random(seed)
    good = [b for b in PREFILLERS if b is not behaviours.hang]
    p = [at_random(rng, good) for _ in range(2)]
    d = [at_random(rng, DECODERS) for _ in range(2)]

    async with stage(p, d, limits=NO_REUSE) as play:
        await asyncio.gather(*(one_request(play, rng) for _ in range(30)))
        await until(lambda: play.orphans.is_idle)
        sent = handles_sent(play)
        released = handles_released(play)
        given = sum(1 for role, outcome, _ in play.observer.attempts if is_handle(role, outcome))

    assert set(sent.values()) <= {1}
    # A prefill that succeeded gave a handle or was told as missing one.
    received = given - play.observer.missing
    assert len(set(sent) | set(released)) >= received
    assert set(play.observer.abandoned) <= {"released"}


def is_handle(role: Role, outcome: str) -> bool:
    return role is Role.PREFILL and outcome == "success"


async def test_refused_handle_goes_to_one_other_decoder():
    async with stage(d=[None, None]) as play:
        await play.d[0].stop()
        rng = random.Random(1)
        await asyncio.gather(*(one_request(play, rng) for _ in range(10)))

        assert set(handles_sent(play).values()) <= {1}
        assert not [call for call in play.d[1].calls if call.stale]
