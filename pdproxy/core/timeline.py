"""Where the time of one request goes: its stages, which add up to the whole, and a few moments.

Rule: a request is in exactly one stage at any moment, over all attempts and rounds, so that the
times of its stages add up to its time. A duration is None while one of its ends is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """What a request is waiting for; a closed set, since it is a label of metrics.

    A pause before another attempt belongs to the leg that failed.
    """

    BODY = "body"  # its body; before the time of a request begins
    QUEUE = "queue"  # to be sent to an engine
    PREFILL = "prefill"  # a prefiller's answer
    HANDOFF = "handoff"  # to be sent to a decoder
    FIRST_TOKEN = "first_token"  # a decoder's first content, KV transfer included
    DECODE = "decode"  # the rest of the answer; all of one that is not streamed


@dataclass(slots=True)
class Timeline:
    """Moments in seconds of one monotonic clock, and the time spent in each stage.

    Attributes:
        received: the body has been read; until then, the request has come in.
        stage: the one it is in, or was in when it ended.
        spent_s: per stage that was left.
        waited_s: of queue and hand-off, what the proxy let it wait on purpose.
        is_joint: several prompts are answered at once, so that the stages overlap.
    """

    received: float
    stage: Stage = Stage.BODY
    spent_s: dict[Stage, float] = field(default_factory=dict)
    waited_s: float = 0.0
    is_joint: bool = False
    first_content: float | None = None
    last_content: float | None = None
    finished: float | None = None
    _entered: float = field(init=False)

    def __post_init__(self) -> None:
        self._entered = self.received

    def mark_received(self, now: float) -> None:
        """The request's body has been read; the time of the request begins."""
        self.received = self._entered = now
        self.stage = Stage.QUEUE

    def mark_prefill_started(self, now: float) -> None:
        """The prefill request is being sent."""
        self._enter(Stage.PREFILL, now)

    def mark_prefill_done(self, now: float) -> None:
        """The prefiller has answered."""
        self._enter(Stage.HANDOFF, now)

    def mark_decode_started(self, now: float, *, is_stream: bool) -> None:
        """The decode request is being sent."""
        self._enter(Stage.FIRST_TOKEN if is_stream else Stage.DECODE, now)

    def mark_content(self, now: float) -> None:
        """Content is being written to the client."""
        if self.stage is not Stage.DECODE:
            self._enter(Stage.DECODE, now)
        if self.first_content is None:
            self.first_content = now
        self.last_content = now

    def mark_finished(self, now: float) -> None:
        """The request is over."""
        self._enter(self.stage, now)
        self.finished = now

    @property
    def stages_s(self) -> dict[Stage, float]:
        """What was spent in each stage it was in; nothing if they overlapped."""
        return {} if self.is_joint else self.spent_s

    def spent_so_far_s(self, now: float) -> dict[Stage, float]:
        """Return the stages as they are at this moment, the one it is in included."""
        if self.is_joint or self.stage is Stage.BODY:
            return {}
        so_far = self.spent_s.get(self.stage, 0.0) + now - self._entered
        return {**self.spent_s, self.stage: so_far}

    @property
    def queue_s(self) -> float | None:
        """Body read to the first leg's request; None if there was none yet."""
        return self.stages_s.get(Stage.QUEUE)

    @property
    def own_s(self) -> float | None:
        """What the proxy itself took before and between the legs; None if no leg began."""
        queue_s = self.queue_s
        if queue_s is None:
            return None
        return queue_s - self.waited_s + self.spent_s.get(Stage.HANDOFF, 0.0)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: body read to first content written."""
        return _between(self.received, self.first_content)

    @property
    def total_s(self) -> float | None:
        """Body read to the end."""
        return _between(self.received, self.finished)

    def age_s(self, now: float) -> float:
        """Return for how long the request has been there."""
        return now - self.received

    def tpot_s(self, output_tokens: int) -> float | None:
        """Time per output token after the first: first to last content / (output tokens - 1)."""
        content_s = _between(self.first_content, self.last_content)
        if content_s is None or output_tokens <= 1:
            return None
        return content_s / (output_tokens - 1)

    def _enter(self, stage: Stage, now: float) -> None:
        left = self.stage
        self.spent_s[left] = self.spent_s.get(left, 0.0) + now - self._entered
        self.stage, self._entered = stage, now


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
