"""Counts of metrics on their way to the library, which takes a look-up and a lock for each.

Rule: what happens per request is added up here in plain numbers, and reaches the metrics when they
are read, and every second at the latest; more often where other processes read them, too.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import Counter, Gauge, Histogram

from pdproxy.tasks import spawn

FLUSH_S = 1.0


class Count:
    """What is to be added to one series of a counter or a gauge."""

    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount = 0.0


class Observed:
    """Observations of one series of a histogram: how many per bucket, and their sum."""

    __slots__ = ("_edges", "counts", "sum_s")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.counts = [0] * len(self._edges)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Observe a value."""
        self.counts[bisect_left(self._edges, seconds)] += 1
        self.sum_s += seconds

    def add_all(self, counts: Sequence[int], sum_s: float) -> None:
        """Add values that were put into the buckets of the metric already."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s


class Tally:
    """What was counted and observed since the last `flush`; used by one thread.

    Series of closed sets of labels are asked for once and kept by who counts in them.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._counted: dict[tuple[Counter | Gauge, tuple[str, ...]], Count] = {}
        self._observed: dict[tuple[Histogram, tuple[str, ...]], Observed] = {}

    def counted(self, metric: Counter | Gauge, *labels: str) -> Count:
        """Return what counts in a series, now and later."""
        key = (metric, labels)
        found = self._counted.get(key)
        if found is None:
            found = self._counted[key] = Count()
        return found

    def observed(self, metric: Histogram, *labels: str) -> Observed:
        """Return what observes for a series, now and later."""
        key = (metric, labels)
        found = self._observed.get(key)
        if found is None:
            edges = metric._upper_bounds  # noqa: SLF001 - see `_add`
            found = self._observed[key] = Observed(edges)
        return found

    def flush(self) -> None:
        """Let the metrics have it all; a series begins with its first count."""
        for (metric, labels), count in self._counted.items():
            if count.amount:
                (metric.labels(*labels) if labels else metric).inc(count.amount)
                count.amount = 0.0
        for (histogram, labels), seen in self._observed.items():
            if any(seen.counts):
                _add(histogram.labels(*labels) if labels else histogram, seen)
                seen.clear()


@asynccontextmanager
async def flushing(flush: Callable[[], None], every_s: float = FLUSH_S) -> AsyncIterator[None]:
    """Call `flush` so often while the block runs."""

    async def often() -> None:
        while True:
            await asyncio.sleep(every_s)
            flush()

    task = spawn(often(), name="flush of metrics")
    try:
        yield
    finally:
        task.cancel()
        flush()


def _add(series: Histogram, seen: Observed) -> None:
    # The library has no way to observe many values at once; a test compares the result with that
    # of one at a time.
    for bucket, count in zip(series._buckets, seen.counts, strict=True):  # noqa: SLF001 - as said
        if count:
            bucket.inc(count)
    series._sum.inc(seen.sum_s)  # noqa: SLF001 - as said
