"""What is added up reaches the metrics whole, and as if it had been told one at a time."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdproxy.runtime import tally as tallies
from pdproxy.runtime.tally import Tally, flushing
from tests.fakes.waiting import until

EDGES = (0.5, 1.0, 4.0)
VALUES = (0.0, 0.5, 0.75, 1.0, 3.0, 100.0)


@pytest.fixture
def registry():
    return CollectorRegistry()


def samples(metric):
    (family,) = metric.collect()
    return {
        (s.name, tuple(s.labels.items())): s.value
        for s in family.samples
        if not s.name.endswith("_created")
    }


def test_counts_come_by_labels_and_once(registry):
    counter = Counter("x", "x", ["a"], registry=registry)
    tally = Tally()
    for label, amount in (("p", 1), ("q", 2.5), ("p", 1)):
        tally.counted(counter, label).amount += amount
    assert samples(counter) == {}

    tally.flush()
    tally.flush()

    assert samples(counter) == {
        ("x_total", (("a", "p"),)): 2.0,
        ("x_total", (("a", "q"),)): 2.5,
    }


def test_kept_series_goes_on_counting(registry):
    histogram = Histogram("x", "x", ["a"], buckets=EDGES, registry=registry)
    tally = Tally()
    kept = tally.observed(histogram, "p")
    tally.flush()
    assert samples(histogram) == {}
    for _ in range(2):
        kept.add(0.75)
        tally.flush()

    assert tally.observed(histogram, "p") is kept
    found = {name: value for (name, _), value in samples(histogram).items()}
    assert (found["x_count"], found["x_sum"]) == (2.0, 1.5)


def test_gauge_goes_up_and_down(registry):
    gauge = Gauge("x", "x", registry=registry)
    tally = Tally()
    for amount in (1, 1, -1):
        tally.counted(gauge).amount += amount
    tally.flush()

    assert samples(gauge) == {("x", ()): 1.0}


@pytest.mark.parametrize("labels", [(), ("p",)])
def test_observations_are_what_the_library_makes_of_them(registry, labels):
    names = ["a"][: len(labels)]
    ours = Histogram("x", "x", names, buckets=EDGES, registry=registry)
    theirs = Histogram("x", "x", names, buckets=EDGES, registry=CollectorRegistry())
    tally = Tally()
    for value in VALUES:
        tally.observed(ours, *labels).add(value)
        (theirs.labels(*labels) if labels else theirs).observe(value)
    tally.flush()

    assert samples(ours) == samples(theirs)


def test_counts_per_bucket_are_added_to_what_was_observed(registry):
    histogram = Histogram("x", "x", ["a"], buckets=EDGES, registry=registry)
    tally = Tally()
    tally.observed(histogram, "p").add(2.0)
    tally.observed(histogram, "p").add_all([1, 0, 2, 1], 50.0)
    tally.flush()

    found = {name: value for (name, _), value in samples(histogram).items()}
    assert (found["x_count"], found["x_sum"]) == (5.0, 52.0)


async def test_flush_comes_now_and_then_and_at_the_end(monkeypatch):
    monkeypatch.setattr(tallies, "FLUSH_S", 0.001)
    calls = []

    async with flushing(lambda: calls.append(1)):
        await until(lambda: len(calls) > 2)
        before = len(calls)

    assert len(calls) == before + 1
