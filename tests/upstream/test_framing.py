"""ResponseParser: whatever the cuts between reads, the same message comes out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.upstream.framing import ResponseParser
from tests.upstream.raw_server import answer, chunked

LIMIT = 4096

CONTENT_LENGTH = answer(b"hello world", extra=b"X-Empty:\r\nX-Two: a b \t \r\n")
CHUNKED = chunked(b"hel", b"lo", b" world", trailers=b"X-Trailer: t\r\nX-Other:\r\n")
EXTENSIONS = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    b'5;a=b;c="d"\r\nhello\r\n6;x\r\n world\r\n0;last\r\n\r\n'
)
INTERIM = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + CONTENT_LENGTH
)
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello world"
HTTP_1_0 = b"HTTP/1.0 200 OK\r\n\r\nhello world"
NO_BODY = b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n"
NOT_MODIFIED = b"HTTP/1.1 304 Not Modified\r\nContent-Length: 11\r\n\r\n"

FRAMED = [
    pytest.param(CONTENT_LENGTH, 200, b"hello world", id="content-length"),
    pytest.param(CHUNKED, 200, b"hello world", id="chunked"),
    pytest.param(EXTENSIONS, 200, b"hello world", id="chunk extensions"),
    pytest.param(INTERIM, 200, b"hello world", id="interim heads"),
    pytest.param(NO_BODY, 204, b"", id="204"),
    pytest.param(NOT_MODIFIED, 304, b"", id="304"),
    pytest.param(answer(b""), 200, b"", id="empty"),
]


def feed_all(parser: ResponseParser, *reads: bytes) -> bytes:
    return b"".join([parser.feed(read) for read in reads])


@pytest.mark.parametrize(("message", "status", "body"), FRAMED)
def test_a_message_cut_at_any_byte_is_the_same_message(message, status, body):
    whole = ResponseParser(LIMIT)
    whole.feed(message)

    for cut in range(1, len(message)):
        parser = ResponseParser(LIMIT)

        got = parser.feed(message[:cut])
        assert (parser.is_complete, parser.fault) == (False, None)
        got += parser.feed(message[cut:])

        assert got == body
        assert parser.status == status
        assert parser.headers == whole.headers
        assert parser.is_complete
        assert parser.is_reusable


@pytest.mark.parametrize(("message", "status", "body"), FRAMED)
def test_a_message_fed_byte_by_byte_is_the_same_message(message, status, body):
    parser = ResponseParser(LIMIT)

    got = feed_all(parser, *(message[i : i + 1] for i in range(len(message))))

    assert (parser.status, got) == (status, body)
    assert parser.is_reusable


@pytest.mark.parametrize("message", [UNTIL_CLOSE, HTTP_1_0], ids=["HTTP/1.1", "HTTP/1.0"])
def test_a_message_without_framing_ends_with_the_input(message):
    for cut in range(1, len(message)):
        parser = ResponseParser(LIMIT)

        got = feed_all(parser, message[:cut], message[cut:])

        assert got == b"hello world"
        assert (parser.is_complete, parser.end_of_input()) == (False, True)
        assert (parser.is_complete, parser.is_reusable) == (True, False)


@pytest.mark.parametrize(
    "message", [CONTENT_LENGTH, CHUNKED, EXTENSIONS, INTERIM, NO_BODY, NOT_MODIFIED]
)
def test_the_end_of_input_inside_a_framed_message_is_no_end(message):
    for cut in range(len(message)):
        parser = ResponseParser(LIMIT)
        if cut:
            parser.feed(message[:cut])

        assert not parser.end_of_input()
        assert parser.is_untouched == (cut == 0)


def test_header_names_are_lower_case_and_values_without_surrounding_space():
    parser = ResponseParser(LIMIT)

    parser.feed(b"HTTP/1.1 200 OK\r\nX-ABC:  \tv\xe9 w \t\r\nX-ABC: 2\r\nContent-Length: 0\r\n\r\n")

    assert parser.headers == [("x-abc", "v\xe9 w"), ("x-abc", "2"), ("content-length", "0")]


def test_trailers_are_dropped():
    parser = ResponseParser(LIMIT)

    parser.feed(CHUNKED)

    assert parser.headers == [("transfer-encoding", "chunked")]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(answer(b"smuggled"), id="a second response"),
        pytest.param(answer(b""), id="a second response without a body"),
        pytest.param(b"X", id="garbage"),
        pytest.param(b"\x00\xff\r\n", id="binary"),
    ],
)
@pytest.mark.parametrize("message", [CONTENT_LENGTH, CHUNKED, NO_BODY])
@pytest.mark.case("C89")
def test_what_follows_the_end_only_costs_the_reuse(message, extra):
    plain = ResponseParser(LIMIT)
    body = plain.feed(message)
    parser = ResponseParser(LIMIT)

    got = parser.feed(message + extra)

    assert got == body
    assert parser.headers == plain.headers
    assert parser.status == plain.status
    assert parser.fault is None
    assert parser.is_complete
    assert not parser.is_reusable


@pytest.mark.parametrize(
    ("message", "is_reusable"),
    [
        pytest.param(answer(extra=b"Connection: close\r\n"), False, id="closed by 1.1"),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", False, id="1.0"),
        pytest.param(
            b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
            True,
            id="kept by 1.0",
        ),
        pytest.param(
            b"HTTP/1.1 426 U\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nok",
            True,
            id="an offer to upgrade",
        ),
    ],
)
def test_reuse_follows_the_connection_header(message, is_reusable):
    parser = ResponseParser(LIMIT)

    assert parser.feed(message) == b"ok"
    assert parser.is_complete
    assert parser.is_reusable == is_reusable


def test_the_answer_to_head_ends_with_its_head():
    for message in (CONTENT_LENGTH, CHUNKED, UNTIL_CLOSE):
        head = message[: message.index(b"\r\n\r\n") + 4]
        parser = ResponseParser(LIMIT)
        parser.start(is_head_request=True)

        assert parser.feed(head) == b""
        assert parser.is_complete
        # The parser waits for a body: it cannot read another message.
        assert not parser.is_reusable


def test_a_body_in_answer_to_head_is_dropped():
    parser = ResponseParser(LIMIT)
    parser.start(is_head_request=True)

    assert parser.feed(CONTENT_LENGTH) == b""
    assert parser.is_complete
    assert not parser.is_reusable


def test_a_parser_reads_one_message_after_another():
    parser = ResponseParser(LIMIT)

    for message in (CONTENT_LENGTH, CHUNKED, INTERIM, NO_BODY, CONTENT_LENGTH):
        parser.start()
        assert parser.is_untouched
        parser.feed(message)
        assert parser.is_complete
        assert parser.is_reusable


tokens = st.from_regex(r"\AX-[A-Za-z0-9]{1,12}\Z")
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)


@st.composite
def messages(draw):
    """Draw a response: (bytes, status, headers, body, whether it ends by itself)."""
    status = draw(st.sampled_from([200, 201, 404, 429, 500, 503]))
    headers = draw(st.lists(st.tuples(tokens, values), max_size=5))
    parts = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    interims = draw(st.integers(0, 2))
    body = b"".join(parts)
    lines = list(headers)
    tail = body
    if framing == "length":
        lines.append(("Content-Length", str(len(body))))
    elif framing == "chunked":
        lines.append(("Transfer-Encoding", "chunked"))
        tail = b"".join(b"%X;e=1\r\n%b\r\n" % (len(part), part) for part in parts)
        tail += b"00\r\nX-Trailer: t\r\n\r\n"
    head = f"HTTP/1.1 {status} Some Reason\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in lines)
    data = b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" * interims + head.encode() + b"\r\n" + tail
    lower = [(name.lower(), value) for name, value in lines]
    return data, status, lower, body, framing != "close"


@given(message=messages(), cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_random_messages_at_random_read_boundaries(message, cuts):
    data, status, headers, body, is_framed = message
    points = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    reads = [data[a:b] for a, b in pairwise(points)]
    parser = ResponseParser(LIMIT)

    got = feed_all(parser, *reads)

    assert (parser.status, parser.headers, got) == (status, headers, body)
    assert parser.is_complete == parser.is_reusable == is_framed
    assert parser.end_of_input()
    assert parser.fault is None


@given(data=st.binary(max_size=200), prefix=st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", CHUNKED]))
def test_no_bytes_make_the_parser_raise(data, prefix):
    parser = ResponseParser(LIMIT)

    for part in (prefix, data, data):
        if part:
            parser.feed(part)

    assert parser.is_complete or parser.fault is not None or not parser.is_reusable
