"""One keep-alive connection to an engine: one exchange at a time, every wait with its limit.

Rule: a connection is given back only when its exchange is complete on both sides and nothing else
has happened on it; in every other case it is closed at once, so that the engine notices.
"""

# Python 3.11 has no typing.override to mark asyncio's callbacks with.
# mypy: disable-error-code="explicit-override"

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from pdproxy import errors
from pdproxy.upstream.framing import ResponseParser
from pdproxy.upstream.limits import ClientLimits, Timeouts
from pdproxy.upstream.response import Response, fail_future
from pdproxy.upstream.watch import Watch

if TYPE_CHECKING:
    from pdproxy.upstream.pool import Origin

# Above this, joining head and body costs more than a second buffer for the kernel.
_JOIN_MAX_BYTES = 64 * 1024


class Connection(asyncio.Protocol):
    """The protocol of one transport; `idle_since_s` (loop time) is the pool's."""

    __slots__ = (
        "_can_write",
        "_home",
        "_is_paused",
        "_is_uploading",
        "_limits",
        "_loop",
        "_parser",
        "_response",
        "_timeouts",
        "_transport",
        "_upload",
        "_waits_for_caller",
        "_watch",
        "_writable",
        "idle_since_s",
    )

    def __init__(self, home: Origin, limits: ClientLimits, loop: asyncio.AbstractEventLoop) -> None:
        self._home = home
        self._limits = limits
        self._loop = loop
        self._parser = ResponseParser(limits.max_head_bytes)
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._timeouts: Timeouts | None = None
        self._upload: asyncio.Task[None] | None = None
        self._is_uploading = False
        self._waits_for_caller = False
        self._writable: asyncio.Future[None] | None = None
        self._can_write = True
        self._is_paused = False
        self._watch = Watch(loop, self._expired)
        self.idle_since_s = 0.0

    # --- for the client

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_untouched(self) -> bool:
        """Not one byte has come since the last `start`."""
        return self._parser.is_untouched

    def start(
        self, head: bytes, body: bytes, timeouts: Timeouts, *, is_head_request: bool = False
    ) -> Response:
        """Write a request; the response's `head_arrived` tells the rest.

        Raises:
            UpstreamLost: the connection is closed already.
        """
        assert self._response is None, "one exchange at a time"
        transport = self._transport
        if transport is None or transport.is_closing():
            raise self._lost_error("closed before the request was written")
        response = Response(self, self._loop.create_future(), self._limits.unclaimed_body_bytes)
        self._response = response
        self._timeouts = timeouts
        self._parser.start(is_head_request=is_head_request)
        if len(body) <= _JOIN_MAX_BYTES:
            transport.write(head + body if body else head)
        else:
            transport.write(head)
            transport.write(body)
        self._expect()
        return response

    def abort(self) -> None:
        """Close at once; unsent and unread bytes are dropped."""
        if self._transport is not None:
            self._transport.abort()

    # --- for the upload of a streamed body

    def start_upload(self, upload: asyncio.Task[None]) -> None:
        """Let `upload` write the body; it is cancelled when the exchange ends before it."""
        self._upload = upload
        self._is_uploading = self._waits_for_caller = True
        self._expect()

    async def write(self, data: bytes) -> None:
        """Write a part of the body; return when the engine has taken most of it."""
        assert self._transport is not None
        self._transport.write(data)
        if self._can_write:
            return
        self._writable = self._loop.create_future()
        self._waits_for_caller = False
        self._expect()
        await self._writable
        self._waits_for_caller = True
        self._expect()

    def end_upload(self, last: bytes) -> None:
        """Write the end of the body."""
        if last and self._transport is not None:
            self._transport.write(last)
        self._is_uploading = self._waits_for_caller = False
        self._expect()

    def fail_upload(self, error: Exception) -> None:
        """The caller's body broke off: `send` raises `error`, or the response fails."""
        response = self._leave()
        self.abort()
        if response is None:
            return
        if response.head_arrived.done():
            response.fail(self._lost_error(f"the request body failed: {type(error).__name__}"))
        else:
            fail_future(response.head_arrived, error)

    # --- for the response (its `Link`)

    def pause(self) -> None:
        """Read no more; the idle limit does not run."""
        if self._is_paused or self._transport is None:
            return
        self._is_paused = True
        self._transport.pause_reading()
        self._expect()

    def resume(self) -> None:
        """Read again; the idle limit starts anew."""
        if not self._is_paused or self._transport is None:
            return
        self._is_paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
        self._expect()

    def cut(self) -> None:
        """Fail the exchange, since its instance has to be free."""
        text = "the engine is being taken out of service"
        self._fail(errors.UpstreamCut(text, detail=f"{self._home.label}: drained"))

    def cancel(self) -> None:
        """End the exchange: nobody wants its response any more."""
        self._leave()
        self.abort()

    # --- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse one read; hand its body bytes on in one call."""
        response = self._response
        if response is None:
            self.abort()  # nothing was asked
            return
        parser = self._parser
        had_head = parser.has_head
        body = parser.feed(data)
        if parser.has_head:
            if had_head:
                self._watch.since_s = self._watch.time()
            else:
                response.begin(parser.status, parser.headers)
                self._expect()
        if body:
            response.sink.body_received(body)
            if self._response is not response:
                return
        if parser.is_complete:
            self._finish(response)
        elif parser.fault is not None:
            self._fail(
                errors.UpstreamProtocol(
                    "the engine's answer is not valid HTTP",
                    detail=f"{self._home.label}: {parser.fault}",
                )
            )

    def eof_received(self) -> None:
        """End a body that ends with the connection; fail any other."""
        response = self._response
        if response is not None and self._parser.end_of_input():
            self._finish(response)
        else:
            self._fail(self._lost_error("closed by the engine"))
        self.abort()  # an idle one is no longer open from here on, whatever TLS still exchanges

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is unfinished; let go of everything."""
        self._fail(self._lost_error("closed" if exc is None else f"{exc!r}"))
        self._home.lost(self)
        self._watch.stop()
        self._transport = None
        self._parser.forget_parser()

    def pause_writing(self) -> None:
        """Let the upload wait: the engine takes no more."""
        self._can_write = False

    def resume_writing(self) -> None:
        """Let the upload go on."""
        self._can_write = True
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self._response is not None:
            self._expect()  # most of the request is handed over only now

    # --- own

    def _finish(self, response: Response) -> None:
        """The response is complete: leave the connection, then tell."""
        transport = self._transport
        assert transport is not None
        is_reusable = (
            self._parser.is_reusable
            and not self._is_uploading
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0
        )
        self._leave()
        if not is_reusable:
            self.abort()
        else:
            if self._is_paused:
                self._is_paused = False
                transport.resume_reading()
            self._home.give_back(self)
        response.end()

    def _fail(self, error: errors.UpstreamError) -> None:
        response = self._leave()
        if response is not None:
            self.abort()
            response.fail(error)

    def _leave(self) -> Response | None:
        """End the exchange on this side, whatever became of it."""
        response, self._response = self._response, None
        self._watch.limit_s = None
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None
            self._is_uploading = self._waits_for_caller = False
        return response

    def _lost_error(self, reason: str) -> errors.UpstreamLost:
        return errors.UpstreamLost(
            "the engine closed the connection", detail=f"{self._home.label}: {reason}"
        )

    def _expect(self) -> None:
        """The engine has from now on the limit of its next step."""
        self._watch.expect(self._limit())

    def _limit(self) -> float | None:
        """How long the engine may take now; None while it is not the one to act."""
        if self._is_paused or self._waits_for_caller or self._timeouts is None:
            return None
        return self._timeouts.idle_s if self._parser.has_head else self._timeouts.head_s

    def _expired(self) -> None:
        phase = "body" if self._parser.has_head else "head"
        self._fail(
            errors.UpstreamTimeout(
                "the engine did not answer in time",
                phase=phase,
                detail=f"{self._home.label}: nothing for {self._watch.limit_s:g} s ({phase})",
            )
        )
