"""What most tests here do: post something, pipe a body, count open sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os

from pdproxy import errors
from pdproxy.upstream.client import EngineClient, Response, Timeouts
from tests.upstream.raw_server import PATIENT, RawServer


async def post(
    client: EngineClient,
    server: RawServer,
    timeouts: Timeouts = PATIENT,
    *,
    body: bytes | None = b"hi",
    method: str = "POST",
) -> Response:
    return await client.send(server.endpoint, method, "/x", [], body, timeouts=timeouts)


def open_sockets() -> int:
    """Count them: of other files a loop opens some when it first needs them."""
    gc.collect()
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


class RecordingSink:
    """Keeps every call, and fails the test on one after the last."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.error: errors.UpstreamError | None = None
        self.is_ended = False
        self.done = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def body_received(self, data: bytes) -> None:
        assert data
        assert not self.done.is_set()
        self.parts.append(data)

    def body_ended(self) -> None:
        assert not self.done.is_set()
        self.is_ended = True
        self.done.set()

    def body_failed(self, error: errors.UpstreamError) -> None:
        assert not self.done.is_set()
        self.error = error
        self.done.set()

    async def outcome(self) -> errors.UpstreamError | None:
        """Wait for the end; return the error, None for a complete body."""
        async with asyncio.timeout(20):
            await self.done.wait()
        return self.error
