"""The orderly end: not ready at once, requests may finish, what is left is told and cut.

Rule: a client whose request is cut is told so, by a 503 or an error event; nobody is left hanging.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pdproxy.core.wording import counted
from pdproxy.errors import ShuttingDown
from pdproxy.tasks import spawn

logger = logging.getLogger(__name__)

CUT = "the proxy is shutting down"
# Between two log lines that say how many requests are left.
PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class ShutdownRules:
    """The operator's choices, in seconds.

    Attributes:
        delay_s: for how long requests are still accepted after the proxy has become not ready.
        grace_s: for requests to end, once no more are accepted.
    """

    delay_s: float
    grace_s: float


class Shutdown:
    """The end of one serving process: when it has begun, and which requests it still waits for."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._hurry = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[asyncio.Task[object]] = set()
        self._is_over = False
        self._cut: frozenset[asyncio.Task[object]] = frozenset()

    @property
    def has_begun(self) -> bool:
        """Whether the proxy is ending, so that balancers are to stay away."""
        return self._begun.is_set()

    @property
    def cut(self) -> int:
        """How many requests were not given the time to end."""
        return len(self._cut)

    def begin(self) -> None:
        """Begin to end; the second call takes the rest of the time that requests have."""
        if self._begun.is_set():
            self._hurry.set()
        self._begun.set()

    async def begun(self) -> None:
        """Wait until the end has begun."""
        await self._begun.wait()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the current task, which answers a request, waited for and in the end cut.

        Raises:
            ShuttingDown: the grace is over.
        """
        if self._is_over:
            raise ShuttingDown(CUT)
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._running.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._cut:
                raise  # the client left
            task.uncancel()
            raise ShuttingDown(CUT) from None
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    async def delay(self, rules: ShutdownRules) -> None:
        """Wait for as long as requests are still accepted."""
        if self._begun.is_set() and rules.delay_s > 0:
            logger.info("not ready; requests are accepted for another %g s", rules.delay_s)
            await _first(self._hurry.wait(), timeout_s=rules.delay_s)

    async def finish(self, rules: ShutdownRules) -> None:
        """Wait until the requests have ended, at most for the grace; then cut the others.

        Those that are cut still have to tell their clients when this returns.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + rules.grace_s
        while self._running and not self._hurry.is_set() and (left_s := end_s - clock()) > 0:
            running = counted(len(self._running), "request")
            logger.info("%s in flight may end within %.0f s", running, left_s)
            await _first(self._idle.wait(), self._hurry.wait(), timeout_s=min(left_s, PROGRESS_S))
        self._is_over = True
        self._cut = frozenset(self._running)
        if self._cut:
            logger.warning("the time is over, which cuts %s", counted(len(self._cut), "request"))
        for task in self._cut:
            task.cancel()


async def _first(*waits: Coroutine[Any, Any, object], timeout_s: float) -> None:
    """Wait until one of them is done, or the time is over."""
    tasks = [spawn(wait, name="shutdown") for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
