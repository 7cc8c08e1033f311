"""The account of one request: what happened to it, for the access log and the metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdproxy.core.policy import Reason
from pdproxy.core.pulse import Pulse
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.tracing import NO_SPAN, Span


class Outcome(StrEnum):
    """How a request ended; a closed set, since it is a label of metrics."""

    SUCCESS = "success"
    CLIENT_ERROR = "client_error"
    ENGINE_ERROR = "engine_error"
    PROXY_ERROR = "proxy_error"
    REJECTED = "rejected"
    CLIENT_DISCONNECTED = "client_disconnected"

    @property
    def is_clients(self) -> bool:
        """Whether it was the client's own doing."""
        return self in {Outcome.CLIENT_ERROR, Outcome.CLIENT_DISCONNECTED}


@dataclass(frozen=True, slots=True)
class Counts:
    """What one answer said of itself; None where it did not."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    finish_reasons: tuple[str, ...]


@dataclass(slots=True)
class Account:
    """Written while the request runs, read once when it ends.

    Attributes:
        request_id: the id that the client sees.
        client: the peer's address.
        prefiller, decoder: label of the instance last used, "" if none.
        prefiller_reason, decoder_reason: why that one was chosen, None if none was.
        prefill_attempts, decode_attempts: attempts made, over all rounds.
        prompt_tokens, cached_tokens: as the prefiller counted.
        output_tokens: as the decoder counted, by `usage` or by token ids; None if it never said.
        prefill_skipped: why a decoder computed the prompt alone, "" if it did not.
        cuts: decoders that did not end the answer, and why: `D:7100/kv_cache_exhausted`.
        finish_reasons: of the choices that finished.
        status: HTTP status the client got, 0 if none.
        why: what went wrong, in words for the operator.
        code: of the error that ended it, "" if none did.
        span: its own in traces.
        pulse: the beat of its streams.
    """

    request_id: str
    endpoint: str
    client: str
    timeline: Timeline
    model: str = ""
    is_stream: bool = False
    prefiller: str = ""
    decoder: str = ""
    prefiller_reason: Reason | None = None
    decoder_reason: Reason | None = None
    prefill_attempts: int = 0
    decode_attempts: int = 0
    rounds: int = 1
    prefill_skipped: str = ""
    cuts: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    status: int = 0
    outcome: Outcome = Outcome.SUCCESS
    why: str = ""
    code: str = ""
    # The engines took the model's name, so it may be a label.
    is_model_known: bool = False
    span: Span = NO_SPAN
    pulse: Pulse = field(init=False)

    def __post_init__(self) -> None:
        self.pulse = Pulse(self.timeline)

    @property
    def own_s(self) -> float | None:
        """What the proxy's own work took; None if no leg began, or several ran at once."""
        own_s = self.timeline.own_s
        return None if own_s is None else own_s + self.pulse.work_s

    def count(self, counts: Counts) -> None:
        """Add what one answer said."""
        self.prompt_tokens = _added(self.prompt_tokens, counts.prompt_tokens)
        self.cached_tokens = _added(self.cached_tokens, counts.cached_tokens)
        self.output_tokens = _added(self.output_tokens, counts.output_tokens)
        self.finish_reasons.extend(counts.finish_reasons)

    def recount(self, rounds: Iterable[Counts], whole: Counts) -> None:
        """Put the counts of a whole answer in the place of those of its rounds."""
        for each in rounds:
            self.prompt_tokens = _added(self.prompt_tokens, -(each.prompt_tokens or 0))
            self.cached_tokens = _added(self.cached_tokens, -(each.cached_tokens or 0))
            self.output_tokens = _added(self.output_tokens, -(each.output_tokens or 0))
            for reason in each.finish_reasons:
                self.finish_reasons.remove(reason)
        self.count(whole)

    @property
    def is_uncounted(self) -> bool:
        """Whether there was output of which nobody said how many tokens it was."""
        has_output = self.outcome is Outcome.SUCCESS or self.timeline.first_content is not None
        return has_output and self.output_tokens is None

    def fail(self, outcome: Outcome, why: str, code: str = "") -> None:
        """Note a failure; the first one noted is the cause and stays."""
        if self.outcome is Outcome.SUCCESS:
            self.outcome = outcome
            self.why = why
            self.code = code


def _added(sum_: int | None, tokens: int | None) -> int | None:
    return sum_ if tokens is None else (sum_ or 0) + tokens
