"""encode_head: one framing line, and no way to forge another line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy import errors
from pdproxy.upstream.request import CHUNKED, OWN_HEADERS, encode_head, host_line, length_line

HOST = host_line("engine:8100")


def test_a_head_has_its_lines_in_order():
    head = encode_head(
        "POST", "/v1/x?a=1", HOST, [("content-type", "application/json")], length_line(5)
    )

    assert head == (
        b"POST /v1/x?a=1 HTTP/1.1\r\n"
        b"Host: engine:8100\r\n"
        b"content-type: application/json\r\n"
        b"Content-Length: 5\r\n"
        b"\r\n"
    )


def test_a_request_without_a_body_has_no_framing():
    assert encode_head("GET", "/", HOST, [], "") == b"GET / HTTP/1.1\r\nHost: engine:8100\r\n\r\n"


@pytest.mark.parametrize("raw", [b"caf\xc3\xa9", "你好".encode(), b"caf\xe9 \xff"])
def test_values_go_out_as_the_bytes_they_came_in(raw):
    """The server reads UTF-8 and keeps bytes that are none as lone surrogates."""
    value = raw.decode("utf-8", "surrogateescape")

    head = encode_head("GET", "/", HOST, [("X-A", value)], "")

    assert b"X-A: " + raw + b"\r\n" in head


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("X-A", "a\r\nX-B: b", id="CRLF"),
        pytest.param("X-A", "a\nX-B: b", id="LF"),
        pytest.param("X-A", "a\rX-B: b", id="CR"),
        pytest.param("X-A", "a\0", id="NUL"),
        pytest.param("X-A", "half \ud800", id="a lone surrogate"),
        pytest.param("X-A: b\r\nX-B", "c", id="CRLF in a name"),
        pytest.param("X-A\n", "c", id="LF in a name"),
        pytest.param("X-A\0", "c", id="NUL in a name"),
        pytest.param("X-A:", "c", id="colon in a name"),
        pytest.param("X A", "c", id="space in a name"),
        pytest.param("X-\xe9", "c", id="latin-1 in a name"),
        pytest.param("", "c", id="empty name"),
        pytest.param("X" * 100 + "\n", "c", id="long name"),
    ],
)
@pytest.mark.case("C89")
def test_an_injected_line_is_refused(name, value):
    with pytest.raises(errors.InvalidRequest):
        encode_head("GET", "/", HOST, [("X-First", "1"), (name, value)], CHUNKED)


@pytest.mark.parametrize(
    "target", ["", "v1", "http://other/", "/a b", "/a\r\nX: y", "/a\n", "/a\0", "/caf\xe9", "*"]
)
@pytest.mark.case("C89")
def test_a_target_that_is_no_path_is_refused(target):
    with pytest.raises(errors.InvalidRequest):
        encode_head("GET", target, HOST, [], "")


@pytest.mark.parametrize("method", ["", "GE T", "GET\r\n", "GET /x HTTP/1.1\r\nA:"])
def test_a_method_that_is_no_token_is_refused(method):
    with pytest.raises(errors.InvalidRequest):
        encode_head(method, "/", HOST, [], "")


@pytest.mark.parametrize("name", sorted(OWN_HEADERS))
@pytest.mark.case("C64", "C89")
def test_headers_of_the_connection_cannot_be_supplied(name):
    for spelling in (name, name.title(), name.upper()):
        with pytest.raises(AssertionError):
            encode_head("GET", "/", HOST, [(spelling, "x")], "")


def test_a_long_name_is_sent_and_its_value_checked():
    name = "X-" + "a" * 200

    assert f"{name}: v\r\n".encode() in encode_head("GET", "/", HOST, [(name, "v")], "")
    with pytest.raises(errors.InvalidRequest):
        encode_head("GET", "/", HOST, [(name, "v\r\nA: b")], "")


@given(headers=st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=4))
def test_a_head_has_the_lines_it_was_given_or_is_refused(headers):
    if any(name.lower() in OWN_HEADERS for name, _ in headers):
        return
    try:
        head = encode_head("GET", "/", HOST, headers, CHUNKED)
    except errors.InvalidRequest:
        return

    lines = head.split(b"\r\n")
    assert len(lines) == len(headers) + 5
    assert b"\n" not in head.replace(b"\r\n", b"")
    sent = [f"{name}: {value}".encode("utf-8", "surrogateescape") for name, value in headers]
    assert lines[2:-3] == sent
