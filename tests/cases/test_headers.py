"""Headers: the client's own travel, those of one connection do not, and ids are unique for good."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import behaviours, client
from tests.fakes.answer import Answer, EngineRequest, chunk_bytes
from tests.fakes.client import RawClient, assert_whole_stream
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import ProxyProcess, running_proxy

SMALL = chat(max_tokens=1)
HEX_ID = re.compile(r"[0-9a-f]{32}")


def all_requests(stage: Scene) -> list[EngineRequest]:
    return [r for engine in (*stage.prefillers, *stage.decoders) for r in engine.requests]


# --- C61


@pytest.mark.case("C61")
async def test_clients_authorization_reaches_every_engine() -> None:
    mine = [("Authorization", "Bearer user-1")]

    async with scene(env={"OPENAI_API_KEY": "of-the-operator"}) as stage:
        for engine in (stage.p1, stage.d1):
            engine.requests.clear()
        await stage.post(CHAT, SMALL, mine)
        models = await stage.get("/v1/models", mine)

    assert models.status == 200
    assert stage.p1.only_call.headers["authorization"] == "Bearer user-1"
    assert stage.d1.only_call.headers["authorization"] == "Bearer user-1"
    asked = [r for r in all_requests(stage) if r.path == "/v1/models"]
    assert "Bearer user-1" in {r.headers.get("authorization") for r in asked}


@pytest.mark.case("C61")
async def test_operators_key_stands_in_for_a_missing_authorization() -> None:
    async with scene(env={"OPENAI_API_KEY": "of-the-operator"}) as stage:
        await stage.post(CHAT, SMALL)

    assert stage.p1.only_call.headers["authorization"] == "Bearer of-the-operator"
    assert stage.d1.only_call.headers["authorization"] == "Bearer of-the-operator"


@pytest.mark.case("C61")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engines_401_is_relayed_with_its_challenge(role: str) -> None:
    body = behaviours.error_body("wrong key", 401)
    refuse = behaviours.error(401, headers=[("WWW-Authenticate", 'Bearer realm="e"')], body=body)
    p, d = ([refuse], [None]) if role == "prefill" else ([None], [refuse])

    async with scene(p, d) as stage:
        reply = await stage.post(CHAT, chat(stream=True), [("Authorization", "Bearer no")])

    assert reply.status == 401
    assert reply.json == body
    assert reply.headers["www-authenticate"] == 'Bearer realm="e"'


# --- C62


@pytest.mark.case("C62")
@pytest.mark.parametrize("env", [{}, {"OPENAI_API_KEY": ""}], ids=["unset", "empty"])
async def test_without_a_key_no_authorization_is_sent_at_all(env: dict[str, str]) -> None:
    async with scene(env=env) as stage:
        await stage.post(CHAT, SMALL)
        await stage.get("/v1/models")
        await stage.post("/reset_prefix_cache", b"")

    requests = all_requests(stage)
    assert {"/v1/models", CHAT} <= {r.path for r in requests}
    assert not [r.path for r in requests if "authorization" in r.headers]


# --- C63

TRACE = [
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("tracestate", "vendor=value"),
    ("baggage", "tenant=7"),
    ("X-Session-Id", "session-1"),
    ("X-Custom", "a, b"),
]


@pytest.mark.case("C63")
async def test_tracing_and_custom_headers_reach_both_engines() -> None:
    async with scene() as stage:
        await stage.post(CHAT, SMALL, TRACE)

    for call in (stage.p1.only_call, stage.d1.only_call):
        for name, value in TRACE:
            assert call.headers[name.lower()] == value


@pytest.mark.case("C63")
async def test_rank_pin_reaches_the_decoder_alone_and_cookies_nobody() -> None:
    async with scene() as stage:
        await stage.post(CHAT, SMALL, [("X-data-parallel-rank", "3"), ("Cookie", "session=KEY")])

    assert stage.d1.only_call.headers["x-data-parallel-rank"] == "3"
    assert "x-data-parallel-rank" not in stage.p1.only_call.headers
    for engine in (stage.p1, stage.d1):
        headers = engine.only_call.headers
        assert "cookie" not in headers
        assert headers["host"] == engine.address
        assert headers["content-length"] == str(len(engine.only_call.body))


# --- C64

HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "upgrade",
}
RUDE_HEADERS = [
    ("Connection", "keep-alive, X-Foo"),
    ("X-Foo", "for the next hop"),
    ("X-Bar", "for the engine"),
    ("TE", "trailers"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authorization", "Basic abc"),
    ("Proxy-Connection", "keep-alive"),
    ("Trailer", "X-Checksum"),
    ("Transfer-Encoding", "chunked"),
    ("Content-Type", "application/json"),
]


async def post_chunked(peer: RawClient, body: bytes, headers: list[tuple[str, str]]) -> Any:
    head = client.request_bytes("POST", CHAT, None, headers)
    await peer.wire.write(head + chunk_bytes(body[:20]) + chunk_bytes(body[20:]) + b"0\r\n\r\n")
    return await peer.read_rest(await peer.read_head())


@pytest.mark.case("C64")
async def test_hop_by_hop_headers_of_a_client_end_at_the_proxy() -> None:
    async with scene() as stage, await RawClient.connect(stage.port) as peer:
        replies = [await post_chunked(peer, client.as_json(SMALL), RUDE_HEADERS) for _ in range(2)]

    assert [reply.status for reply in replies] == [200, 200]
    for call in (*stage.p1.calls, *stage.d1.calls):
        names = {name.lower() for name, _ in call.header_list}
        assert not names & {"keep-alive", "proxy-authorization", "proxy-connection", "te"}
        assert not names & {"trailer", "upgrade", "x-foo"}
        assert call.headers.get("connection", "keep-alive").lower() == "keep-alive"
        assert call.headers["x-bar"] == "for the engine"
        framing = [n for n in names if n in {"content-length", "transfer-encoding"}]
        assert len(framing) == 1


@pytest.mark.case("C64")
async def test_upgrade_offer_is_not_passed_on_and_does_no_harm() -> None:
    offer = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "A")]

    async with scene() as stage:
        reply = await stage.post(CHAT, SMALL, offer)

    assert reply.status == 200
    for call in (stage.p1.only_call, stage.d1.only_call):
        assert not {"upgrade", "http2-settings"} & call.headers.keys()


RUDE_ANSWER = [
    ("Connection", "keep-alive, X-Foo"),
    ("X-Foo", "for the proxy"),
    ("X-Bar", "for the client"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authenticate", "Basic"),
    ("Server", "uvicorn"),
    ("Date", "Mon, 30 Nov 2026 20:00:44 GMT"),
]


@pytest.mark.case("C64")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_hop_by_hop_headers_of_an_engine_end_at_the_proxy(stream: bool) -> None:
    async def rude(request: EngineRequest, answer: Answer) -> None:
        if not stream:
            await answer.json(
                behaviours.whole_body(request, 1, finish_reason="stop"), headers=RUDE_ANSWER
            )
            return
        await answer.start_stream(RUDE_ANSWER)
        events = behaviours.stream_events(request, 1, "stop")
        await answer.chunk(b"".join(behaviours.stream_bytes(events)))
        await answer.end()

    async with scene(d=[rude]) as stage, await RawClient.connect(stage.port) as peer:
        body = client.as_json(chat(stream=stream))
        replies = [
            await peer.ask("POST", CHAT, body, [("Content-Type", "application/json")])
            for _ in range(2)
        ]

    for reply in replies:
        assert reply.status == 200
        names = [name.lower() for name, _ in reply.header_list]
        assert not set(names) & (HOP_BY_HOP - {"connection"} | {"x-foo"})
        assert reply.headers.get("connection", "keep-alive").lower() == "keep-alive"
        assert reply.headers["x-bar"] == "for the client"
        assert names.count("server") <= 1
        assert names.count("date") == 1
        assert len({"content-length", "transfer-encoding"} & set(names)) == 1
        if stream:
            assert_whole_stream(reply)


# --- C65

ODD_IDS = [
    "cmpl-0-0",
    "chatcmpl-5f0c1c0a-0a-0",
    "0123456789abcdef0123456789abcdef",
    "a-0-b-00-0",
    "0b5c9f3e-0000-4000-8000-00000000-0",
]


@pytest.mark.case("C65")
@pytest.mark.parametrize("given", ODD_IDS)
async def test_clients_id_survives_whole_wherever_it_is_mapped(given: str) -> None:
    async with scene() as stage:
        replies = [await stage.post(CHAT, SMALL, [("X-Request-Id", given)]) for _ in range(2)]

    assert [reply.headers["x-request-id"] for reply in replies] == [given, given]
    pairs = zip(stage.p1.calls, stage.d1.calls, strict=True)
    seen = [(p.headers["x-request-id"], d.headers["x-request-id"]) for p, d in pairs]
    for on_prefiller, on_decoder in seen:
        assert on_prefiller == on_decoder
        assert on_prefiller.removeprefix(f"{given}-") != on_prefiller
        assert HEX_ID.fullmatch(on_prefiller.removeprefix(f"{given}-"))
    assert seen[0] != seen[1], "one id for two requests"


@pytest.mark.case("C65")
async def test_id_is_safe_for_engines_and_comes_back_unchanged() -> None:
    given = "a,b;c/d"

    async with scene() as stage:
        reply = await stage.post(CHAT, SMALL, [("X-Request-Id", given)])

    assert reply.headers["x-request-id"] == given
    at_engine = stage.d1.only_call.headers["x-request-id"]
    assert re.fullmatch(r"[A-Za-z0-9._:-]+", at_engine)


@pytest.mark.case("C65")
async def test_generated_id_is_told_to_the_client() -> None:
    async with scene() as stage:
        replies = [await stage.post(CHAT, SMALL) for _ in range(2)]

    ids = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ids)) == 2
    for request_id, call in zip(ids, stage.d1.calls, strict=True):
        assert request_id
        assert HEX_ID.fullmatch(call.headers["x-request-id"])


@pytest.mark.case("C65")
@pytest.mark.e2e
async def test_engine_side_ids_never_repeat_over_processes_and_restarts() -> None:
    each, seed = 100, ("--seed", "7")

    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        async with running_proxy([p1], [d1], *seed) as one, running_proxy([p1], [d1], *seed) as two:
            await asyncio.gather(post_many(one, each), post_many(two, each))
        async with running_proxy([p1], [d1], *seed) as again:
            await post_many(again, each)

    ids = [call.headers["x-request-id"] for call in p1.calls]
    assert ids
    assert sorted(ids) == sorted(call.headers["x-request-id"] for call in d1.calls)
    assert len(set(ids)) == 3 * each
    assert all(HEX_ID.fullmatch(engine_id) for engine_id in ids)


async def post_many(proxy: ProxyProcess, count: int) -> None:
    """Send `count` requests over a few kept connections."""

    async def one_after_another(share: int) -> None:
        async with await RawClient.connect(proxy.port) as peer:
            for _ in range(share):
                reply = await peer.ask("POST", CHAT, client.as_json(SMALL), client.JSON_TYPE)
                assert reply.status == 200

    await asyncio.gather(*(one_after_another(count // 5) for _ in range(5)))
