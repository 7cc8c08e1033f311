"""A raw HTTP/1.1 client: sees each chunk and event as it comes, and leaves as rudely as asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from tests.fakes.wire import PeerGone, Wire

DONE = "[DONE]"
WITHIN_S = 30.0


@dataclass(slots=True)
class Reply:
    """An answer: head at once, `body` and `chunks` as far as they were read.

    `chunks` keeps each piece of a chunked body with its arrival time, which shows what the sender
    wrote together. `ended` says that the body came to its proper end.
    """

    status: int
    header_list: list[tuple[str, str]]
    body: bytes = b""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    ended: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Headers by lower-case name; a repeated one is joined with a comma."""
        merged: dict[str, str] = {}
        for name, value in self.header_list:
            key = name.lower()
            merged[key] = f"{merged[key]}, {value}" if key in merged else value
        return merged

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI-shaped error of this answer."""
        assert self.headers["content-type"].startswith("application/json"), self.headers
        error = self.json["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        return dict(error)

    @property
    def events(self) -> list[str]:
        """The data of each event of a streamed answer."""
        return events_of(self.body)

    @property
    def chunks_of_json(self) -> list[dict[str, Any]]:
        """The events that are JSON, parsed."""
        return [json.loads(event) for event in self.events if event != DONE]

    @property
    def text(self) -> str:
        """All text of choice 0, streamed or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return text_of(self.json)
        return "".join(text_of(chunk) for chunk in self.chunks_of_json)


class RawClient:
    """One connection to a server."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1") -> Self:
        return cls(await Wire.connect(port, host))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wire.close()

    async def send_request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Send a request; Host, if not given, and for a body Content-Length are added."""
        await self.wire.write(request_bytes(method, path, body, headers))

    async def read_head(self, within_s: float = WITHIN_S) -> Reply:
        """Read the head of the next answer; interim (1xx) ones are passed over."""
        async with asyncio.timeout(within_s):
            while True:
                head = (await self.wire.read_until(b"\r\n\r\n")).decode("latin-1")
                line, *rest = head[:-4].split("\r\n")
                status = int(line.split(" ")[1])
                if status >= 200:
                    pairs = [header.partition(":") for header in rest]
                    return Reply(status, [(name, value.strip()) for name, _, value in pairs])

    async def read_chunk(self, reply: Reply, within_s: float = WITHIN_S) -> bytes | None:
        """Read the next piece of a chunked body; None at its end.

        Raises:
            PeerGone: the body was cut off.
        """
        async with asyncio.timeout(within_s):
            piece = await self.wire.read_chunk()
        if piece is None:
            reply.ended = True
            return None
        reply.body += piece
        reply.chunks.append((asyncio.get_running_loop().time(), piece))
        return piece

    async def read_event(self, reply: Reply, within_s: float = WITHIN_S) -> str | None:
        """Read on until one more event is complete; None at the end of the body."""
        known = len(reply.events)
        while await self.read_chunk(reply, within_s) is not None:
            if len(events := reply.events) > known:
                return events[known]
        return None

    async def read_rest(self, reply: Reply, within_s: float = WITHIN_S) -> Reply:
        """Read the body to its end, or to where the server cut it off (`ended` tells)."""
        if reply.headers.get("transfer-encoding", "").lower() == "chunked":
            try:
                while await self.read_chunk(reply, within_s) is not None:
                    pass
            except PeerGone:
                pass
            return reply
        async with asyncio.timeout(within_s):
            reply.body = await self.wire.read_body(reply.headers)
        reply.ended = True
        return reply

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Iterable[tuple[str, str]] = (),
        within_s: float = WITHIN_S,
    ) -> Reply:
        """Send a request and read its whole answer."""
        await self.send_request(method, path, body, headers)
        reply = await self.read_head(within_s)
        if method == "HEAD":
            return reply
        return await self.read_rest(reply, within_s)

    def leave(self, how: str = "fin") -> None:
        """Leave with a FIN or, for `rst`, with an RST."""
        if how == "rst":
            self.wire.reset()
        else:
            self.wire.close()


# --- one request on a connection of its own


async def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Iterable[tuple[str, str]] = (),
    within_s: float = WITHIN_S,
) -> Reply:
    async with await RawClient.connect(port) as client:
        return await client.ask(method, path, body, headers, within_s)


async def get(port: int, path: str, headers: Iterable[tuple[str, str]] = ()) -> Reply:
    return await ask(port, "GET", path, headers=headers)


async def post(
    port: int,
    path: str,
    body: object,
    headers: Iterable[tuple[str, str]] = (),
    within_s: float = WITHIN_S,
) -> Reply:
    """POST a value as JSON (bytes go as they are) and read the whole answer."""
    return await ask(port, "POST", path, as_json(body), [*JSON_TYPE, *headers], within_s)


@asynccontextmanager
async def streaming(
    port: int, path: str, body: object, headers: Iterable[tuple[str, str]] = ()
) -> AsyncIterator[tuple[RawClient, Reply]]:
    """POST a value as JSON and hand out the connection as soon as the answer's head is there."""
    async with await RawClient.connect(port) as client:
        await client.send_request("POST", path, as_json(body), [*JSON_TYPE, *headers])
        yield client, await client.read_head()


JSON_TYPE = (("Content-Type", "application/json"),)


def as_json(body: object) -> bytes:
    if isinstance(body, bytes):
        return body
    return json.dumps(body).encode()


def request_bytes(
    method: str, path: str, body: bytes | None, headers: Iterable[tuple[str, str]] = ()
) -> bytes:
    headers = list(headers)
    if not any(name == "Host" for name, _ in headers):
        headers.insert(0, ("Host", "localhost"))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


# --- reading answers


def events_of(body: bytes) -> list[str]:
    """Return the data of each whole event; strict: LF only, one data line, no comments."""
    events: list[str] = []
    for block in body.split(b"\n\n")[:-1]:
        fields = [line.partition(":") for line in block.decode().split("\n")]
        assert {name for name, _, _ in fields} <= {"data", "event", "id", "retry"}, block
        data = [value.strip() for name, _, value in fields if name == "data"]
        assert len(data) == 1, block
        events.append(data[0])
    return events


def text_of(document: dict[str, Any], index: int = 0) -> str:
    """Return the text that a chunk or a whole answer has for one choice."""
    text = ""
    for choice in document.get("choices") or []:
        if choice.get("index", 0) == index:
            said = choice.get("delta") or choice.get("message") or {}
            text += choice.get("text") or said.get("content") or ""
    return text


def assert_whole_stream(reply: Reply) -> None:
    """Check what every good stream has: 200, event stream, exactly one [DONE], at the end."""
    assert reply.status == 200, (reply.status, reply.body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.ended
    assert reply.events.count(DONE) == 1
    assert reply.events[-1] == DONE
    assert not any("error" in chunk for chunk in reply.chunks_of_json)


def assert_ends_in_error(reply: Reply) -> dict[str, Any]:
    """Check that a stream ends with one error event an SDK raises for; return the error."""
    assert reply.status == 200, (reply.status, reply.body)
    assert reply.ended
    chunks = reply.chunks_of_json
    assert [index for index, chunk in enumerate(chunks) if "error" in chunk] == [len(chunks) - 1]
    assert reply.events.count(DONE) <= 1
    assert reply.events[-1] == DONE or "error" in json.loads(reply.events[-1])
    error = chunks[-1]["error"]
    assert error["message"]
    assert error["type"]
    return dict(error)
