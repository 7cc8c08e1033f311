"""Invariant 1: every charge is released exactly once, whatever becomes of its request."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.dispatch.stage import stage
from tests.fakes.waiting import until
from tests.invariants.chaos import DECODERS, PREFILLERS, at_random, one_request


@pytest.mark.parametrize("seed", range(4))
async def test_no_load_is_left_by_any_request(seed):
    rng = random.Random(seed)
    p = [at_random(rng, PREFILLERS) for _ in range(2)]
    d = [at_random(rng, DECODERS) for _ in range(2)]

    # The load board raises on a release that was not charged.
    async with stage(p, d) as play:
        await asyncio.gather(*(one_request(play, rng) for _ in range(40)))

        play.assert_idle()
        await until(lambda: not any(engine.open_answers for engine in (*play.p, *play.d)))
