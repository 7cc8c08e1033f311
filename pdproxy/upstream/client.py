"""The engine client: one request, one response, over kept-alive connections; no HTTP library.

Rule: foreign exceptions end here. A request that may have reached an engine is never sent again,
save when a kept-alive connection closed without one byte of an answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass

from pdproxy import errors, tasks
from pdproxy.core.allow import AllowList
from pdproxy.core.instance import Endpoint
from pdproxy.upstream.connect import connect
from pdproxy.upstream.connection import Connection
from pdproxy.upstream.limits import ClientLimits, Timeouts
from pdproxy.upstream.pool import Origin, Pool
from pdproxy.upstream.request import CHUNKED, encode_head, length_line
from pdproxy.upstream.response import BodySink, Response
from pdproxy.upstream.upload import upload

__all__ = ["BodySink", "ClientLimits", "EngineClient", "Response", "Timeouts"]

# Methods whose requests have a body by definition: an empty one is announced as such.
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
Rescue = Callable[[Response], None]
_CLOSING_TIMEOUT_S = 1.0  # closing a socket takes one turn of the loop; this is only a bound


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What is written on whichever connection is found for it."""

    head: bytes
    body: bytes
    timeouts: Timeouts
    is_head_request: bool
    on_start: Callable[[Response], None] | None

    def start(self, connection: Connection) -> Response:
        response = connection.start(
            self.head, self.body, self.timeouts, is_head_request=self.is_head_request
        )
        if self.on_start is not None:
            self.on_start(response)
        return response


class EngineClient:
    """Sends requests to engines; belongs to one event loop, the one of its first request."""

    def __init__(
        self,
        limits: ClientLimits | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        allow: AllowList | None = None,
    ) -> None:
        """Without `ssl_context`, https endpoints are checked against the system's authorities."""
        self._limits = limits or ClientLimits()
        self._ssl_context = ssl_context
        self._allow = allow
        self._pool: Pool | None = None
        self._is_closed = False

    async def send(  # noqa: PLR0913 -- the parts of a request, each named at the call
        self,
        endpoint: Endpoint,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | AsyncIterable[bytes] | None,
        *,
        timeouts: Timeouts,
        content_length: int | None = None,
        rescue: Rescue | None = None,
        on_start: Callable[[Response], None] | None = None,
    ) -> Response:
        """Send a request; return when the response's head is there.

        Args:
            endpoint: where to.
            method: such as `POST`.
            target: path and query, percent-encoded.
            headers: all but Host, Connection and the framing, which are added here.
            body: bytes, or parts that are sent as they come, on a connection of their own since
                they cannot be sent twice.
            timeouts: for each step.
            content_length: of a body that comes in parts; without it, it is sent in chunks.
            rescue: called with the response if its head arrived in the moment in which the caller
                was cancelled, for what must not be lost; it is closed afterwards. For a body that
                is bytes.
            on_start: is given the response before its head is there, each time it is sent.

        Returns:
            A response that the caller closes. If the caller is cancelled before, the connection is
            closed.

        Raises:
            UpstreamUnreachable: no connection; certainly not executed.
            UpstreamTimeout: `phase` is "connect" or "head".
            UpstreamLost: the connection ended before the head did.
            UpstreamProtocol: the answer is not HTTP/1.1.
            InvalidRequest: the request cannot be written as HTTP; nothing was sent.
            Overloaded: the proxy is out of file descriptors or is shutting down.
            Exception: whatever a streamed `body` raises, unchanged.
        """
        origin = self._open_pool().origin(endpoint)
        framing = _framing(method, body, content_length)
        head = encode_head(method, target, origin.host, headers, framing)
        if body is None or isinstance(body, bytes):
            exchange = _Exchange(head, body or b"", timeouts, method == "HEAD", on_start)
            return await self._send_whole(origin, exchange, rescue)
        connection = await self._connect(origin, timeouts)
        exchange = _Exchange(head, b"", timeouts, method == "HEAD", on_start)
        response = exchange.start(connection)
        connection.start_upload(
            tasks.spawn(upload(connection, body, content_length), name="upload")
        )
        return await _with_head(response)

    def idle_connections(self, endpoint: Endpoint) -> int:
        """Return how many connections to an endpoint wait for a request."""
        return 0 if self._pool is None else self._pool.idle_count(endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        """Close an endpoint's idle connections, and those in use when they are done."""
        if self._pool is not None:
            self._pool.forget(endpoint)

    async def close(self) -> None:
        """Close every connection, in use or not; nothing can be sent afterwards."""
        self._is_closed = True
        if self._pool is not None:
            await self._pool.close(_CLOSING_TIMEOUT_S)

    async def _send_whole(
        self, origin: Origin, exchange: _Exchange, rescue: Rescue | None
    ) -> Response:
        connection = origin.take()
        if connection is not None:
            try:
                return await _with_head(exchange.start(connection), rescue)
            except errors.UpstreamLost:
                if not connection.is_untouched or self._is_closed:
                    raise
                # The engine closed it between two requests. The others are likely as dead.
                origin.close_idle()
                connection = await self._connect_again(origin, exchange.timeouts)
                return await _with_head(exchange.start(connection), rescue)
        connection = await self._connect(origin, exchange.timeouts)
        return await _with_head(exchange.start(connection), rescue)

    async def _connect_again(self, origin: Origin, timeouts: Timeouts) -> Connection:
        """Connect after a request that may have been read by an engine that died then."""
        try:
            return await self._connect(origin, timeouts)
        except (errors.UpstreamUnreachable, errors.UpstreamTimeout) as error:
            text = "the connection ended before the answer, and no other could be opened"
            raise errors.UpstreamLost(text, detail=error.detail) from error

    async def _connect(self, origin: Origin, timeouts: Timeouts) -> Connection:
        context = None
        if origin.endpoint.tls:
            if self._ssl_context is None:
                # Reads files: not on the loop.
                self._ssl_context = await asyncio.to_thread(ssl.create_default_context)
            context = self._ssl_context
        return await connect(origin, timeouts.connect_s, context, self._allow)

    def _open_pool(self) -> Pool:
        if self._is_closed:
            raise errors.Overloaded("the proxy is shutting down")
        if self._pool is None:
            self._pool = Pool(self._limits, asyncio.get_running_loop())
        return self._pool


async def _with_head(response: Response, rescue: Rescue | None = None) -> Response:
    """Wait for the head; whatever prevents it closes the connection."""
    try:
        await response.head_arrived
    except asyncio.CancelledError:
        if rescue is not None and response.status:
            rescue(response)
        response.close()
        raise
    except BaseException:
        response.close()
        raise
    return response


def _framing(
    method: str, body: bytes | AsyncIterable[bytes] | None, content_length: int | None
) -> str:
    """Return the one framing line of a request, or "" if it has no body."""
    if body is None:
        return length_line(0) if method in _BODY_METHODS else ""
    if isinstance(body, bytes):
        return length_line(len(body))
    return CHUNKED if content_length is None else length_line(content_length)
