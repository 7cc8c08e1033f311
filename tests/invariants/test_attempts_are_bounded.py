"""Invariant 5: attempts per leg are bounded, whatever the engines do."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from pdproxy.core.instance import Role
from pdproxy.errors import PDProxyError
from tests.dispatch.stage import FakeDownstream, stage
from tests.fakes import behaviours
from tests.invariants.chaos import CHAT, DECODERS, NO_REUSE, PREFILLERS, at_random

ENDING = [[b for b in choices if b is not behaviours.hang] for choices in (PREFILLERS, DECODERS)]


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("ttl_s", [25, -1], ids=["fresh-handles", "stale-handles"])
async def test_no_leg_is_tried_more_often_than_allowed(most, ttl_s):
    for seed in range(8):
        rng = random.Random(seed)
        p = [at_random(rng, ENDING[0]) for _ in range(2)]
        d = [at_random(rng, ENDING[1][:-1]) for _ in range(2)]  # the last one hangs in the middle
        rules = {"max_attempts": most, "kv_handle_ttl_s": ttl_s}
        async with stage(p, d, limits=NO_REUSE, **rules) as play:
            if seed % 2:
                await play.d[0].stop()
            body = {**CHAT, "stream": bool(seed % 3)}
            with suppress(PDProxyError):
                async with asyncio.timeout(20):
                    await play.run(FakeDownstream(), body)

        made = [role for role, _, _ in play.observer.attempts]
        assert made.count(Role.PREFILL) <= most
        assert made.count(Role.DECODE) <= most
        assert max(play.calls) <= most
