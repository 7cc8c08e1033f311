"""One request as a fake engine received it, and the pen that writes its answer byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tests.fakes.wire import PeerGone, Wire

if TYPE_CHECKING:
    from tests.fakes.engine import FakeEngine

HeaderList = Iterable[tuple[str, str]]


@dataclass(eq=False)
class EngineRequest:
    """What the peer sent.

    Attributes:
        closed_early: the peer left before its answer ended.
        stale: it came with a handle that was used or dropped before.
        finished: set when the answer has ended, in whatever way.
    """

    engine: FakeEngine
    method: str
    path: str
    query: str
    header_list: list[tuple[str, str]]
    body: bytes
    at_s: float
    connection: int
    closed_early: bool = False
    stale: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def headers(self) -> dict[str, str]:
        """Headers by lower-case name; repeated ones joined with a comma."""
        merged: dict[str, str] = {}
        for name, value in self.header_list:
            key = name.lower()
            merged[key] = f"{merged[key]}, {value}" if key in merged else value
        return merged

    @cached_property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def is_stream(self) -> bool:
        return self.json.get("stream") is True

    @property
    def is_release(self) -> bool:
        """Whether it is a decode that is only to be refused."""
        return b'"max_tokens":2147483647' in self.body and b"kv_transfer_params" in self.body


class Answer:
    """Writes one answer. Everything goes out at once, in exactly the pieces it is given in."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.left = False

    @property
    def gone(self) -> asyncio.Event:
        """Set when the peer has left."""
        return self._wire.gone

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        await self._wire.write(data)

    async def head(self, status: int, headers: HeaderList = ()) -> None:
        await self.send(head_bytes(status, headers))

    async def whole(self, status: int, body: bytes, headers: HeaderList = ()) -> None:
        """Write a complete answer with a Content-Length."""
        fields = [*headers, ("content-length", str(len(body)))]
        await self.send(head_bytes(status, fields) + body)

    async def json(self, value: object, status: int = 200, headers: HeaderList = ()) -> None:
        body = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        fields = [*headers, ("content-type", "application/json")]
        await self.whole(status, body.encode("utf-8", "surrogatepass"), fields)

    async def start_stream(self, headers: HeaderList = ()) -> None:
        fields = [
            ("content-type", "text/event-stream; charset=utf-8"),
            ("transfer-encoding", "chunked"),
        ]
        await self.head(200, [*headers, *fields])

    async def chunk(self, data: bytes) -> None:
        """Write one piece of a chunked body."""
        await self.send(chunk_bytes(data))

    async def event(self, value: object) -> None:
        """Write one event as one piece."""
        await self.chunk(event_bytes(value))

    async def end(self) -> None:
        """End a chunked body."""
        await self.send(b"0\r\n\r\n")

    async def hang(self) -> None:
        """Say nothing until the peer leaves."""
        await self.gone.wait()
        raise PeerGone

    def close(self) -> None:
        """Leave with a FIN."""
        self.left = True
        self._wire.close()

    def reset(self) -> None:
        """Leave with an RST."""
        self.left = True
        self._wire.reset()


REASONS: Mapping[int, str] = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Unavailable"}


def head_bytes(status: int, headers: HeaderList = ()) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
    lines.extend(f"{name}: {value}" for name, value in headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk_bytes(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event_bytes(value: object) -> bytes:
    """Return one event; a string goes out as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
