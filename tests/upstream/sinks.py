"""Body sinks for tests."""

from __future__ import annotations

import asyncio

from pdproxy import errors


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
