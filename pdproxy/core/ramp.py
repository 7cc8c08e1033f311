"""Slow start: an instance that joins or returns takes a growing share of new requests.

It is idle, so whatever weighs load would send it every request until it is as full as the others,
with caches cold and, if it was ejected, before it has shown that it serves. So it is left out of
some of the choices: at most it is offered twice the even share, times a factor that grows to 1.
"""

from __future__ import annotations

# Of the even share at once, so that the first requests tell whether it serves.
FIRST_SHARE = 0.1
# Above the even share, so that by the end of the ramp it is about as full as the others.
CATCHING_UP = 2.0


class Ramp:
    """The slow start of one instance."""

    __slots__ = ("_credit", "_duration_s", "start_s")

    def __init__(self, start_s: float, duration_s: float) -> None:
        self.start_s = start_s
        self._duration_s = duration_s
        self._credit = 1.0  # so that it takes part in the first choice

    def share(self, now_s: float) -> float:
        """Return how far it has come, from FIRST_SHARE to 1."""
        if self._duration_s <= 0:
            return 1.0
        return min(1.0, max(FIRST_SHARE, (now_s - self.start_s) / self._duration_s))

    def takes_part(self, share: float, count: int) -> bool:
        """Say whether it is offered in this choice between `count` instances."""
        self._credit += min(1.0, CATCHING_UP * share / count)
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True
