"""How long an engine may take for its next step; one timer that looks when it rings.

Rule: an exchange or a read costs no timer. The timer outlives exchanges, so that most of them find
one that rings early enough and then arms itself again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# uvloop counts whole milliseconds: a timer may ring that much early.
_CLOCK_STEP_S = 0.002


class Watch:
    """Calls `expired` when nothing was noted for the current limit.

    Attributes:
        since_s: loop time of the last step; who notes a step often writes it here.
        limit_s: from `since_s` on; None while nothing is expected.
    """

    __slots__ = ("_at_s", "_expired", "_loop", "_timer", "limit_s", "since_s", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0
        self.time = loop.time
        self.since_s = 0.0
        self.limit_s: float | None = None

    def expect(self, limit_s: float | None) -> None:
        """Start anew with this limit."""
        self.limit_s = limit_s
        if limit_s is None:
            return
        self.since_s = now_s = self.time()
        at_s = now_s + limit_s
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._arm(at_s)

    def stop(self) -> None:
        """Expect nothing for good."""
        self.limit_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at_s: float) -> None:
        self._at_s = at_s
        self._timer = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self.limit_s is None:
            return
        at_s = self.since_s + self.limit_s
        if at_s - self.time() > _CLOCK_STEP_S:
            self._arm(at_s)
        else:
            self._expired()
