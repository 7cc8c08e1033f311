"""Everything else an engine may serve, passed on untouched, streaming both ways.

Rule: a JSON body is read and freed of the fields by which engines talk to each other; one that
cannot be read is refused, since an engine's more lenient reader might find them in it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from pdproxy.core.api import parse_object, without_internal
from pdproxy.core.jsonfields import join_object
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.passthrough import RawRequest, pass_through
from pdproxy.errors import BodyTooLarge
from pdproxy.server.context import Context
from pdproxy.server.downstream import ClientDownstream
from pdproxy.server.generate import counted
from pdproxy.server.intake import (
    UNREADABLE,
    check_encoding,
    engine_headers,
    read_aside,
    read_body,
    unreadable,
)

# The label of all these requests in metrics, since a path can be anything.
ENDPOINT = "passthrough"


async def passthrough(context: Context, request: web.Request) -> web.StreamResponse:
    """Pass a request to one instance and its answer back."""

    async def work(account: Account, downstream: ClientDownstream) -> None:
        content_type = request.headers.get("Content-Type")
        headers = engine_headers(context, request, content_type)
        encodings = request.headers.get("Accept-Encoding")
        if encodings is not None:
            headers.append(("accept-encoding", encodings))
        headers.append(("x-request-id", account.request_id.replace(",", "_")))
        raw = RawRequest(
            method=request.method,
            target=request.rel_url.raw_path_qs,
            headers=headers,
            body=await _body(context, request, content_type or ""),
            content_length=_length(request),
        )
        await pass_through(context.tools, raw, account, downstream)

    return await counted(context, request, ENDPOINT, work)


async def _body(
    context: Context, request: web.Request, content_type: str
) -> bytes | AsyncIterator[bytes] | None:
    if not request.body_exists:
        return None
    if "json" not in content_type.lower():
        check_encoding(request)
        return _chunks(request, context.rules.max_body_bytes)
    body = await read_body(context, request)
    return await read_aside(_without_internal, body)


def _without_internal(body: bytes) -> bytes:
    fields = parse_object(body)
    kept = without_internal(fields)
    return body if kept is fields else join_object(kept)


async def _chunks(request: web.Request, limit: int) -> AsyncIterator[bytes]:
    size = 0
    try:
        async for chunk in request.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(f"the body is larger than {limit} bytes")
            yield chunk
    except UNREADABLE as error:
        raise unreadable(error) from None


def _length(request: web.Request) -> int | None:
    """Return the length the body will have; a compressed one is decompressed on the way."""
    return None if "Content-Encoding" in request.headers else request.content_length
