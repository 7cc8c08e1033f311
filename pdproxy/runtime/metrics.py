"""The metrics that count: their names, labels and buckets; `fleet_metrics` has the gauges.

Rule: labels come from closed sets. A model is a label only once an engine has taken its name, and
only the first MAX_MODELS of them; a client cannot make series.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from pdproxy import __version__
from pdproxy.core.api import Api
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, Role
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.fleet_metrics import FleetCollector

MAX_MODELS = 64
OTHER_MODEL = "other"

# The edges of vLLM's own histograms, so that dashboards of both line up.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip

ROUND_BUCKETS = (1, 2, 3, 4, 5, 8, 12, 16, 32)

ENDPOINTS = (*(api.value for api in Api), "/v1/models", "passthrough")
STREAM_LABELS = {True: "true", False: "false"}


class Metrics:
    """The metrics of one process, and the observer of dispatch and server."""

    def __init__(self, fleet: Fleet) -> None:
        """Make all metrics in a registry of their own."""
        # A second series for each, which Prometheus' text format has no use for.
        disable_created_metrics()  # type: ignore[no-untyped-call] # as it comes
        self.registry = CollectorRegistry()
        self._fleet = fleet
        self._models: set[str] = set()
        self._in_flight = 0
        self._make_request_metrics()
        self._make_recompute_metrics()
        self._make_engine_metrics()
        build = Gauge("pdproxy_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        self.registry.register(FleetCollector(fleet))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    # --- server: one client request

    def request_started(self, endpoint: str) -> None:
        """Count a request that has come in."""
        self._in_flight += 1
        self._requests_in_flight.labels(endpoint).inc()

    def request_finished(self, account: Account) -> None:
        """Count a request that has ended, once, under its outcome."""
        self._in_flight -= 1
        endpoint, timeline = account.endpoint, account.timeline
        self._requests_in_flight.labels(endpoint).dec()
        model = self._model(account)
        stream = STREAM_LABELS[account.is_stream]
        self._requests.labels(endpoint, model, stream, str(account.status), account.outcome).inc()
        self._duration.labels(endpoint, model, stream).observe(timeline.total_s or 0.0)
        if timeline.ttft_s is not None:
            self._ttft.labels(endpoint, model).observe(timeline.ttft_s)
        if account.rounds > 1:
            self._rounds.observe(account.rounds - 1)
        self._observe_stages(account, model)
        self._count_tokens(account, model)

    @property
    def in_flight(self) -> int:
        """Requests begun and not finished."""
        return self._in_flight

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, without series of instances long gone."""
        instances = [i for role in Role for i in self._fleet.instances(role)]
        known = {(role, i.label) for i in instances for role in (i.role.value, None)}
        for counter in self._by_instance:
            _forget_others(counter, known)
        return generate_latest(self.registry)

    # --- dispatch: attempts on engines

    def attempt_finished(
        self, instance: Instance, outcome: str, seconds: float, reason: str = ""
    ) -> None:
        """Count one attempt of a leg."""
        self._attempts.labels(instance.role, instance.label, outcome).inc()
        self._attempt_seconds.labels(instance.role).observe(seconds)
        if reason:
            self._attempt_errors.labels(instance.role, instance.label, reason).inc()

    def retried(self, role: Role, reason: str) -> None:
        """Count a leg that is tried again."""
        self._retries.labels(role, reason).inc()

    def recompute_ended(self, decoder: str, result: str) -> None:
        """Count a further round of an answer."""
        self._recomputes.labels(decoder, result).inc()

    def recomputed_tokens(self, model: str, tokens: int) -> None:
        """Count prompt tokens that a further round computed again."""
        self._recomputed_tokens.labels(model if model in self._models else OTHER_MODEL).inc(tokens)

    def handle_missing(self, instance: Instance) -> None:
        """Count a prefill that gave no KV handle."""
        self._handles_missing.labels(instance.label).inc()

    def handle_abandoned(self, instance: Instance) -> None:
        """Count a KV handle that was not used."""
        self._handles_abandoned.labels(instance.label).inc()

    # --- inside

    def _make_request_metrics(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "pdproxy_requests",
            "Client requests that ended, once each.",
            ["endpoint", "model", "stream", "status_code", "outcome"],
            registry=registry,
        )
        self._requests_in_flight = Gauge(
            "pdproxy_requests_in_flight",
            "Client requests begun and not finished.",
            ["endpoint"],
            registry=registry,
        )
        self._duration = Histogram(
            "pdproxy_request_duration_seconds",
            "From the request to the end of its answer.",
            ["endpoint", "model", "stream"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._ttft = Histogram(
            "pdproxy_time_to_first_token_seconds",
            "From the request's body read to the first content written.",
            ["endpoint", "model"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._tpot = Histogram(
            "pdproxy_time_per_output_token_seconds",
            "(last content - first content) / (output tokens - 1), for streams with usage.",
            ["endpoint", "model"],
            buckets=TPOT_BUCKETS,
            registry=registry,
        )
        self._stages = Histogram(
            "pdproxy_stage_duration_seconds",
            "Where the time of a generate request went.",
            ["stage", "model"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._tokens = {
            name: Counter(f"pdproxy_{name}_tokens", text, ["model"], registry=registry)
            for name, text in (
                ("prompt", "Prompt tokens, as the engines counted."),
                ("cached_prompt", "Prompt tokens that the prefiller had in its prefix cache."),
                ("generation", "Output tokens, as the engines counted."),
            )
        }
        for endpoint in ENDPOINTS:
            self._requests_in_flight.labels(endpoint)
        for outcome in Outcome:
            self._requests.labels(Api.CHAT.value, OTHER_MODEL, "false", "0", outcome)

    def _make_engine_metrics(self) -> None:
        registry = self.registry
        self._attempts = Counter(
            "pdproxy_upstream_requests",
            "Attempts of legs on engines.",
            ["role", "instance", "outcome"],
            registry=registry,
        )
        self._attempt_errors = Counter(
            "pdproxy_upstream_errors",
            "Attempts of legs that failed.",
            ["role", "instance", "reason"],
            registry=registry,
        )
        self._attempt_seconds = Histogram(
            "pdproxy_upstream_request_duration_seconds",
            "Time of one attempt of a leg.",
            ["role"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._retries = Counter(
            "pdproxy_retries",
            "Legs tried again.",
            ["role", "reason"],
            registry=registry,
        )
        self._handles_missing = Counter(
            "pdproxy_kv_handoff_missing",
            "Prefills that gave no KV handle, so that the decoder computed the prompt.",
            ["instance"],
            registry=registry,
        )
        self._handles_abandoned = Counter(
            "pdproxy_kv_handoff_abandoned",
            "KV handles that were not used; the prefiller holds them until its lease ends.",
            ["instance"],
            registry=registry,
        )
        self._by_instance = (
            self._recomputes,
            self._attempts,
            self._attempt_errors,
            self._handles_missing,
            self._handles_abandoned,
        )
        for role in Role:
            self._attempt_seconds.labels(role)

    def _make_recompute_metrics(self) -> None:
        registry = self.registry
        self._recomputes = Counter(
            "pdproxy_recomputes",
            "Further rounds of answers that a decoder gave back or lost.",
            ["instance", "result"],
            registry=registry,
        )
        self._recomputed_tokens = Counter(
            "pdproxy_recomputed_tokens",
            "Prompt tokens that further rounds computed again.",
            ["model"],
            registry=registry,
        )
        self._rounds = Histogram(
            "pdproxy_recompute_attempts",
            "Further rounds per request that had any.",
            buckets=ROUND_BUCKETS,
            registry=registry,
        )

    def _model(self, account: Account) -> str:
        model = account.model
        if model in self._models:
            return model
        if account.is_model_known and model and len(self._models) < MAX_MODELS:
            self._models.add(model)
            return model
        return OTHER_MODEL

    def _observe_stages(self, account: Account, model: str) -> None:
        timeline = account.timeline
        stages = (
            ("prefill", timeline.prefill_s),
            ("handoff", timeline.handoff_s),
            ("first_token", timeline.first_token_s),
            ("decode", timeline.decode_s),
        )
        for stage, seconds in stages:
            if seconds is not None:
                self._stages.labels(stage, model).observe(seconds)

    def _count_tokens(self, account: Account, model: str) -> None:
        counts = (
            ("prompt", account.prompt_tokens),
            ("cached_prompt", account.cached_tokens),
            ("generation", account.output_tokens),
        )
        for name, tokens in counts:
            if tokens:
                self._tokens[name].labels(model).inc(tokens)
        if account.is_stream and account.output_tokens is not None:
            tpot_s = account.timeline.tpot_s(account.output_tokens)
            if tpot_s is not None:
                self._tpot.labels(account.endpoint, model).observe(tpot_s)


def _forget_others(counter: Counter, known: set[tuple[str | None, str]]) -> None:
    """Drop the series of instances that are not known any more, by role if they have one."""
    for metric in counter.collect():
        for sample in metric.samples:
            labels = sample.labels
            if (labels.get("role"), labels["instance"]) not in known:
                counter.remove(*labels.values())
