"""The metrics that count: names, help, labels and buckets; `metrics` records, the rest are gauges.

Rule: labels come from closed sets. Names and units follow the conventions of Prometheus.
"""

from __future__ import annotations

from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdproxy.core.api import Api
from pdproxy.core.instance import Role
from pdproxy.core.pulse import GAP_EDGES_S
from pdproxy.core.retry import Phase
from pdproxy.core.timeline import Stage
from pdproxy.dispatch.account import Outcome
from pdproxy.dispatch.orphans import Action

OTHER_MODEL = "other"
ENDPOINTS = (*(api.value for api in Api), "/v1/models", "passthrough")
STREAM_LABELS = {True: "true", False: "false"}
ATTEMPT_OUTCOMES = ("success", "error", "abandoned")
RECOMPUTE_RESULTS = ("resumed", "cut", "failed", "limit")
FAILOVER_RESULTS = ("recovered", "failed", "abandoned")
RETRY_REASONS = ("connect", "lost", "protocol", "timeout", "status_4xx", "status_5xx")
SKIP_REASONS = ("decode_only", "no_prefiller", "prefill_failed")
REJECT_REASONS = ("no_instance", "overloaded", "queue_full", "queue_timeout")
# What a request of each outcome is answered with most often.
USUAL_STATUS = {
    Outcome.SUCCESS: "200",
    Outcome.CLIENT_ERROR: "400",
    Outcome.ENGINE_ERROR: "502",
    Outcome.PROXY_ERROR: "500",
    Outcome.REJECTED: "503",
    Outcome.CLIENT_DISCONNECTED: "499",
}

# The edges of vLLM's own histograms, so that dashboards of both line up.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
# From what a request costs on an idle machine to what only an overloaded one takes.
OWN_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ROUND_BUCKETS = (1, 2, 3, 4, 5, 8, 12, 16, 32)

_GENERATION_TEXT = (
    "Output tokens, as the engines counted. Streams without usage, which clients have to ask for, "
    "are in it only if their token ids are known."
)


class Instruments:
    """Every metric that counts, made once in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make them all, with a zero for each series of a closed set of labels."""
        self._registry = registry
        self._make_requests()
        self._make_times()
        self._make_tokens()
        self._make_legs()
        self._make_recomputes()
        self._begin_at_zero()

    @property
    def by_instance(self) -> tuple[Counter, ...]:
        """Those with the label `instance`."""
        return (
            self.attempts,
            self.attempt_errors,
            self.handles_missing,
            self.handles_abandoned,
            self.replies_lost,
            self.exhausted,
            self.recomputes,
        )

    def begin_instance(self, role: Role, label: str) -> None:
        """Make the series of an instance, so that its first failure shows as a change."""
        for outcome in ATTEMPT_OUTCOMES:
            self.attempts.labels(role, label, outcome)
        if role is Role.PREFILL:
            self.handles_missing.labels(label)
            for action in Action:
                self.handles_abandoned.labels(label, action)
            self.replies_lost.labels(label)
            return
        self.exhausted.labels(label)
        for result in RECOMPUTE_RESULTS:
            self.recomputes.labels(label, result)

    def begin_requests(self, endpoint: str, model: str, stream: str) -> None:
        """Make the series of each outcome, so that the first of a kind shows as a change."""
        for outcome, status in USUAL_STATUS.items():
            self.requests.labels(endpoint, model, stream, status, outcome)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdproxy_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...]
    ) -> Histogram:
        name = f"pdproxy_{name}"
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def _make_requests(self) -> None:
        self.requests = self._counter(
            "requests",
            "Client requests that ended, once each.",
            *("endpoint", "model", "stream", "status_code", "outcome"),
        )
        self.in_flight = Gauge(
            "pdproxy_requests_in_flight",
            "Client requests begun and not finished.",
            ["endpoint"],
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.rejected = self._counter(
            "rejected", "Requests that the proxy refused for the state it is in.", "reason"
        )
        self.queue_depth = Gauge(
            "pdproxy_admission_queue_depth",
            "Requests, and prompts of such that are in flight, that wait for their turn.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.disconnects = self._counter(
            "client_disconnects", "Clients that left, by what their request waited for.", "phase"
        )

    def _make_times(self) -> None:
        self.duration = self._histogram(
            "request_duration_seconds",
            "From the request's body read to the end of its answer.",
            *("endpoint", "model", "stream"),
            buckets=REQUEST_BUCKETS,
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "From a streamed request's body read to its first content written.",
            *("endpoint", "model"),
            buckets=TTFT_BUCKETS,
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "(last content - first content) / (output tokens - 1), of streams that told how many.",
            *("endpoint", "model"),
            buckets=GAP_EDGES_S,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Between two content events of a stream.",
            *("endpoint", "model"),
            buckets=GAP_EDGES_S,
        )
        self.stages = self._histogram(
            "stage_duration_seconds",
            "Where the time of a generate request went; the stages add up to its duration.",
            *("stage", "model"),
            buckets=TTFT_BUCKETS,
        )
        self.own = self._histogram(
            "overhead_seconds",
            "What a generate request spent in the proxy, not waiting for engines or the client.",
            "endpoint",
            buckets=OWN_BUCKETS,
        )

        self.queue_wait = self._histogram(
            "admission_wait_seconds",
            "Time that requests waited for their turn which had to.",
            buckets=TTFT_BUCKETS,
        )

    def _make_tokens(self) -> None:
        self.without_usage = self._counter(
            "requests_without_usage",
            "Generate requests with output that is not in the generation tokens, as neither usage "
            "nor token ids told how much it was.",
            "endpoint",
        )
        self.tokens = {
            name: self._counter(f"{name}_tokens", text, "model")
            for name, text in (
                ("prompt", "Prompt tokens, as the engines counted."),
                ("cached_prompt", "Prompt tokens that the prefiller had in its prefix cache."),
                ("generation", _GENERATION_TEXT),
            )
        }

    def _make_legs(self) -> None:
        by_instance = ("role", "instance")
        self.attempts = self._counter(
            "upstream_requests", "Attempts of legs on engines.", *by_instance, "outcome"
        )
        self.attempt_errors = self._counter(
            "upstream_errors", "Attempts of legs that failed.", *by_instance, "reason"
        )
        self.attempt_seconds = self._histogram(
            "upstream_request_duration_seconds",
            "Time of one attempt of a leg.",
            "role",
            buckets=REQUEST_BUCKETS,
        )
        self.routed = self._counter(
            "routing_decisions", "Choices of an instance for a leg.", "role", "policy", "reason"
        )
        self.retries = self._counter("retries", "Legs tried again.", "role", "reason")
        self.failovers = self._counter(
            "failovers",
            "Attempts on another instance than the one that failed, by how far that one had come.",
            *("role", "phase", "result"),
        )
        self.skipped = self._counter(
            "prefill_skipped", "Requests that a decoder computed alone.", "reason"
        )
        self.handles_missing = self._counter(
            "kv_handoff_missing",
            "Prefills that gave no KV handle, so that the decoder computed the prompt.",
            "instance",
        )
        self.handles_abandoned = self._counter(
            "kv_handoff_abandoned",
            "KV handles that were not used, by what became of them.",
            "instance",
            "action",
        )
        self.replies_lost = self._counter(
            "prefill_reply_lost",
            "Prefills without a reply that may have been computed.",
            "instance",
        )

    def _make_recomputes(self) -> None:
        self.exhausted = self._counter(
            "kv_exhausted", "Answers that a decoder gave back for lack of KV cache.", "instance"
        )
        self.recomputes = self._counter(
            "recomputes",
            "Further rounds of answers that a decoder gave back or lost, by the last decoder.",
            *("instance", "result"),
        )
        self.recomputed_tokens = self._counter(
            "recomputed_tokens", "Prompt tokens that further rounds computed again.", "model"
        )
        self.rounds = self._histogram(
            "recompute_attempts", "Further rounds per request that had any.", buckets=ROUND_BUCKETS
        )

    def _begin_at_zero(self) -> None:
        for endpoint in ENDPOINTS:
            self.in_flight.labels(endpoint)
        for api, stream in product(Api, STREAM_LABELS.values()):
            self.begin_requests(api.value, OTHER_MODEL, stream)
        for api in Api:
            self.without_usage.labels(api.value)
        for reason in REJECT_REASONS:
            self.rejected.labels(reason)
        for stage in Stage:
            self.disconnects.labels(stage)
        for reason in SKIP_REASONS:
            self.skipped.labels(reason)
        self._begin_legs()

    def _begin_legs(self) -> None:
        for role in Role:
            self.attempt_seconds.labels(role)
            for reason in RETRY_REASONS:
                self.retries.labels(role, reason)
        for phase, result in product(Phase, FAILOVER_RESULTS):
            self.failovers.labels(Role.DECODE, phase, result)
            if phase is not Phase.MID_STREAM:
                self.failovers.labels(Role.PREFILL, phase, result)
