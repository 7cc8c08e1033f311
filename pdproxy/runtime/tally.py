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


class _Observed:
    """Observations of one series of a histogram: how many per bucket, and their sum."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * len(edges)
        self.sum = 0.0


class Tally:
    """What was counted and observed since the last `flush`; used by one thread."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._counted: dict[tuple[Counter | Gauge, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[Histogram, tuple[str, ...]], _Observed] = {}

    def count(self, metric: Counter | Gauge, *labels: str, amount: float = 1) -> None:
        """Add to a counter or a gauge."""
        key = (metric, labels)
        self._counted[key] = self._counted.get(key, 0) + amount

    def observe(self, metric: Histogram, value: float, *labels: str) -> None:
        """Observe a value."""
        observed = self._observed.get((metric, labels)) or self._begin(metric, labels)
        observed.counts[bisect_left(observed.edges, value)] += 1
        observed.sum += value

    def observe_all(
        self, metric: Histogram, counts: Sequence[int], sum_: float, *labels: str
    ) -> None:
        """Add values that were put into the buckets of the metric already."""
        observed = self._observed.get((metric, labels)) or self._begin(metric, labels)
        for index, count in enumerate(counts):
            observed.counts[index] += count
        observed.sum += sum_

    def flush(self) -> None:
        """Let the metrics have it all."""
        counted, self._counted = self._counted, {}
        for (metric, labels), amount in counted.items():
            (metric.labels(*labels) if labels else metric).inc(amount)
        observed, self._observed = self._observed, {}
        for (histogram, labels), seen in observed.items():
            _add(histogram.labels(*labels) if labels else histogram, seen)

    def _begin(self, metric: Histogram, labels: tuple[str, ...]) -> _Observed:
        observed = _Observed(metric._upper_bounds)  # noqa: SLF001 - see `_add`
        self._observed[metric, labels] = observed
        return observed


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


def _add(series: Histogram, seen: _Observed) -> None:
    # The library has no way to observe many values at once; a test compares the result with that
    # of one at a time.
    for bucket, count in zip(series._buckets, seen.counts, strict=True):  # noqa: SLF001 - as said
        if count:
            bucket.inc(count)
    series._sum.inc(seen.sum)  # noqa: SLF001 - as said
