"""ResponseParser: what is no response is a fault, and nothing can make it grow without bound."""

from __future__ import annotations

import pytest

from pdproxy.upstream.framing import ResponseParser
from tests.upstream.raw_server import answer, chunked
from tests.upstream.test_framing import LIMIT, feed_all


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"garbage\r\n\r\n", id="garbage"),
        pytest.param(b"\x16\x03\x01\x02\x00", id="TLS"),
        pytest.param(b"HTTP/1.1 2x0 OK\r\n\r\n", id="status"),
        pytest.param(b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n", id="status below 100"),
        pytest.param(b"HTTP/1.1 101 Switching\r\n\r\nabc", id="101"),
        pytest.param(
            b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nabc",
            id="101 with an upgrade",
        ),
        pytest.param(answer(extra=b"Content-Length: 2\r\n"), id="two lengths"),
        pytest.param(answer(extra=b"Transfer-Encoding: chunked\r\n"), id="two framings"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="coding"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", id="only a coding"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="negative length"),
        pytest.param(answer(extra=b"X-A: b\x00c\r\n"), id="NUL"),
        pytest.param(answer(extra=b"X-A : b\r\n"), id="space before the colon"),
        pytest.param(answer(extra=b"X-A: b\r\n c\r\n"), id="folded header"),
    ],
)
@pytest.mark.case("C89")
def test_what_is_no_response_is_a_fault_at_any_cut(message):
    for cut in range(1, len(message) + 1):
        parser = ResponseParser(LIMIT)

        feed_all(parser, message[:cut], message[cut:])

        assert parser.fault is not None
        assert not parser.is_reusable
        assert not parser.end_of_input()


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(b"zz\r\n", id="size"),
        pytest.param(b"ffffffffffffffffff\r\n", id="overflow"),
        pytest.param(b"2\r\nokX\r\n", id="no line end after the data"),
    ],
)
def test_body_bytes_ahead_of_a_fault_are_returned(chunk):
    parser = ResponseParser(LIMIT)

    got = parser.feed(chunked(b"good")[: -len(b"0\r\n\r\n")] + chunk)

    assert got.startswith(b"good")
    assert parser.has_head
    assert parser.fault is not None
    assert not parser.is_complete


@pytest.mark.parametrize("read_bytes", [1, 100, 1_000_000])
@pytest.mark.parametrize(
    "message",
    [
        pytest.param(answer(extra=b"X-A: %b\r\n" % (b"a" * LIMIT)), id="one long header"),
        pytest.param(answer(extra=b"X-A: b\r\n" * LIMIT), id="many headers"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * LIMIT, id="many interim heads"),
    ],
)
@pytest.mark.case("C70")
def test_an_endless_head_is_refused(message, read_bytes):
    parser = ResponseParser(LIMIT)

    for start in range(0, len(message), read_bytes):
        parser.feed(message[start : start + read_bytes])
        if parser.fault is not None:
            break

    assert parser.fault is not None
    assert not parser.is_complete


def test_a_head_within_the_limit_may_share_a_read_with_a_larger_body():
    parser = ResponseParser(LIMIT)

    got = parser.feed(answer(b"x" * 10 * LIMIT, extra=b"X-A: %b\r\n" % (b"a" * (LIMIT - 100))))

    assert len(got) == 10 * LIMIT
    assert parser.is_reusable


def test_trailers_and_chunk_extensions_are_bounded():
    for endless in (b"0\r\n" + b"X-A: b\r\n" * LIMIT, b"5;" + b"x" * 2 * LIMIT):
        parser = ResponseParser(LIMIT)
        parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

        for start in range(0, len(endless), 500):
            parser.feed(endless[start : start + 500])

        assert parser.fault is not None


def test_many_small_chunks_with_their_framing_are_no_fault():
    parser = ResponseParser(LIMIT)
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    for _ in range(LIMIT):
        for read in (b"1", b"\r\n", b"x", b"\r\n"):
            parser.feed(read)

    assert parser.fault is None
