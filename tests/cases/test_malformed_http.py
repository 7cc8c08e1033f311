"""What is not HTTP, or could be read in two ways: refused in our own words, and never passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes.client import RawClient, Reply, as_json

BODY = as_json(chat(max_tokens=2))
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED_BODY = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
HOST = b"Host: localhost\r\nContent-Type: application/json\r\n"
LINE = b"POST %b HTTP/1.1\r\n" % CHAT.encode()


def request(headers: bytes, body: bytes = BODY, line: bytes = LINE) -> bytes:
    return line + HOST + headers + b"\r\n" + body


MALFORMED = {
    "length-and-chunked": request(LENGTH + b"Transfer-Encoding: chunked\r\n", CHUNKED_BODY),
    "chunked-and-length": request(b"Transfer-Encoding: chunked\r\n" + LENGTH, CHUNKED_BODY),
    "two-lengths": request(LENGTH + b"Content-Length: 3\r\n"),
    "two-equal-lengths": request(LENGTH + LENGTH),
    "list-of-lengths": request(b"Content-Length: %d, 3\r\n" % len(BODY)),
    "signed-length": request(b"Content-Length: +%d\r\n" % len(BODY)),
    "negative-length": request(b"Content-Length: -1\r\n"),
    "hexadecimal-length": request(b"Content-Length: 0x10\r\n"),
    "space-before-colon": request(b"Transfer-Encoding : chunked\r\n", CHUNKED_BODY),
    "chunked-twice": request(b"Transfer-Encoding: chunked, chunked\r\n", CHUNKED_BODY),
    "chunked-not-last": request(b"Transfer-Encoding: chunked, identity\r\n", CHUNKED_BODY),
    "unknown-coding": request(b"Transfer-Encoding: xchunked\r\n", CHUNKED_BODY),
    "bare-cr-in-a-value": request(LENGTH + b"X-A: b\rX-C: d\r\n"),
    "nul-in-a-value": request(LENGTH + b"X-A: b\0c\r\n"),
    "folded-line": request(LENGTH + b"X-A: b\r\n c\r\n"),
    "space-in-a-name": request(LENGTH + b"X A: b\r\n"),
    "empty-name": request(LENGTH + b": b\r\n"),
    "no-colon": request(LENGTH + b"X-A\r\n"),
    "bad-chunk-size": request(b"Transfer-Encoding: chunked\r\n", b"zz\r\n" + BODY),
    "chunk-without-its-end": request(
        b"Transfer-Encoding: chunked\r\n", b"%x\r\n%bXX0\r\n\r\n" % (len(BODY), BODY)
    ),
    "unknown-version": request(LENGTH, line=b"POST %b HTTP/9.9\r\n" % CHAT.encode()),
    "no-version": request(LENGTH, line=b"POST %b\r\n" % CHAT.encode()),
    "no-path": request(LENGTH, line=b"POST HTTP/1.1\r\n"),
    "space-in-the-method": request(LENGTH, line=b"PO ST / HTTP/1.1\r\n"),
    "no-http-at-all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello there\r\n\r\n",
    "long-header": request(LENGTH + b"X-A: " + b"b" * (1 << 17) + b"\r\n"),
    "long-line": request(LENGTH, line=b"POST /%b HTTP/1.1\r\n" % (b"a" * (1 << 17))),
}


@asynccontextmanager
async def peer_of(stage: Scene) -> AsyncIterator[RawClient]:
    async with await RawClient.connect(stage.port) as peer:
        yield peer


async def answer_to(peer: RawClient, sent: bytes) -> Reply:
    await peer.wire.write(sent)
    return await peer.read_rest(await peer.read_head(10), 10)


def assert_ours(reply: Reply) -> None:
    """It speaks in OpenAI's shape, and tells nothing of the libraries inside."""
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["server"] == "pdproxy"
    assert b"aiohttp" not in reply.body.lower()


@pytest.mark.case("C89")
@pytest.mark.parametrize("form", MALFORMED)
async def test_a_malformed_request_is_refused_and_its_connection_closed(form: str) -> None:
    async with scene() as stage, peer_of(stage) as peer:
        reply = await answer_to(peer, MALFORMED[form])
        async with asyncio.timeout(10):
            await peer.wire.gone.wait()
        good = await stage.post(CHAT, chat(max_tokens=2))

        assert reply.status in {400, 413}
        assert_ours(reply)
        assert good.status == 200
        # The good one alone reached an engine.
        assert (len(stage.p1.calls), len(stage.d1.calls)) == (1, 1)


@pytest.mark.case("C89")
async def test_what_follows_a_malformed_request_is_not_a_request() -> None:
    smuggled = request(LENGTH)
    async with scene() as stage, peer_of(stage) as peer:
        await answer_to(peer, MALFORMED["length-and-chunked"] + smuggled)
        async with asyncio.timeout(10):
            await peer.wire.gone.wait()

        assert stage.d1.calls == []


@pytest.mark.case("C89")
async def test_pipelined_requests_are_answered_in_order() -> None:
    bodies = [as_json(chat(max_tokens=n)) for n in (1, 2, 3)]
    sent = b"".join(request(b"Content-Length: %d\r\n" % len(b), b) for b in bodies)
    async with scene() as stage, peer_of(stage) as peer:
        await peer.wire.write(sent)
        counts = []
        for _ in bodies:
            reply = await peer.read_rest(await peer.read_head())
            counts.append(reply.json["usage"]["completion_tokens"])

    assert counts == [1, 2, 3]


@pytest.mark.case("C89")
async def test_chunk_extensions_are_read_over() -> None:
    body = b"%x;a=b;c\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    async with scene() as stage, peer_of(stage) as peer:
        reply = await answer_to(peer, request(b"Transfer-Encoding: chunked\r\n", body))

        assert reply.status == 200
        assert "transfer-encoding" not in stage.d1.calls[0].headers


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/instances/add"])
@pytest.mark.parametrize("encoding", ["gibberish", "br", "zstd", "gzip, br", "x-gzip"])
async def test_an_encoding_that_cannot_be_read_is_named(path: str, encoding: str) -> None:
    line = b"POST %b HTTP/1.1\r\n" % path.encode()
    async with scene() as stage, peer_of(stage) as peer:
        coding = b"Content-Encoding: %b\r\n" % encoding.encode()
        reply = await answer_to(peer, request(LENGTH + coding, line=line))

        assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
        assert encoding in reply.error["message"]
        assert (stage.p1.calls, stage.d1.calls) == ([], [])
    assert_ours(reply)


@pytest.mark.parametrize("encoding", [b"identity", b" Identity ", b""])
async def test_no_encoding_may_be_said(encoding: bytes) -> None:
    coding = b"Content-Encoding: %b\r\n" % encoding
    async with scene() as stage, peer_of(stage) as peer:
        reply = await answer_to(peer, request(LENGTH + coding))

    assert reply.status == 200


async def test_an_expectation_that_is_not_known_is_refused() -> None:
    async with scene() as stage, peer_of(stage) as peer:
        reply = await answer_to(peer, request(LENGTH + b"Expect: a-miracle\r\n"))

    assert reply.status == 417
    assert_ours(reply)


async def test_a_body_is_asked_for_when_the_client_waits_for_that() -> None:
    async with scene() as stage, peer_of(stage) as peer:
        await peer.wire.write(request(LENGTH + b"Expect: 100-continue\r\n", b""))
        async with asyncio.timeout(10):
            interim = await peer.wire.read_until(b"\r\n\r\n")
        reply = await answer_to(peer, BODY)

    assert interim.startswith(b"HTTP/1.1 100")
    assert reply.status == 200


@pytest.mark.parametrize("method", [b"CONNECT proxy:80", b"TRACE /", b"PROPFIND /"])
async def test_methods_of_other_protocols_are_refused(method: bytes) -> None:
    async with scene() as stage, peer_of(stage) as peer:
        reply = await answer_to(peer, method + b" HTTP/1.1\r\nHost: proxy\r\n\r\n")

    assert reply.status in {400, 404, 405}
    assert_ours(reply)


async def test_a_head_that_trickles_is_given_up() -> None:
    async with scene((None,), (None,), "--header-timeout", "0.3") as stage, peer_of(stage) as peer:
        await peer.wire.write(LINE + b"X-A: ")
        reply = await peer.read_rest(await peer.read_head(5), 5)
        async with asyncio.timeout(5):
            await peer.wire.gone.wait()

    assert (reply.status, reply.error["code"]) == (408, "header_timeout")


async def test_the_time_for_a_head_does_not_count_for_its_answer() -> None:
    async with scene((None,), (None,), "--header-timeout", "0.2") as stage, peer_of(stage) as peer:
        stage.d1.token_delay_s = 0.1
        body = as_json(chat(stream=True, max_tokens=6))
        sent = request(b"Content-Length: %d\r\n" % len(body), body)
        await peer.wire.write(sent[:30])
        await asyncio.sleep(0.05)
        reply = await answer_to(peer, sent[30:])
        again = await answer_to(peer, sent)

    assert reply.text == again.text != ""
