"""Everything that is not split into legs: passed to one instance untouched, streaming both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Protocol

from pdproxy.core.fleet import Lease
from pdproxy.core.headers import HeaderList
from pdproxy.core.instance import Instance, Role
from pdproxy.core.load import Cost
from pdproxy.core.retry import was_never_sent
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.attempt import attempt
from pdproxy.dispatch.legs import Tools
from pdproxy.dispatch.ports import Downstream, Headers
from pdproxy.dispatch.tracing import Span
from pdproxy.errors import UpstreamError
from pdproxy.upstream.response import Response


class RawDownstream(Downstream, Protocol):
    """A way back that takes any answer, not only event streams."""

    async def start_raw(self, status: int, headers: Headers) -> None:
        """Send status and head of an answer whose bytes follow by `write`."""
        ...


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as it came.

    Attributes:
        target: path and query.
        body: bytes, or the client's stream of them with `content_length` if it said one.
    """

    method: str
    target: str
    headers: HeaderList
    body: bytes | AsyncIterable[bytes] | None
    content_length: int | None = None


async def pass_through(
    tools: Tools, request: RawRequest, account: Account, downstream: RawDownstream
) -> None:
    """Send a request to one instance and its answer back, whatever its status.

    Decoders serve it, since a request that is not split is decoded as well; prefillers do if
    there is no decoder. Only an instance that certainly got nothing is replaced by another.

    Raises:
        PDProxyError: no instance answered, or its answer broke off.
    """
    async with tools.admission.admitted(0, account.timeline):
        await _pass(tools, request, account, downstream)


async def _pass(
    tools: Tools, request: RawRequest, account: Account, downstream: RawDownstream
) -> None:
    role = Role.DECODE if tools.fleet.available(Role.DECODE) else Role.PREFILL
    failed: list[Instance] = []
    size = len(request.body) if isinstance(request.body, bytes) else 0
    while True:
        with tools.fleet.lease(role, Cost(body_bytes=size), avoid=failed) as lease:
            account.decoder = lease.instance.label
            account.decode_attempts += 1
            try:
                await _try_one(tools, request, lease, account.span, downstream)
            except UpstreamError as error:
                failed.append(lease.instance)
                is_last = len(failed) >= tools.rules.max_attempts
                if is_last or not was_never_sent(error) or not _has_other(tools, role, failed):
                    raise
            else:
                return


async def _try_one(
    tools: Tools,
    request: RawRequest,
    lease: Lease,
    parent: Span,
    downstream: RawDownstream,
) -> None:
    with attempt(tools, lease, parent) as span:
        response = await tools.client.send(
            lease.instance.endpoint,
            request.method,
            request.target,
            span.carry(request.headers),
            request.body,
            timeouts=tools.rules.decode_whole,
            content_length=request.content_length,
            on_start=lease.hold,
        )
        with response:
            await _send_back(response, downstream)


async def _send_back(response: Response, downstream: RawDownstream) -> None:
    await downstream.start_raw(response.status, response.headers)
    relay = RawRelay(response, downstream)
    response.pipe(relay)
    await relay.finished()


def _has_other(tools: Tools, role: Role, failed: list[Instance]) -> bool:
    return any(instance not in failed for instance in tools.fleet.available(role))


class RawRelay:
    """A body sink that writes each read to the client as it came."""

    def __init__(self, response: Response, downstream: Downstream) -> None:
        self._response = response
        self._downstream = downstream
        self._failure: UpstreamError | None = None
        self._is_over = False
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def finished(self) -> None:
        """Wait for the end, throttling the engine while the client is slow.

        Raises:
            UpstreamError: the answer broke off.
        """
        while not self._is_over:
            self._wake = asyncio.get_running_loop().create_future()
            if self._downstream.is_congested:
                await self._downstream.drain()
                self._response.resume()
            await self._wake
        if self._failure is not None:
            raise self._failure

    def body_received(self, data: bytes) -> None:
        """Take the bytes of one read."""
        self._downstream.write(data)
        if self._downstream.is_congested:
            self._response.pause()
            self._rouse()

    def body_ended(self) -> None:
        """Take the end of the body."""
        self._is_over = True
        self._rouse()

    def body_failed(self, error: UpstreamError) -> None:
        """Take the failure of the connection."""
        self._failure = error
        self.body_ended()

    def _rouse(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)
