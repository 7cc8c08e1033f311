"""The way back to one client: aiohttp sends the head, events go straight to the transport.

Rule: `is_committed` turns true with the first byte and never back; what was not committed can
still become an error with a status of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from pdproxy.core.headers import to_client
from pdproxy.core.sse import encode_data
from pdproxy.dispatch.ports import Headers
from pdproxy.errors import ClientStalled

# In place of the library's, which tells versions.
SERVER = "pdproxy"
STREAM_TYPE = "text/event-stream; charset=utf-8"
JSON_TYPE = "application/json"
RAW_TYPE = "application/octet-stream"


class ClientDownstream:
    """One client's answer; owned by the handler of its request."""

    def __init__(
        self,
        request: web.Request,
        request_id: str,
        *,
        buffer_bytes: int,
        write_stall_s: float | None,
        told: Callable[[bool], Headers] = lambda _is_stream: (),
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the way back.

        While the proxy `is_ending`, a connection closes with the answer that begins.
        `told` returns headers of the proxy's own for an answer, or for the head of a stream.
        `buffer_bytes` is how much may wait for a slow client before its decoder is throttled.
        """
        self._request = request
        self._request_id = request_id
        self._buffer_bytes = buffer_bytes
        self._write_stall_s = write_stall_s
        self._told = told
        self._is_ending = is_ending
        self._is_chunked = request.version >= HttpVersion11
        self._transport: asyncio.Transport | None = None
        self._is_raw = False
        self.response: web.StreamResponse | None = None

    @property
    def status(self) -> int:
        """The status the client was sent, 0 if none."""
        return self.response.status if self.response is not None else 0

    @property
    def is_committed(self) -> bool:
        """Whether the client was sent anything."""
        return self.response is not None

    @property
    def is_congested(self) -> bool:
        """Whether more waits to be sent than may."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > self._buffer_bytes

    async def start(self, headers: Headers) -> None:
        """Send the head of an event stream."""
        response = web.StreamResponse(status=200, headers=self._headers(headers, STREAM_TYPE))
        response.headers["Cache-Control"] = "no-cache"
        # Asks nginx not to gather events.
        response.headers["X-Accel-Buffering"] = "no"
        await self._begin(response)

    async def start_raw(self, status: int, headers: Headers) -> None:
        """Send the head of an answer that passes through as it is."""
        own_type = next((value for name, value in headers if name == "content-type"), RAW_TYPE)
        self._is_raw = True
        await self._begin(
            web.StreamResponse(status=status, headers=self._headers(headers, own_type))
        )

    async def _begin(self, response: web.StreamResponse) -> None:
        if self._is_chunked:
            response.enable_chunked_encoding()
        self._take(response)
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=self._buffer_bytes)
        self._transport = transport
        await response.prepare(self._request)

    def write(self, block: bytes) -> None:
        """Send whole events, as one chunk in one write."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._is_chunked:
            block = b"%x\r\n%b\r\n" % (len(block), block)
        transport.write(block)

    async def drain(self) -> None:
        """Wait until the client has read down to the low-water mark.

        Raises:
            ClientStalled: it did not within the write stall timeout.
        """
        try:
            async with asyncio.timeout(self._write_stall_s):
                await self._request.writer.drain()
        except TimeoutError:
            self.cut()
            raise ClientStalled("the client did not read its answer") from None

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        own_type = next((value for name, value in headers if name == "content-type"), JSON_TYPE)
        own = self._headers(headers, own_type, is_stream=False)
        response = web.Response(status=status, body=body, headers=own)
        self._take(response)
        await response.prepare(self._request)
        await response.write_eof()

    def fail(self, error: bytes) -> None:
        """Tell of a failure after the start: by an error event, without a made-up finish reason.

        An answer that only passes through may be anything, so its connection is cut.
        """
        if self._is_raw:
            self.cut()
        else:
            self.write(encode_data(error))

    async def finish(self) -> None:
        """End a stream that was begun."""
        if self.response is not None:
            await self.response.write_eof()

    def cut(self) -> None:
        """Drop the connection at once."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    def _take(self, response: web.StreamResponse) -> None:
        self.response = response
        if self._is_ending():
            response.force_close()

    def _headers(
        self, engine: Headers, content_type: str, *, is_stream: bool = True
    ) -> CIMultiDict[str]:
        pairs = [p for p in to_client(engine) if p[0] != "content-type"]
        own = [("Content-Type", content_type), ("X-Request-Id", self._request_id)]
        headers = CIMultiDict([*pairs, *own, ("Server", SERVER)])
        headers.update(self._told(is_stream))
        return headers
