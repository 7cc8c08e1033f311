"""The gauges of instances, read from the fleet when scraped, so that nothing is kept twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, Role, State


class FleetCollector(Collector):
    """Reads state and load of the instances at scrape time, so that none is kept twice."""

    def __init__(self, fleet: Fleet) -> None:
        """Make a collector for a fleet."""
        self._fleet = fleet

    def collect(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
    ) -> Iterator[Metric]:
        """Yield the gauges of all instances; those that are gone have no series."""
        labels = ["role", "instance"]
        up = GaugeMetricFamily("pdproxy_instance_up", "1 if it may get requests.", labels=labels)
        states = GaugeMetricFamily(
            "pdproxy_instance_state", "1 for the state it is in.", labels=[*labels, "state"]
        )
        requests = GaugeMetricFamily(
            "pdproxy_instance_requests_in_flight", "Legs in flight.", labels=labels
        )
        load = GaugeMetricFamily(
            "pdproxy_instance_load_tokens",
            "Prompt tokens to compute, on a prefiller; KV tokens held, on a decoder.",
            labels=labels,
        )
        pinned = GaugeMetricFamily(
            "pdproxy_instance_kv_tokens", "Tokens whose KV cache is held.", labels=labels
        )
        for instance in self._instances():
            key = [instance.role.value, instance.label]
            state, held = self._fleet.state(instance), self._fleet.load(instance)
            up.add_metric(key, float(state is State.ACTIVE))
            for each in State:
                if each is not State.GONE:
                    states.add_metric([*key, each.value], float(state is each))
            requests.add_metric(key, held.requests)
            is_prefill = instance.role is Role.PREFILL
            load.add_metric(key, held.compute_tokens if is_prefill else held.kv_tokens)
            pinned.add_metric(key, held.kv_tokens)
        yield from (up, states, requests, load, pinned)

    def _instances(self) -> Iterator[Instance]:
        for role in Role:
            yield from self._fleet.instances(role)
