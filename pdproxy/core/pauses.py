"""Instances that have asked to be left alone for a while, by 429 or 503 with Retry-After.

Rule: they are avoided, not left out: if no other instance is available, they are asked.
"""

from __future__ import annotations

from collections.abc import Collection

from pdproxy.core.instance import Instance


class Pauses:
    """Who is paused until when; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._until: dict[Instance, float] = {}

    def note(self, instance: Instance, until_s: float) -> None:
        """Leave an instance alone until then."""
        self._until[instance] = max(until_s, self._until.get(instance, until_s))

    def current(self, now_s: float) -> Collection[Instance]:
        """Return who is to be left alone now."""
        if not self._until:
            return ()
        self._until = {i: until_s for i, until_s in self._until.items() if until_s > now_s}
        return self._until.keys()
