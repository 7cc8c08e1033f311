"""The head of a request as bytes: built cheaply, and nothing in it can forge another line.

Rule: exactly one framing header, written here; who calls supplies none of `OWN_HEADERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from pdproxy import errors

# Written by this package alone: they belong to the connection, not to the request.
OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})

CHUNKED = "Transfer-Encoding: chunked\n"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_TARGET = re.compile(r"/[!-~]*")  # origin form; visible ASCII only
_MAX_REMEMBERED_CHARACTERS = 64  # bounds what the cache of names can hold


def host_line(authority: str) -> str:
    """Return the Host line of an endpoint, to be kept for its requests."""
    return f"Host: {authority}\n"


def length_line(length_bytes: int) -> str:
    """Return the framing line of a body of known length."""
    return f"Content-Length: {length_bytes}\n"


def encode_head(
    method: str,
    target: str,
    host: str,
    headers: Iterable[tuple[str, str]],
    framing: str,
) -> bytes:
    """Return the request head, its blank line included.

    Args:
        method: an upper-case token.
        target: path and query, percent-encoded, such as `/v1/models?x=1`.
        host: from `host_line`.
        headers: names and values; values are sent as UTF-8, bytes that are none as they came
            (`surrogateescape`), which is how the server reads them.
        framing: `CHUNKED`, from `length_line`, or "" for a request without a body.

    Raises:
        InvalidRequest: a name, a value or the target cannot stand in a head.
    """
    lines = [f"{_checked_name(method)} {_checked_target(target)} HTTP/1.1\n", host]
    for name, value in headers:
        if len(name) <= _MAX_REMEMBERED_CHARACTERS:
            lines.append(f"{_remembered_name(name)}: {value}\n")
        else:
            lines.append(f"{_checked_name(name)}: {value}\n")
    line_count = len(lines) + bool(framing)
    lines.append(framing)
    # One look at the whole instead of one at each value: a line end too many is an injected one.
    head = "".join(lines)
    if head.count("\n") != line_count or "\r" in head or "\0" in head:
        raise errors.InvalidRequest("a header value holds a line end or a NUL")
    try:
        return (head.replace("\n", "\r\n") + "\r\n").encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise errors.InvalidRequest("a header value holds what no text can hold") from None


def _checked_target(target: str) -> str:
    if not _TARGET.fullmatch(target):
        raise errors.InvalidRequest("the request target is not a percent-encoded path")
    return target


def _checked_name(name: str) -> str:
    assert name.lower() not in OWN_HEADERS, f"{name} is written by the client"
    if not _TOKEN.fullmatch(name):
        raise errors.InvalidRequest("a header name is not a token")
    return name


_remembered_name = lru_cache(maxsize=1024)(_checked_name)
