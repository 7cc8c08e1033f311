"""An engine's answer as its caller sees it: status, headers, and a body to read or to pipe."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Protocol, Self

from pdproxy import errors


class BodySink(Protocol):
    """Takes body bytes as they arrive; called synchronously by the event loop."""

    def body_received(self, data: bytes) -> None:
        """Take the next bytes, never empty; one call per socket read."""
        ...

    def body_ended(self) -> None:
        """The body is complete; nothing follows."""
        ...

    def body_failed(self, error: errors.UpstreamError) -> None:
        """The body is broken off; nothing follows."""
        ...


class Link(Protocol):
    """What a response needs of the connection that carries it."""

    def pause(self) -> None:
        """Read no more from the engine."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...

    def cut(self) -> None:
        """Fail the exchange, since its instance has to be free."""
        ...

    def cancel(self) -> None:
        """End the exchange by closing the connection."""
        ...


class Response:
    """One response. Whoever got it closes it, or holds it in a `with`.

    Attributes:
        status: of the final head.
        headers: in their order, names in lower case, values as latin-1.
        head_arrived: for the client only; set when status and headers are there.
        sink: for the connection only; where body bytes go now.
    """

    __slots__ = ("_buffer", "_is_closed", "_link", "head_arrived", "headers", "sink", "status")

    def __init__(
        self, link: Link, head_arrived: asyncio.Future[None], unclaimed_bytes: int
    ) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.head_arrived = head_arrived
        self._link: Link | None = link
        self._is_closed = False
        self._buffer: _Buffer | None = _Buffer(link, unclaimed_bytes)
        self.sink: BodySink = self._buffer

    # --- for the caller

    def header(self, name: str) -> str | None:
        """Return the first value of a header, given in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Return the whole body. A failure or a cancellation closes the response.

        Raises:
            UpstreamProtocol: the body is larger than `max_bytes`.
            UpstreamError: the body did not arrive whole.
        """
        assert self._buffer is not None, "the body was piped"
        try:
            return await self._buffer.whole(sys.maxsize if max_bytes is None else max_bytes)
        except BaseException:
            self.close()
            raise

    def arrived(self) -> bytes | None:
        """Return the whole body if all of it is here already, else None; also once closed."""
        buffer = self._buffer
        return buffer.take() if buffer is not None and buffer.is_whole else None

    def pipe(self, sink: BodySink) -> None:
        """Send the body to `sink` from now on; what has arrived already goes there at once.

        Exactly one of `body_ended` and `body_failed` is called, last; neither after `close`.
        """
        buffer = self._buffer
        assert buffer is not None, "the body was piped"
        self._buffer = None
        self.sink = sink
        if data := buffer.take():
            sink.body_received(data)
        if not self._is_closed:
            buffer.hand_end_to(sink)

    def pause(self) -> None:
        """Stop taking bytes from the engine; its idle limit does not run."""
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        """Take bytes from the engine again."""
        if self._link is not None:
            self._link.resume()

    def cut(self) -> None:
        """Fail with UpstreamCut unless the body has ended; whoever waits for it is told."""
        if self._link is not None:
            self._link.cut()

    def close(self) -> None:
        """Close the connection if the body has not ended, so that the engine notices at once.

        A complete response has left its connection already; then this does nothing.
        """
        self._is_closed = True
        self.sink = _NOBODY  # the sink may hold this response
        link, self._link = self._link, None
        if link is None:
            return
        link.cancel()
        self.head_arrived.cancel()
        if self._buffer is not None:
            self._buffer.body_failed(errors.UpstreamLost("the response was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- for the connection

    def begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Set the head."""
        self.status = status
        self.headers = headers
        if not self.head_arrived.done():
            self.head_arrived.set_result(None)

    def end(self) -> None:
        """The body is complete and the connection is no longer this response's."""
        self._link = None
        self.sink.body_ended()

    def fail(self, error: errors.UpstreamError) -> None:
        """The exchange has failed and the connection is no longer this response's."""
        self._link = None
        if self.head_arrived.done():
            self.sink.body_failed(error)
            return
        fail_future(self.head_arrived, error)


def fail_future(future: asyncio.Future[None], error: BaseException) -> None:
    """Fail a future whose waiter may be cancelled before it looks, which is no reason to log."""
    if not future.done():
        future.set_exception(error)
        future.exception()


class _Nobody:
    """The sink of a closed response."""

    __slots__ = ()

    def body_received(self, data: bytes) -> None:
        """Drop it."""

    def body_ended(self) -> None:
        """Nobody asks any more."""

    def body_failed(self, error: errors.UpstreamError) -> None:
        """Nobody asks any more."""


_NOBODY = _Nobody()


class _Buffer:
    """Keeps the body until it is read or piped; bounded until somebody asks for it."""

    __slots__ = ("_error", "_is_ended", "_link", "_max_bytes", "_parts", "_size", "_waiter")

    def __init__(self, link: Link, unclaimed_bytes: int) -> None:
        self._link = link
        self._parts: list[bytes] = []
        self._size = 0
        self._max_bytes = unclaimed_bytes
        self._is_ended = False
        self._error: errors.UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def body_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size <= self._max_bytes:
            return
        if self._waiter is None:
            self._link.pause()
        else:
            self._wake()

    def body_ended(self) -> None:
        self._is_ended = True
        self._wake()

    def body_failed(self, error: errors.UpstreamError) -> None:
        self._error = error
        self._wake()

    async def whole(self, max_bytes: int) -> bytes:
        if not self._is_settled() and self._size <= max_bytes:
            self._resume(max_bytes)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._size > max_bytes:
            raise errors.UpstreamProtocol(
                "the engine's answer is too large", detail=f"more than {max_bytes} bytes"
            )
        if self._error is not None:
            raise self._error
        return self._joined()

    @property
    def is_whole(self) -> bool:
        return self._is_ended and self._error is None

    def take(self) -> bytes:
        if not self._is_settled():
            self._resume(sys.maxsize)
        return self._joined()

    def hand_end_to(self, sink: BodySink) -> None:
        if self._error is not None:
            sink.body_failed(self._error)
        elif self._is_ended:
            sink.body_ended()

    def _resume(self, max_bytes: int) -> None:
        if self._size > self._max_bytes:
            self._link.resume()
        self._max_bytes = max_bytes

    def _joined(self) -> bytes:
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def _is_settled(self) -> bool:
        return self._is_ended or self._error is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
