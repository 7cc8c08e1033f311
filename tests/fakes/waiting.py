"""Waiting for a condition with a bound, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Return when `condition` holds.

    Raises:
        TimeoutError: it did not within the bound.
    """
    async with asyncio.timeout(within_s):
        # What is waited for lies in other objects or processes, which set no event for us.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
