"""Records what happens in the metrics of one process, and writes them out.

Rule: a model is a label only once an engine has taken its name, and only the first MAX_MODELS of
them; a client cannot make series.
"""

from __future__ import annotations

import asyncio
import threading
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from pdproxy import __version__
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, Role
from pdproxy.core.policy import Reason
from pdproxy.core.retry import Phase
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.fleet_metrics import FleetCollector
from pdproxy.runtime.instruments import OTHER_MODEL, Instruments
from pdproxy.runtime.request_series import RequestSeries
from pdproxy.runtime.tally import Count, Observed, Tally

MAX_MODELS = 64


class Metrics:
    """The metrics of one process, and the observer of dispatch and server."""

    def __init__(self, fleet: Fleet) -> None:
        """Make all metrics in a registry of their own."""
        # A second series for each, which Prometheus' text format has no use for.
        disable_created_metrics()  # type: ignore[no-untyped-call] # as it comes
        self.registry = CollectorRegistry()
        self._fleet = fleet
        self._models: set[str] = set()
        self._series: dict[tuple[str, str, bool], RequestSeries] = {}
        self._writing = threading.Lock()
        self._shown: set[Instance] = set()
        self._in_flight = 0
        self._made = Instruments(self.registry)
        self._tally = Tally()
        self._routed: dict[tuple[Role, Reason], Count] = {}
        self._started = _Started(self._made, self._tally)
        self._attempts: dict[tuple[Instance, str], int] = {}
        self._attempt_seconds: dict[Role, Observed] = {}
        self._begin_legs()
        build = Gauge(
            "pdproxy_build_info",
            "Always 1.",
            ["version"],
            registry=self.registry,
            multiprocess_mode="max",
        )
        build.labels(__version__).set(1)
        self.gauges = FleetCollector(fleet)
        self.registry.register(self.gauges)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    # --- server: one client request

    def request_started(self, endpoint: str) -> None:
        """Count a request that has come in."""
        self._in_flight += 1
        self._started[endpoint].amount += 1

    def request_finished(self, account: Account) -> None:
        """Count a request that has ended, once, under its outcome."""
        self._in_flight -= 1
        self._series_of(account).count(account)
        if account.outcome is Outcome.REJECTED:
            self._made.rejected.labels(account.code).inc()
        elif account.outcome is Outcome.CLIENT_DISCONNECTED:
            self._made.disconnects.labels(account.timeline.stage).inc()
        if account.rounds > 1:
            self._made.rounds.observe(account.rounds - 1)

    def flush(self) -> None:
        """Let what was counted reach the metrics, where other processes can read it."""
        attempts, self._attempts = self._attempts, {}
        for (instance, outcome), count in attempts.items():
            self._made.attempts.labels(instance.role, instance.label, outcome).inc(count)
        self._tally.flush()

    @property
    def in_flight(self) -> int:
        """Requests begun and not finished."""
        return self._in_flight

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return what `exposition` does; a thread writes it, since that takes too long here."""
        self.prepare()
        return await asyncio.to_thread(self._written, accept)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics in the format that a scraper accepts, and its content type."""
        self.prepare()
        return self._written(accept)

    def begin_instances(self) -> None:
        """Make the series of all instances, so that a first failure shows as a change."""
        for role in Role:
            for instance in self._fleet.instances(role):
                self._made.begin_instance(role, instance.label)

    # --- dispatch: what happens on the way

    def queue_changed(self, change: int) -> None:
        """Count those that wait for their turn."""
        self._made.queue_depth.inc(change)

    def queue_left(self, seconds: float) -> None:
        """Observe the time that one has waited."""
        self._made.queue_wait.observe(seconds)

    def pulse_full(self, account: Account) -> None:
        """Count the gaps of a stream that still runs."""
        self._series_of(account).count_gaps(account)

    def routed(self, role: Role, reason: Reason) -> None:
        """Count the choice of an instance."""
        self._routed[role, reason].amount += 1

    def attempt_finished(
        self, instance: Instance, outcome: str, seconds: float, reason: str = ""
    ) -> None:
        """Count one attempt of a leg."""
        key = (instance, outcome)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        self._attempt_seconds[instance.role].add(seconds)
        if reason:
            self._made.attempt_errors.labels(instance.role, instance.label, reason).inc()
            self.attempt_failed(instance, reason)

    def attempt_failed(self, instance: Instance, reason: str) -> None:
        """Do what else is due when an attempt has failed; here, nothing."""

    def retried(self, role: Role, reason: str) -> None:
        """Count a leg that is tried again."""
        self._made.retries.labels(role, reason).inc()

    def failed_over(self, role: Role, phase: Phase, result: str) -> None:
        """Count an attempt on another instance than the one that failed."""
        self._made.failovers.labels(role, phase, result).inc()

    def prefill_skipped(self, reason: str) -> None:
        """Count a request that a decoder computes alone."""
        self._made.skipped.labels(reason).inc()

    def ran_out(self, instance: Instance) -> None:
        """Count an answer that a decoder gave back."""
        self._made.exhausted.labels(instance.label).inc()

    def recompute_ended(self, decoder: str, result: str) -> None:
        """Count a further round of an answer."""
        self._made.recomputes.labels(decoder, result).inc()

    def recomputed_tokens(self, model: str, tokens: int) -> None:
        """Count prompt tokens that a further round computed again."""
        label = model if model in self._models else OTHER_MODEL
        self._made.recomputed_tokens.labels(label).inc(tokens)

    def handle_missing(self, instance: Instance) -> None:
        """Count a prefill that gave no KV handle."""
        self._made.handles_missing.labels(instance.label).inc()

    def handle_abandoned(self, instance: Instance, action: str) -> None:
        """Count a KV handle that was not used."""
        self._made.handles_abandoned.labels(instance.label, action).inc()

    def prefill_reply_lost(self, instance: Instance) -> None:
        """Count a prefill that may have been computed for nothing."""
        self._made.replies_lost.labels(instance.label).inc()

    # --- inside

    def prepare(self) -> None:
        """Read fleet and tally, on the loop; let the series of new instances begin."""
        self.flush()
        self.gauges.read()
        instances = {i for role in Role for i in self._fleet.instances(role)}
        for instance in instances - self._shown:
            self._made.begin_instance(instance.role, instance.label)
        self._shown = instances

    def _written(self, accept: str) -> tuple[bytes, str]:
        """Write the page, without series of instances that are gone."""
        encode, content_type = choose_encoder(accept)
        known = {(role, i.label) for i in self._shown for role in (i.role.value, None)}
        with self._writing:
            for counter in self._made.by_instance:
                _forget_others(counter, known)
            return encode(self.registry), content_type

    def _begin_legs(self) -> None:
        """Look up what each attempt counts in."""
        for role, reason in product(Role, Reason):
            labels = (role.value, self._fleet.policy(role), reason.value)
            self._made.routed.labels(*labels)
            self._routed[role, reason] = self._tally.counted(self._made.routed, *labels)
        for role in Role:
            seconds = self._tally.observed(self._made.attempt_seconds, role.value)
            self._attempt_seconds[role] = seconds

    def _series_of(self, account: Account) -> RequestSeries:
        """Return where a request is counted; its model counts as known from now on."""
        key = (account.endpoint, self._model(account), account.is_stream)
        found = self._series.get(key)
        if found is None:
            endpoint, model, is_stream = key
            found = RequestSeries(self._made, self._tally, endpoint, model, is_stream=is_stream)
            self._series[key] = found
        return found

    def _model(self, account: Account) -> str:
        model = account.model
        if model in self._models:
            return model
        if account.is_model_known and model and len(self._models) < MAX_MODELS:
            self._models.add(model)
            return model
        return OTHER_MODEL


class _Started(dict[str, Count]):
    """What counts the requests in flight, by endpoint."""

    def __init__(self, made: Instruments, tally: Tally) -> None:
        self._made = made
        self._tally = tally

    def __missing__(self, endpoint: str) -> Count:
        self[endpoint] = found = self._tally.counted(self._made.in_flight, endpoint)
        return found


def _forget_others(counter: Counter, known: set[tuple[str | None, str]]) -> None:
    """Drop the series of instances that are not known any more, by role if they have one."""
    for metric in counter.collect():
        for sample in metric.samples:
            labels = sample.labels
            if (labels.get("role"), labels["instance"]) not in known:
                counter.remove(*labels.values())
