"""The only place that creates tasks: each is referenced while it runs, its crash is reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

# asyncio holds tasks weakly: one that nobody references may be collected while it waits.
_RUNNING: set[asyncio.Task[Any]] = set()


def spawn(coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Run `coroutine` as a task called `name`; log its exception if it dies of one."""
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _RUNNING.add(task)
    task.add_done_callback(_report)
    return task


async def keep_calling(act: Callable[[], None], every_s: float, name: str) -> None:
    """Call `act` again and again, for what must not end by a bug; the first of a row is logged."""
    is_failing = False
    while True:
        await asyncio.sleep(every_s)
        try:
            act()
        except Exception:
            if not is_failing:
                logger.exception("%s failed by a bug; it is tried again", name)
            is_failing = True
        else:
            is_failing = False


def _report(task: asyncio.Task[Any]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task %s died", task.get_name(), exc_info=error)
