"""The metrics page of several workers: what all of them wrote, added up by the one that is asked.

Rule: the page is put together in a thread from files in memory; the loop only takes what is its
own. Series of instances that are gone are left out, as the files keep what was written once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Role
from pdproxy.runtime.metrics import Metrics

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # where the library looks
_EARLIEST = "process_start_time_seconds"  # of several processes; all else of them is added up


def share_metrics(directory: str, row: int) -> None:
    """Let every metric that is made from now on be kept in files that all workers read.

    The files are named by the row, so that a worker goes on counting where the one that it
    replaces has ended.
    """
    os.environ[DIRECTORY_VARIABLE] = directory
    values.ValueClass = values.MultiProcessValue(lambda: row)  # type: ignore[no-untyped-call] # as it comes


class SharedPage:
    """Makes the page; call it with an `Accept` header."""

    def __init__(
        self,
        directory: str,
        metrics: Metrics,
        fleet: Fleet,
        pids: Callable[[], Collection[int]],
    ) -> None:
        """Make a page of the files in a directory; `pids` are the processes that count."""
        self._directory = directory
        self._metrics = metrics
        self._fleet = fleet
        self._pids = pids
        self._turn = asyncio.Lock()

    async def __call__(self, accept: str) -> tuple[bytes, str]:
        """Return the page in the format that a scraper accepts, and its content type."""
        self._metrics.prepare()
        registry = CollectorRegistry(auto_describe=False)
        instances = [i for role in Role for i in self._fleet.instances(role)]
        known = {(role, i.label) for i in instances for role in (i.role.value, None)}
        registry.register(self._metrics.gauges)
        registry.register(_Written(self._directory, known))
        registry.register(_Processes(self._pids()))
        PlatformCollector(registry=registry)
        encode, content_type = choose_encoder(accept)
        # One at a time: several scrapers at once would only take the processor from each other.
        async with self._turn:
            return await asyncio.to_thread(encode, registry), content_type


class _Written(Collector):
    """What the workers wrote, those included that were replaced."""

    def __init__(self, directory: str, known: set[tuple[str | None, str]]) -> None:
        self._directory = directory
        self._known = known

    def collect(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
    ) -> Iterator[Metric]:
        found = MultiProcessCollector(None, self._directory)  # type: ignore[no-untyped-call] # as it comes
        for metric in found.collect():  # type: ignore[no-untyped-call] # as it comes
            metric.samples = [sample for sample in metric.samples if self._is_known(sample)]
            yield metric

    def _is_known(self, sample: Sample) -> bool:
        labels = sample.labels
        return "instance" not in labels or (labels.get("role"), labels["instance"]) in self._known


class _Processes(Collector):
    """What the system says of all processes of the proxy together."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = tuple(pids)

    def collect(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
    ) -> Iterable[Metric]:
        total: dict[str, Metric] = {}
        for pid in self._pids:
            found = ProcessCollector(pid=partial(int, pid), registry=CollectorRegistry())
            for metric in found.collect():
                if metric.name in total:
                    _add(total[metric.name], metric)
                else:
                    total[metric.name] = metric
        return total.values()


def _add(total: Metric, metric: Metric) -> None:
    """Add one process's value; a metric of a process has one sample without labels."""
    ours, other = total.samples[0], metric.samples[0]
    is_time = metric.name == _EARLIEST
    value = min(ours.value, other.value) if is_time else ours.value + other.value
    total.samples = [ours._replace(value=value)]
