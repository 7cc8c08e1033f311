"""What the dashboard is sent: the history as series and percentiles, and the instances.

Rule: a plain value made of plain values, so it is tested without a server.
"""

from __future__ import annotations

from collections import deque

import msgspec

from pdproxy.core.durations import percentiles
from pdproxy.core.history import (
    BUCKET_S,
    BUCKETS,
    Bucket,
    Failure,
    InstanceError,
    Recent,
    add_counts,
)
from pdproxy.core.record import InstanceRecord
from pdproxy.dispatch.account import Outcome

SHARES = (0.5, 0.9, 0.99)
# What went wrong here or on engines, and not by the clients' own doing.
FAULTS = frozenset(o.value for o in Outcome if o is not Outcome.SUCCESS and not o.is_clients)
# Percentiles of a point are over this many buckets: those of 5 s alone are mostly noise.
SMOOTHED = 6
# "Now" in words and numbers is the last minute.
MINUTE = 60 // BUCKET_S

Percentiles = tuple[float, ...] | None


class Point(msgspec.Struct):
    """One bucket that is over.

    Attributes:
        at_s: its begin, wall-clock seconds since 1970.
        failed: those whose outcome is one of FAULTS.
        ttft_s, tpot_s: percentiles (SHARES) of the 30 s that end with it, null without requests.
    """

    at_s: int
    requests: int
    failed: int
    output_tokens: int
    recomputes: int
    ttft_s: Percentiles
    tpot_s: Percentiles


class Totals(msgspec.Struct):
    """Sums over `seconds`, which are fewer shortly after the start."""

    seconds: float
    requests: int
    failed: int
    outcomes: dict[str, int]
    output_tokens: int
    recomputes: int
    ttft_s: Percentiles
    tpot_s: Percentiles


class Feed(msgspec.Struct):
    """The whole of `GET /dashboard/data`."""

    version: str
    now_s: float
    started_s: float
    is_stopping: bool
    in_flight: int
    bucket_s: int
    window_s: int
    shares: tuple[float, ...]
    points: list[Point]
    minute: Totals
    window: Totals
    instances: list[InstanceRecord]
    errors: list[InstanceError]
    failures: list[Failure]


def points(recent: Recent, since_s: float) -> list[Point]:
    """Return the points of the window that are over and begin at `since_s` or later."""
    newest = int(recent.now_s // BUCKET_S) - 1
    first = max(newest - BUCKETS + 2, int(recent.started_s // BUCKET_S))
    # A client may ask for any time at all.
    first_wanted = max(first, int(min(max(since_s, 0.0), recent.now_s) // BUCKET_S))
    smooth = _Smooth(recent)
    for index in range(max(first, first_wanted - SMOOTHED + 1), first_wanted):
        smooth.move_to(index)
    return [smooth.point(index) for index in range(first_wanted, newest + 1)]


def totals(recent: Recent, buckets: int) -> Totals:
    """Return the sums over that many buckets that are over, and the one that runs."""
    index = int(recent.now_s // BUCKET_S)
    begin_s = max((index - buckets + 1) * BUCKET_S, recent.started_s)
    sum_ = Bucket(index)
    for at in range(index - buckets + 1, index + 1):
        if (bucket := recent.buckets.get(at)) is not None:
            sum_.add(bucket)
    return Totals(
        seconds=max(0.0, recent.now_s - begin_s),
        requests=sum(sum_.outcomes.values()),
        failed=_failed(sum_),
        outcomes=sum_.outcomes,
        output_tokens=sum_.output_tokens,
        recomputes=sum_.recomputes,
        ttft_s=percentiles(sum_.ttft, SHARES),
        tpot_s=percentiles(sum_.tpot, SHARES),
    )


def _failed(bucket: Bucket) -> int:
    return sum(n for outcome, n in bucket.outcomes.items() if outcome in FAULTS)


class _Smooth:
    """Percentiles over the last SMOOTHED buckets, moved along one by one."""

    def __init__(self, recent: Recent) -> None:
        self._buckets = recent.buckets
        self._inside: deque[Bucket] = deque()
        self._ttft: dict[int, int] = {}
        self._tpot: dict[int, int] = {}

    def move_to(self, index: int) -> Bucket:
        """Take in the next bucket and let go of the oldest."""
        bucket = self._buckets.get(index) or Bucket(index)
        self._inside.append(bucket)
        self._add(bucket, 1)
        if len(self._inside) > SMOOTHED:
            self._add(self._inside.popleft(), -1)
        return bucket

    def point(self, index: int) -> Point:
        """Move to a bucket and return its point."""
        bucket = self.move_to(index)
        return Point(
            at_s=index * BUCKET_S,
            requests=sum(bucket.outcomes.values()),
            failed=_failed(bucket),
            output_tokens=bucket.output_tokens,
            recomputes=bucket.recomputes,
            ttft_s=percentiles(self._ttft, SHARES),
            tpot_s=percentiles(self._tpot, SHARES),
        )

    def _add(self, bucket: Bucket, times: int) -> None:
        add_counts(self._ttft, bucket.ttft, times)
        add_counts(self._tpot, bucket.tpot, times)
