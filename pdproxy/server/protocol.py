"""One client's connection: the library's protocol, with our answers to what is not HTTP.

Rules: what cannot be understood is answered in OpenAI's shape and its connection closed, since
nobody knows where the next request would begin; a request's head has to come in time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from pdproxy.errors import HeaderTimeout, InvalidRequest, PDProxyError
from pdproxy.server.failures import closing_answer, to_failure
from pdproxy.server.intake import unsupported

logger = logging.getLogger(__name__)

FIRST_SERVER_ERROR = 500
# The library's "Can not decode content-encoding: brotli (br)." for what is not installed.
_ENCODING_OF_FAULT = re.compile(r"content-encoding: \w+ \((\w+)\)")


class ClientProtocol(web.RequestHandler):
    """The HTTP/1.1 protocol of one client."""

    __slots__ = ("_head_timer", "_header_s", "_is_ending")

    def __init__(
        self,
        server: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        header_s: float | None,
        keepalive_s: float,
        max_header_bytes: int,
        is_ending: Callable[[], bool],
    ) -> None:
        """Prepare for one connection.

        `header_s` is for a head to come whole, None: no limit. While the proxy `is_ending`, a
        connection closes with its next answer.
        """
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # as the library's own documents say
            keepalive_timeout=keepalive_s,
            max_line_size=max_header_bytes,
            max_field_size=max_header_bytes,
            tcp_keepalive=True,
        )
        self._header_s = header_s
        self._is_ending = is_ending
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, data: bytes
    ) -> None:
        """Feed the parser; a head that has begun has to be whole in time."""
        super().data_received(data)
        if self._has_request:
            self._stop_timer()
        elif self._head_timer is None and self._header_s is not None:
            self._head_timer = self._loop.call_later(self._header_s, self._give_up)

    def connection_lost(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, exc: BaseException | None
    ) -> None:
        """Leave nothing behind."""
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return what a client is told whose request is no HTTP, or met a bug.

        Raises:
            ConnectionError: an answer has begun.
        """
        if status >= FIRST_SERVER_ERROR:
            logger.error("%s failed by a bug", request.path, exc_info=exc)
        else:
            logger.debug("%s sent what is not HTTP: %s", request.remote, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        if status >= FIRST_SERVER_ERROR:
            return _answer(PDProxyError("internal error"))
        return _answer(_refusal(exc))

    async def finish_response(  # type: ignore[explicit-override] # typing.override: new in 3.12
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """End an answer; what the library raised by itself is put in our words."""
        if isinstance(resp, web.HTTPException):
            resp = _answer(InvalidRequest(f"the request is refused: {resp.reason}"), resp.status)
        if self._is_ending():
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def close_if_idle(self) -> None:
        """Close the connection if it waits for a request; a body on its way may still come."""
        if self._waiter is not None and not self._waiter.done():
            self.force_close()

    @property
    def _has_request(self) -> bool:
        """Whether a head is whole and not answered yet."""
        return bool(self._messages) or self._current_request is not None

    def _give_up(self) -> None:
        self._head_timer = None
        transport = self.transport
        if self._has_request or transport is None or transport.is_closing():
            return
        error = HeaderTimeout("the request's head did not arrive in time")
        transport.write(closing_answer(error))
        self.force_close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _refusal(fault: BaseException | None) -> PDProxyError:
    """Return what a client is told whose request the parser refused."""
    if isinstance(fault, ContentEncodingError):
        name = _ENCODING_OF_FAULT.search(fault.message)
        if name is not None:
            return unsupported(name[1])
    return InvalidRequest("the request is not valid HTTP/1.1")


def _answer(error: PDProxyError, status: int | None = None) -> web.Response:
    failure = to_failure(error)
    response = web.Response(
        status=status or failure.status, headers=failure.headers, body=failure.body
    )
    response.force_close()
    return response
