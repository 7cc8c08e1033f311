"""A buffered byte stream over one TCP connection, for fakes on either side of the proxy.

Rule: nothing is hidden. Each read keeps its arrival time, a peer that leaves sets `gone` even while
nobody reads, and a connection ends by FIN or by RST as the test says.
"""

# Python 3.11 has no typing.override to mark asyncio's callbacks with.
# mypy: disable-error-code="explicit-override"

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from typing import Self, cast


class PeerGone(Exception):
    """The other side closed or reset the connection."""


class Wire(asyncio.Protocol):
    """One connection: what came in is buffered, what goes out is under the test's control."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.gone = asyncio.Event()
        self.total_in_bytes = 0
        self._buffer = bytearray()
        self._more = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._is_reset = False  # before it was made

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1") -> Self:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(cls, host, port)
        return wire

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._is_reset:
            self.reset()
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connected.set()

    def data_received(self, data: bytes) -> None:
        self.total_in_bytes += len(data)
        self._buffer += data
        self._more.set()

    def eof_received(self) -> bool:
        self._leave()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _leave(self) -> None:
        self.gone.set()
        self._more.set()
        self._writable.set()

    # --- reading

    async def read_some(self) -> bytes:
        """Return what has arrived, waiting for at least one byte; `b""` at the end."""
        while not self._buffer:
            if self.gone.is_set():
                return b""
            self._more.clear()
            await self._more.wait()
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    async def read_until(self, mark: bytes) -> bytes:
        """Return the bytes up to and including `mark`.

        Raises:
            PeerGone: the connection ended before.
        """
        seen = 0
        while (at := self._buffer.find(mark, max(0, seen - len(mark)))) < 0:
            seen = len(self._buffer)
            await self._grow()
        return self._take(at + len(mark))

    async def read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._grow()
        return self._take(count)

    async def read_body(self, headers: Mapping[str, str]) -> bytes:
        """Read a message body by its framing; `headers` have lower-case names."""
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self.read_exactly(int(headers.get("content-length", "0")))
        body = bytearray()
        while (piece := await self.read_chunk()) is not None:
            body += piece
        return bytes(body)

    async def read_chunk(self) -> bytes | None:
        """Read one piece of a chunked body; None at its end."""
        size = int((await self.read_until(b"\r\n")).split(b";")[0], 16)
        data = await self.read_exactly(size)
        while await self.read_until(b"\r\n") != b"\r\n":
            assert size == 0, "a chunk is longer than it says"
        return data if size else None

    async def _grow(self) -> None:
        before = len(self._buffer)
        while len(self._buffer) == before:
            if self.gone.is_set():
                raise PeerGone
            self._more.clear()
            await self._more.wait()

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def pause_reading(self) -> None:
        """Leave further bytes in the kernel: a client that does not read."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.transport.resume_reading()

    # --- writing and leaving

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    async def write(self, data: bytes) -> None:
        """Send `data` at once and wait until the kernel took nearly all of it.

        Raises:
            PeerGone: the peer has left.
        """
        if self.gone.is_set() or self.transport.is_closing():
            raise PeerGone
        self.transport.write(data)
        await self._writable.wait()

    def close(self) -> None:
        """Leave with a FIN, after what was written."""
        self.transport.close()

    def reset(self) -> None:
        """Leave with an RST: what is unsent or unread is lost."""
        if self._transport is None:
            self._is_reset = True
            return
        if self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def half_close(self) -> None:
        """Send a FIN and go on reading."""
        self.transport.write_eof()
