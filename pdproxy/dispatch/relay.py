"""The relay: decoder bytes in, whole SSE events out, straight from the socket's callback.

Rules: nothing is released before the decoder's first sign of generation; one write per read;
what no rule touches leaves byte for byte; a stream is a success only when every choice has its
finish reason; nothing follows `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdproxy.core import sse
from pdproxy.core.chunks import (
    ChunkFacts,
    Usage,
    is_plain,
    read_event,
    with_cached_tokens,
    without_internal,
    without_recomputed,
)
from pdproxy.core.error_events import engine_error
from pdproxy.core.keeper import Keeper
from pdproxy.core.pulse import Pulse
from pdproxy.dispatch.ports import Downstream
from pdproxy.errors import (
    PDProxyError,
    Recomputed,
    UpstreamError,
    UpstreamLost,
    UpstreamProtocol,
)
from pdproxy.upstream.response import Response

# Within a block of whole events: each but the first follows the last line break of another.
_NEXT_EVENT = b"\ndata:"


@dataclass(slots=True)
class StreamFacts:
    """What a stream has said so far."""

    finished: dict[int, str] = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)
    usage: Usage | None = None
    has_told_usage: bool = False
    error: bytes | None = None
    is_done: bool = False


class StreamRelay:
    """A body sink between one decoder's stream and one client.

    First await `opening()`, then call `attach()`, then await `finished()`.
    """

    def __init__(  # noqa: PLR0913 - what it relays, for whom, and by which rules
        self,
        response: Response,
        *,
        choices: int,
        cached_tokens: int | None,
        stops: frozenset[str],
        max_event_bytes: int,
        pulse: Pulse,
        clock: Callable[[], float],
        on_full: Callable[[], None],
        keeper: Keeper | None = None,
        is_enough: Callable[[], bool] | None = None,
    ) -> None:
        """Make a relay for a stream of `choices` answers.

        `cached_tokens` is the prefiller's figure, which replaces the decoder's; None leaves it.
        `pulse` is told of content as it is written; `on_full` is called when its counts are due.
        `keeper` notes the answer, so that it can be continued.
        `is_enough` is asked after each write: once it says so, the stream is over.
        """
        self.facts = StreamFacts()
        self._response = response
        self._choices = choices
        self._cached_tokens = cached_tokens
        self._stops = stops
        self._pulse = pulse
        self._clock = clock
        self._on_full = on_full
        self._now = 0.0  # of the last read
        self._contents = 0  # content events that were read and not written
        self._keeper = keeper
        self._is_enough = is_enough
        self._max_event_bytes = max_event_bytes
        self._splitter = sse.EventSplitter(max_event_bytes=max_event_bytes)
        self._downstream: Downstream | None = None
        self._held = b""
        self._has_content = False
        self._is_open = False
        self._is_over = False
        self._failure: PDProxyError | None = None
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def opening(self) -> None:
        """Wait for the first event that shows generation, or for the end.

        Raises:
            PDProxyError: the stream failed before that; another attempt may be made.
        """
        await self._wake
        if self._is_open:
            return
        if self._failure is None:
            self._failure = UpstreamLost("the decoder ended its stream before any output")
        raise self._failure

    def attach(self, downstream: Downstream) -> None:
        """Let what was held and all that comes go to the client."""
        self._downstream = downstream
        self._now = self._clock()
        if self._held:
            held, self._held = self._held, b""
            self._send(downstream, held)

    async def finished(self) -> None:
        """Wait until the stream is over, throttling the decoder while the client is slow.

        Raises:
            PDProxyError: it did not end as it should.
        """
        downstream = self._downstream
        assert downstream is not None
        while not self._is_over:
            self._wake = asyncio.get_running_loop().create_future()
            if downstream.is_congested:
                await downstream.drain()
                self._response.resume()
            await self._wake
        if self._failure is not None:
            raise self._failure

    # --- the sink: called by the connection, synchronously

    def body_received(self, data: bytes) -> None:
        """Take the bytes of one read."""
        if self._is_over or self.facts.is_done:
            return
        clock = self._clock
        self._now = began = clock()
        try:
            block = self._splitter.feed(data)
        except ValueError:
            self._finish(UpstreamProtocol("the decoder sent an event over the size limit"))
            return
        if block:
            self._take(block)
        self._pulse.work_s += clock() - began

    def body_ended(self) -> None:
        """Take the end of the body; an event without its blank line was cut off and is dropped."""
        if self._is_over:
            return
        failure = self._verdict()
        if failure is None and not self._has_ending:
            self._take(sse.DONE)
        self._finish(failure)

    def body_failed(self, error: UpstreamError) -> None:
        """Take the failure of the connection; one after the stream's own end is none."""
        if not self._is_over:
            is_whole = self._has_ending and self._verdict() is None
            self._finish(None if is_whole else error)

    # --- inside

    def _take(self, block: bytes) -> None:
        downstream = self._downstream
        if downstream is None or not self._has_content:
            block = self._inspect(block)
        elif self._keeper is not None:
            kept = self._keeper.take(block)
            if kept is None:
                block = self._inspect(block)
            else:
                block = kept
                self._contents += 1 + kept.count(_NEXT_EVENT)
        elif is_plain(block):
            self._contents += 1 + block.count(_NEXT_EVENT)
        else:
            block = self._inspect(block)
        if downstream is None:
            self._hold(block)
        elif block:
            self._send(downstream, block)

    def _inspect(self, block: bytes) -> bytes:
        """Read each event of a block and return what goes on."""
        return b"".join([self._apply(event) for event in sse.split_block(block)])

    def _apply(self, event: bytes) -> bytes:
        facts = self.facts
        if facts.is_done:
            return b""
        seen = read_event(event, user_stops=self._stops)
        if seen.is_done:
            facts.is_done = True
            return event if self._verdict() is None else b""
        self._note_facts(seen)
        event = self._edited(event, seen)
        self._note_start(seen, event)
        if self._keeper is not None:
            event = self._keeper.note(event, seen.recomputed)
        return b"" if self._is_usage_of_part(seen) else event

    def _note_facts(self, seen: ChunkFacts) -> None:
        facts = self.facts
        facts.finished.update(seen.finished)
        facts.recomputed.update(seen.recomputed)
        if seen.usage is not None:
            facts.usage = seen.usage
            facts.has_told_usage |= not (seen.indexes or facts.recomputed)
        if seen.error is not None:
            facts.error = seen.error

    def _edited(self, event: bytes, seen: ChunkFacts) -> bytes:
        """Return the event less what the client must not see, with the true figures."""
        if seen.recomputed:
            event = without_recomputed(event, seen.recomputed)
        if seen.usage is not None and self._cached_tokens is not None:
            event = with_cached_tokens(event, self._cached_tokens)
        return without_internal(event) if seen.has_internal else event

    def _is_usage_of_part(self, seen: ChunkFacts) -> bool:
        """Tell whether an event is the usage of one round; an answer of several has one of all."""
        return bool(self.facts.recomputed) and seen.usage is not None and not seen.indexes

    def _note_start(self, seen: ChunkFacts, event: bytes) -> None:
        if seen.has_content:
            self._has_content = True
            self._contents += 1
        if not self._is_open and _shows_generation(seen, event):
            self._is_open = True

    def _hold(self, block: bytes) -> None:
        self._held += block
        if self._is_open:
            self._rouse()
        elif self.facts.error is not None:
            self._finish(engine_error(self.facts.error))
        elif len(self._held) > self._max_event_bytes:
            self._finish(UpstreamProtocol("the decoder sent too much before any output"))

    def _send(self, downstream: Downstream, block: bytes) -> None:
        self._pulse.is_hidden = False
        try:
            downstream.write(block)
        except PDProxyError as error:  # what came is not what an answer goes on with
            self._finish(error)
            return
        if self._contents:
            events, self._contents = self._contents, 0
            if self._pulse.beat(self._now, events):
                self._on_full()
        if self._is_enough is not None and self._is_enough():
            self._finish(None)
        elif downstream.is_congested:
            self._response.pause()
            self._rouse()

    @property
    def _has_ending(self) -> bool:
        """The client has been told the end: `[DONE]`, or the engine's own error event."""
        return self.facts.is_done or self.facts.error is not None

    def _verdict(self) -> PDProxyError | None:
        """Return what is wrong with a stream that ends here; None if nothing is.

        An error event of the engine's own has told the client already.
        """
        facts = self.facts
        if facts.error is not None:
            return None
        if facts.recomputed:
            return Recomputed("the decoder ran out of KV cache before the answer ended")
        if len(facts.finished) < self._choices:
            return UpstreamLost("the decoder ended its stream before the answer was complete")
        return None

    def _finish(self, failure: PDProxyError | None) -> None:
        self._is_over = True
        self._failure = failure
        self._rouse()

    def _rouse(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)


def _shows_generation(seen: ChunkFacts, event: bytes) -> bool:
    """Tell whether the decoder has begun to generate.

    A role alone does not show it: an engine sends one before it finds that the KV cache cannot
    be loaded (vLLM 0.32, seen on engines).
    """
    if seen.has_content or seen.finished:
        return True
    if seen.recomputed:
        return False
    return bool(seen.indexes) and b'"role"' not in event
