"""Instances that have gone of late, so that an operator sees what became of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.core.instance import Endpoint, Role
from pdproxy.core.record import InstanceRecord

KEPT = 32  # more than leave in one night
KEPT_S = 3600.0  # long enough to find out in the morning's first look


class Departed:
    """The latest of them, the oldest first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gone: dict[tuple[Role, tuple[str, int]], tuple[float, InstanceRecord]] = {}

    def note(self, record: InstanceRecord) -> None:
        """Keep one that has gone just now."""
        key = _key(record.role, Endpoint.parse(record.instance))
        self._gone.pop(key, None)
        self._gone[key] = (self._clock(), record)
        if len(self._gone) > KEPT:
            del self._gone[next(iter(self._gone))]

    def forget(self, role: Role, endpoint: Endpoint) -> None:
        """Drop one that has come back."""
        self._gone.pop(_key(role, endpoint), None)

    def find(self, role: Role, endpoint: Endpoint) -> InstanceRecord | None:
        """Return one that has gone of late."""
        _, record = self._gone.get(_key(role, endpoint), (0.0, None))
        return record

    def records(self) -> list[InstanceRecord]:
        """Return all that have gone of late."""
        now_s = self._clock()
        self._gone = {key: e for key, e in self._gone.items() if now_s - e[0] < KEPT_S}
        return [
            msgspec.structs.replace(record, state_age_s=now_s - gone_s)
            for gone_s, record in self._gone.values()
        ]


def _key(role: Role, endpoint: Endpoint) -> tuple[Role, tuple[str, int]]:
    return role, endpoint.key
