"""The marks of one request on one clock, and the durations between them.

Rule: a duration is None while one of its marks is missing; nothing is estimated. It is None too if
its end lies before its start: with a list of prompts the two may be marks of different ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """Moments in seconds of one monotonic clock.

    Of the legs, which may be tried more than once, the last start counts; of the first event and
    the first content, the first.
    """

    received: float
    prefill_started: float | None = None
    prefill_done: float | None = None
    decode_started: float | None = None
    first_event: float | None = None
    first_content: float | None = None
    last_content: float | None = None
    finished: float | None = None

    def mark_received(self, now: float) -> None:
        """The request's body has been read."""
        self.received = now

    def mark_prefill_started(self, now: float) -> None:
        """The prefill request is being sent."""
        self.prefill_started = now

    def mark_prefill_done(self, now: float) -> None:
        """The prefiller has answered."""
        self.prefill_done = now

    def mark_decode_started(self, now: float) -> None:
        """The decode request is being sent."""
        self.decode_started = now

    def mark_first_event(self, now: float) -> None:
        """The decoder has shown that it generates."""
        if self.first_event is None:
            self.first_event = now

    def mark_first_content(self, now: float) -> None:
        """The first content is being written to the client."""
        if self.first_content is None:
            self.first_content = now

    def mark_last_content(self, now: float) -> None:
        """All content has been written."""
        self.last_content = now

    def mark_finished(self, now: float) -> None:
        """The request is over."""
        self.finished = now

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: body read to first content written."""
        return _between(self.received, self.first_content)

    @property
    def prefill_s(self) -> float | None:
        """The prefill leg."""
        return _between(self.prefill_started, self.prefill_done)

    @property
    def handoff_s(self) -> float | None:
        """Between the legs."""
        return _between(self.prefill_done, self.decode_started)

    @property
    def first_token_s(self) -> float | None:
        """Decode request to first content."""
        return _between(self.decode_started, self.first_content)

    @property
    def decode_s(self) -> float | None:
        """First content to last content."""
        return _between(self.first_content, self.last_content)

    @property
    def total_s(self) -> float | None:
        """Body read to the end."""
        return _between(self.received, self.finished)

    def tpot_s(self, output_tokens: int) -> float | None:
        """Time per output token after the first: decode time / (output tokens - 1)."""
        decode_s = self.decode_s
        if decode_s is None or output_tokens <= 1:
            return None
        return decode_s / (output_tokens - 1)


def _between(start: float | None, end: float | None) -> float | None:
    if start is None or end is None or end < start:
        return None
    return end - start
