"""The gauges of instances, read from the fleet when scraped, so that nothing is kept twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, Role, State

LABELS = ("role", "instance")
# The state of one that is gone has no series, as it has none itself.
STATES = tuple(state for state in State if state is not State.GONE)


class FleetCollector(Collector):
    """Reads state and load of the instances; those that are gone have no series.

    The fleet belongs to the event loop, while metrics may be written by another thread. So what it
    says is read by a call of its own.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Make a collector for a fleet."""
        self._fleet = fleet
        self.read()

    def read(self) -> None:
        """Take the state of the fleet as it is now, for the next `collect`."""
        instances = [i for role in Role for i in self._fleet.instances(role)]
        self._gauges = (
            *self._states(instances),
            *self._loads(instances),
            *self._capacities(instances),
        )

    def collect(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
    ) -> Iterator[Metric]:
        """Yield the gauges of all instances."""
        yield from self._gauges

    def _states(self, instances: list[Instance]) -> Iterator[Metric]:
        up = _gauge("up", "1 if it may get requests.")
        states = _gauge("state", "1 for the state it is in.", "state")
        available = GaugeMetricFamily(
            "pdproxy_instances_available",
            "Instances that may get requests now and are not known to be dead.",
            labels=["role"],
        )
        for instance in instances:
            key, state = _key(instance), self._fleet.state(instance)
            up.add_metric(key, float(state is State.ACTIVE))
            for each in STATES:
                states.add_metric([*key, each.value], float(state is each))
        for role in Role:
            available.add_metric([role.value], self._fleet.ready_count(role))
        yield from (up, states, available)

    def _loads(self, instances: list[Instance]) -> Iterator[Metric]:
        requests = _gauge("requests_in_flight", "Legs in flight.")
        text = "Prompt tokens to compute, on a prefiller; KV tokens held, on a decoder."
        load = _gauge("load_tokens", text)
        pinned = _gauge("kv_tokens", "Tokens whose KV cache is held.")
        for instance in instances:
            key, held = _key(instance), self._fleet.load(instance)
            requests.add_metric(key, held.requests)
            is_prefill = instance.role is Role.PREFILL
            load.add_metric(key, held.compute_tokens if is_prefill else held.kv_tokens)
            pinned.add_metric(key, held.kv_tokens)
        yield from (requests, load, pinned)

    def _capacities(self, instances: list[Instance]) -> Iterator[Metric]:
        capacity = _gauge("kv_capacity_tokens", "Tokens that its KV cache holds, where known.")
        usage = _gauge("kv_usage_ratio", "KV tokens held of those it can hold, where known.")
        for instance in instances:
            tokens = self._fleet.capacity_tokens(instance)
            if tokens:
                capacity.add_metric(_key(instance), tokens)
                held = self._fleet.load(instance).kv_tokens
                usage.add_metric(_key(instance), held / tokens)
        yield from (capacity, usage)


def _gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pdproxy_instance_{name}", text, labels=[*LABELS, *more])


def _key(instance: Instance) -> list[str]:
    return [instance.role.value, instance.label]
