"""Prefills of answers that do not get on: few at a time, and with rests, to leave room for others.

Rule: where all prefillers are kept busy by such answers, they still have four fifths of their time
for others, for each of these prefills is followed by a rest of four times its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

REST = 4.0  # times the turn
MAX_REST_S = 5.0  # as the longest pause between attempts


class Turns:
    """Counts who is at it or resting; who finds it full waits."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, most: int) -> AsyncIterator[None]:
        """Wait until fewer than `most` are at it, one at least, and be one of them."""
        loop = asyncio.get_running_loop()
        while self._taken >= max(1, most):
            waiter = loop.create_future()
            self._waiting.append(waiter)
            await waiter
        self._taken += 1
        began_s = loop.time()
        try:
            yield
        finally:
            loop.call_later(min(MAX_REST_S, REST * (loop.time() - began_s)), self._free)

    def _free(self) -> None:
        self._taken -= 1
        # All are woken, in their order: one alone might be cancelled just now.
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
