"""The gauges of instances, read from the fleet when scraped, so that nothing is kept twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, Role, State

LABELS = ("role", "instance")
_OPEN = 2.0  # of the circuit
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
            *self._engines(instances),
        )

    def collect(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
    ) -> Iterator[Metric]:
        """Yield the gauges of all instances."""
        yield from self._gauges

    def _states(self, instances: list[Instance]) -> Iterator[Metric]:
        up = _gauge("up", "1 if it may get requests.")
        states = _gauge("state", "1 for the state it is in.", "state")
        circuit = _gauge(
            "circuit_state",
            "0: closed; 1: half open, the next failed request ejects it again; 2: open, ejected.",
        )
        available = GaugeMetricFamily(
            "pdproxy_instances_available",
            "Instances that may get requests now and are not known to be dead.",
            labels=["role"],
        )
        for instance in instances:
            key, state = _key(instance), self._fleet.state(instance)
            up.add_metric(key, float(state is State.ACTIVE))
            is_tried = state is State.ACTIVE and self._fleet.is_on_trial(instance)
            circuit.add_metric(key, _OPEN if state is State.EJECTED else float(is_tried))
            for each in STATES:
                states.add_metric([*key, each.value], float(state is each))
        for role in Role:
            available.add_metric([role.value], self._fleet.ready_count(role))
        yield from (up, states, circuit, available)

    def _loads(self, instances: list[Instance]) -> Iterator[Metric]:
        requests = _gauge("requests_in_flight", "Legs in flight.")
        text = "Prompt tokens to compute, on a prefiller; KV tokens held, on a decoder."
        load = _gauge("load_tokens", text)
        text = (
            "KV tokens by the proxy's own count: prompts, and on a decoder their expected output."
        )
        pinned = _gauge("kv_tokens", text)
        for instance in instances:
            key, held = _key(instance), self._fleet.load(instance)
            requests.add_metric(key, held.requests)
            is_prefill = instance.role is Role.PREFILL
            load.add_metric(key, held.compute_tokens if is_prefill else held.kv_tokens)
            pinned.add_metric(key, held.kv_tokens)
        yield from (requests, load, pinned)

    def _capacities(self, instances: list[Instance]) -> Iterator[Metric]:
        capacity = _gauge("kv_capacity_tokens", "Tokens that its KV cache holds, where known.")
        text = "Forecast: KV tokens by the proxy's own count of those it can hold; may be above 1."
        usage = _gauge("kv_usage_ratio", text)
        for instance in instances:
            tokens = self._fleet.capacity_tokens(instance)
            if tokens:
                capacity.add_metric(_key(instance), tokens)
                held = self._fleet.load(instance).kv_tokens
                usage.add_metric(_key(instance), held / tokens)
        yield from (capacity, usage)

    def _engines(self, instances: list[Instance]) -> Iterator[Metric]:
        usage = _gauge("engine_kv_usage_ratio", "Part of the KV cache in use, as its engine says.")
        running = _gauge("engine_requests_running", "Requests it works on, as its engine says.")
        waiting = _gauge("engine_requests_waiting", "Requests in its queue, as its engine says.")
        for instance in instances:
            key, report = _key(instance), self._fleet.engine_report(instance)
            _add(usage, key, report.kv_usage)
            _add(running, key, report.running)
            _add(waiting, key, report.waiting)
        yield from (usage, running, waiting)


def _gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pdproxy_instance_{name}", text, labels=[*LABELS, *more])


def _add(gauge: GaugeMetricFamily, key: list[str], value: float | None) -> None:
    """Add a sample; what is not known has none."""
    if value is not None:
        gauge.add_metric(key, value)


def _key(instance: Instance) -> list[str]:
    return [instance.role.value, instance.label]
