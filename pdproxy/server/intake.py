"""What every request to an engine goes through first: id, loop check, key, body, headers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import TypeVar

from aiohttp import ClientPayloadError, HttpVersion10, web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge
from aiohttp.web_protocol import RequestPayloadError

from pdproxy.core.headers import HeaderList, authorization, client_request_id, to_engine
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidRequest,
    LoopDetected,
    Unauthorized,
    UnsupportedEncoding,
)
from pdproxy.server.context import Context, ServerRules

T = TypeVar("T")

BEARER = "bearer"
# The last two only where their libraries are installed; without them the parser refuses.
ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})
MAX_SHOWN_CHARACTERS = 64
# It takes several milliseconds to read; the way to a thread and back takes a fraction of one.
BIG_BODY_BYTES = 1 << 20
# What reading a body raises that cannot be decompressed, or whose framing is broken.
UNREADABLE = (RequestPayloadError, ClientPayloadError, web.HTTPException)


def open_account(context: Context, request: web.Request, endpoint: str) -> Account:
    """Begin the account of a request."""
    random_id = f"{context.rng.getrandbits(128):032x}"
    return Account(
        request_id=client_request_id(request.headers.get("X-Request-Id"), random_id),
        endpoint=endpoint,
        client=request.remote or "",
        timeline=Timeline(received=context.clock()),
    )


def check_admission(rules: ServerRules, request: web.Request) -> None:
    """Refuse a request that came back to this proxy, and one without a key where keys are set.

    Raises:
        InvalidRequest: it names no version of HTTP, which old parsers read in other ways.
        LoopDetected: one of the instances is this proxy.
        Unauthorized: no valid key.
    """
    if request.version < HttpVersion10:
        raise InvalidRequest("the request line names no version of HTTP")
    via = request.headers.get("Via")
    if via is not None and rules.via in via:
        raise LoopDetected("the request came back to this proxy: an instance is the proxy itself")
    if rules.api_keys and not has_key(request, rules.api_keys):
        raise Unauthorized("the API key is missing or wrong")


def has_key(request: web.Request, keys: tuple[str, ...]) -> bool:
    """Tell whether the bearer token is one of `keys`, in time that does not tell which."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    token = given.strip().encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(token, key.encode()) for key in keys]
    return scheme.lower() == BEARER and any(matches)


async def read_body(context: Context, request: web.Request) -> bytes:
    """Return the whole body, decompressed.

    Raises:
        BodyTooLarge: over the limit, before or after decompression.
        BodyTimeout: not there in time.
        UnsupportedEncoding: it is compressed in a way that is not known.
        InvalidRequest: it cannot be decompressed, or its framing is broken.
    """
    check_encoding(request)
    limit = context.rules.max_body_bytes
    # A timer is spared where the body came with the head.
    limit_s = None if request.content.is_eof() else context.rules.body_s
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise BodyTimeout("the body did not arrive in time") from None
    except HTTPRequestEntityTooLarge:
        raise BodyTooLarge(f"the body is larger than {limit} bytes") from None
    except UNREADABLE as error:
        raise unreadable(error) from None


async def read_aside(read: Callable[[bytes], T], body: bytes) -> T:
    """Return `read(body)`; a big body is read in a thread, so that streams go on meanwhile."""
    if len(body) < BIG_BODY_BYTES:
        return read(body)
    return await asyncio.to_thread(read, body)


def check_encoding(request: web.Request) -> None:
    """Refuse a body that the library leaves as it is, since it does not know its encoding.

    Raises:
        UnsupportedEncoding: it has such an encoding.
    """
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in ENCODINGS:
        raise unsupported(encoding)


def unsupported(encoding: str) -> UnsupportedEncoding:
    """Return what a client is told whose body has an encoding that cannot be read."""
    shown = encoding[:MAX_SHOWN_CHARACTERS]
    return UnsupportedEncoding(
        f"the Content-Encoding {shown!r} is not known; the body may be plain, gzip or deflate"
    )


def unreadable(error: Exception) -> InvalidRequest:
    """Return what a client is told whose body raised one of `UNREADABLE`."""
    return InvalidRequest("the body cannot be read", detail=str(error))


def engine_headers(context: Context, request: web.Request, content_type: str | None) -> HeaderList:
    """Return the client's headers for engines, with pdproxy's own added."""
    rules = context.rules
    headers = to_engine(request.headers.items())
    if content_type is not None:
        headers.append(("content-type", content_type))
    key = authorization(request.headers.get("Authorization"), rules.engine_key, rules.fallback_key)
    if key is not None:
        headers.append(("authorization", key))
    via = request.headers.get("Via")
    headers.append(("via", f"{via}, {rules.via}" if via else rules.via))
    return headers
