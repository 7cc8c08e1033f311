"""A server that plays scripts of bytes, pauses and ends, and keeps what it was sent.

A script is a sequence of steps for one connection: bytes are written as they are, `REQUEST` waits
for a whole request, an event is waited for, and `EOF`, `RST` and `STALL` end it. After its last
step a connection stays open until the client leaves. The n-th connection plays the n-th script,
later ones the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from pdproxy.core.instance import Endpoint
from pdproxy.upstream.client import Timeouts

PATIENT = Timeouts(connect_s=10, head_s=10, idle_s=10)


class Step(enum.Enum):
    REQUEST = "wait for a whole request"
    PAUSE = "let the client read what it was sent"
    EOF = "close"
    RST = "close with a reset"
    STALL = "stop reading and keep the connection"


REQUEST, PAUSE, EOF, RST, STALL = Step

Script = Sequence[bytes | Step | asyncio.Event]


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as it came; a chunked body still has its framing."""

    head: bytes
    body: bytes

    def values(self, name: str) -> list[str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        pairs = [line.partition(":") for line in lines if line]
        return [value.strip() for key, _, value in pairs if key.lower() == name]


def _nothing_listens() -> None:
    raise AssertionError("the server is not up yet")


class RawServer:
    """What the scripted server has seen so far."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = list(scripts)
        self.requests: list[RawRequest] = []
        self.connection_count = 0
        self.open_count = 0
        self.endpoint = Endpoint.parse("127.0.0.1:1")
        self.stop_listening: Callable[[], None] = _nothing_listens
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        script = self.scripts[min(self.connection_count, len(self.scripts) - 1)]
        self.connection_count += 1
        self.open_count += 1
        try:
            # Python 3.11's streams report the cancellation of a server's task as a crash.
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
                await self._play(script, reader, writer)
        finally:
            self.open_count -= 1
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(
        self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step is Step.REQUEST:
                self.requests.append(await read_request(reader))
            elif await _is_end(step, writer):
                return
        while await reader.read(65536):
            pass


async def _is_end(step: Step, writer: asyncio.StreamWriter) -> bool:
    if step is Step.PAUSE:
        for _ in range(4):
            await asyncio.sleep(0)
    elif step is Step.RST:
        reset(writer)
    elif step is Step.STALL:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # typed as a write transport
        await asyncio.Event().wait()
    return step in {Step.EOF, Step.RST}


def reset(writer: asyncio.StreamWriter) -> None:
    """Make the close of this connection a reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> RawRequest:
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        return RawRequest(head, await _read_chunks(reader))
    if b"content-length:" not in lower:
        return RawRequest(head, b"")
    length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
    return RawRequest(head, await reader.readexactly(length))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        body += line + await reader.readexactly(int(line, 16) + 2)
        if line == b"0\r\n":
            return body


@contextlib.asynccontextmanager
async def raw_server(
    *scripts: Script, tls: ssl.SSLContext | None = None, limit: int = 2**20, backlog: int = 2048
) -> AsyncIterator[RawServer]:
    """Serve on a free port of 127.0.0.1 while the block runs."""
    raw = RawServer(scripts)
    server = await asyncio.start_server(
        raw.serve_one, "127.0.0.1", 0, ssl=tls, limit=limit, backlog=backlog
    )
    host, port = server.sockets[0].getsockname()[:2]
    raw.endpoint = Endpoint.of(host, port, tls is not None)
    raw.stop_listening = server.close
    try:
        yield raw
    finally:
        server.close()
        await raw.stop()
        await server.wait_closed()


def answer(body: bytes = b"ok", status: int = 200, extra: bytes = b"") -> bytes:
    """Return a response framed by its length; `extra` holds whole header lines."""
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), extra, body)


def chunked(*parts: bytes, trailers: bytes = b"") -> bytes:
    """Return a chunked response."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + trailers + b"\r\n"
