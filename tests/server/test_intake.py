"""Ids, keys, loops, bodies and headers of a request on its way in."""

from __future__ import annotations

import gzip
import random
from dataclasses import replace
from threading import get_ident
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from pdproxy.errors import BodyTimeout, BodyTooLarge, LoopDetected, PDProxyError, Unauthorized
from pdproxy.server.context import Context
from pdproxy.server.intake import (
    BIG_BODY_BYTES,
    check_admission,
    engine_headers,
    has_key,
    open_account,
    read_aside,
    read_body,
)
from tests.fakes.client import RawClient, ask
from tests.server.stage import RULES, handling


def context_of(**rules: Any) -> Context:
    """A context with what intake looks at, and nothing else."""
    parts = {"rules": replace(RULES, **rules), "clock": lambda: 5.0, "rng": random.Random(0)}
    return cast(Context, SimpleNamespace(**parts))


def request_with(*headers: tuple[str, str]) -> web.Request:
    return make_mocked_request("POST", "/v1/x", headers=CIMultiDict(headers))


# --- keys


@pytest.mark.parametrize(
    ("header", "is_good"),
    [
        ("Bearer k1", True),
        ("Bearer k2", True),
        ("bearer k1", True),
        ("Bearer  k1 ", True),
        ("Bearer k3", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("k1", False),
        ("Basic k1", False),
        ("Bearer k1x", False),
        ("Bearer \u00fcber", False),
        ("", False),
    ],
)
def test_key_is_a_bearer_token(header, is_good):
    assert has_key(request_with(("Authorization", header)), ("k1", "k2")) is is_good


def test_no_header_is_no_key():
    assert not has_key(request_with(), ("k1",))


def test_keys_may_hold_any_text():
    assert has_key(request_with(("Authorization", "Bearer sch\u00fcssel")), ("sch\u00fcssel",))


def test_without_keys_everybody_may_call():
    check_admission(RULES, request_with())


def test_with_keys_only_holders_may():
    rules = context_of(api_keys=("k",)).rules

    check_admission(rules, request_with(("Authorization", "Bearer k")))
    with pytest.raises(Unauthorized):
        check_admission(rules, request_with())


@pytest.mark.case("C86")
def test_request_that_comes_back_is_stopped():
    for via in (RULES.via, f"1.1 nginx, {RULES.via}, 1.1 other"):
        with pytest.raises(LoopDetected):
            check_admission(RULES, request_with(("Via", via)))

    check_admission(RULES, request_with(("Via", "1.1 pdproxy-other")))


# --- ids and headers


def test_account_begins_with_the_clients_id_and_address():
    account = open_account(context_of(), request_with(("X-Request-Id", "mine")), "/v1/x")

    assert (account.request_id, account.endpoint) == ("mine", "/v1/x")
    assert account.timeline.received == 5.0


def test_without_an_id_each_request_gets_one():
    context = context_of()
    ids = {open_account(context, request_with(), "/v1/x").request_id for _ in range(100)}

    assert len(ids) == 100
    assert {len(made) for made in ids} == {32}


@pytest.mark.case("C61", "C62")
@pytest.mark.parametrize(
    ("rules", "client", "sent"),
    [
        pytest.param({}, None, None, id="none"),
        pytest.param({}, "Bearer user", "Bearer user", id="clients"),
        pytest.param({"engine_key": "e"}, "Bearer user", "Bearer e", id="configured"),
        pytest.param({"fallback_key": "f"}, None, "Bearer f", id="fallback"),
    ],
)
def test_authorization_for_engines(rules, client, sent):
    given = [("Authorization", client)] if client else []

    headers = engine_headers(context_of(**rules), request_with(*given), "a/b")

    assert dict(headers).get("authorization") == sent
    assert dict(headers)["content-type"] == "a/b"


@pytest.mark.parametrize(
    ("via", "sent"), [(None, RULES.via), ("1.1 nginx", f"1.1 nginx, {RULES.via}")]
)
def test_via_grows_by_this_proxy(via, sent):
    given = [("Via", via)] if via else []

    headers = engine_headers(context_of(), request_with(*given), None)

    assert [value for name, value in headers if name == "via"] == [sent]
    assert "content-type" not in dict(headers)


# --- bodies


async def answer_of(request: web.Request, context: Context) -> web.Response:
    try:
        body = await read_body(context, request)
    except PDProxyError as error:
        return web.Response(status=error.status, text=error.code)
    return web.Response(body=body)


def reading(**rules: Any):
    context = context_of(**rules)

    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer_of(request, context)

    return handling(handler)


@pytest.mark.parametrize("body", [b"", b"x" * 500_000], ids=["empty", "large"])
async def test_body_is_read_whole(body):
    async with reading() as port:
        assert (await ask(port, "POST", "/", body)).body == body


async def test_compressed_body_is_unpacked():
    packed = gzip.compress(b"hello")
    async with reading() as port:
        reply = await ask(port, "POST", "/", packed, [("Content-Encoding", "gzip")])

    assert reply.body == b"hello"


@pytest.mark.case("C66")
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(b"x" * ((1 << 20) + 1), [], id="plain"),
        pytest.param(gzip.compress(b"x" * (4 << 20)), [("Content-Encoding", "gzip")], id="packed"),
    ],
)
async def test_body_over_the_limit_is_refused(body, headers):
    async with reading() as port:
        reply = await ask(port, "POST", "/", body, headers)

    assert (reply.status, reply.body) == (BodyTooLarge.status, b"body_too_large")


async def test_body_that_trickles_is_not_waited_for():
    async with reading(body_s=0.1) as port, await RawClient.connect(port) as client:
        await client.wire.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab")
        reply = await client.read_rest(await client.read_head())

    assert (reply.status, reply.body) == (BodyTimeout.status, b"body_timeout")


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        pytest.param(b"Content-Length: 4\r\nContent-Encoding: gzip", b"nope", id="not-gzip"),
        pytest.param(b"Transfer-Encoding: chunked", b"zz\r\nab\r\n0\r\n\r\n", id="not-chunked"),
    ],
)
async def test_unreadable_body_is_a_400(framing, body):
    async with reading() as port, await RawClient.connect(port) as client:
        await client.wire.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n" + body)
        reply = await client.read_head()

    assert reply.status == 400


@pytest.mark.case("C66")
@pytest.mark.parametrize(("size", "is_aside"), [(10, False), (BIG_BODY_BYTES, True)])
async def test_a_big_body_is_read_in_a_thread(size, is_aside):
    length, thread = await read_aside(lambda body: (len(body), get_ident()), b"x" * size)

    assert length == size
    assert (thread != get_ident()) is is_aside
