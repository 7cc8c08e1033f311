"""Waiting for a condition with a bound, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Return when `condition` holds.

    Raises:
        TimeoutError: it did not within the bound.
    """
    async with asyncio.timeout(within_s):
        # What is waited for lies in other objects or processes, which set no event for us.
        while not condition():  # noqa: ASYNC110 - no event tells us
            await asyncio.sleep(0.005)


async def until_answer(ask: Callable[[], Awaitable[object]], within_s: float = 5.0) -> None:
    """Return when `ask` gives something true.

    Raises:
        TimeoutError: it did not within the bound.
    """
    async with asyncio.timeout(within_s):
        while not await ask():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
