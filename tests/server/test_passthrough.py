"""What a client sends to any other path of an engine, and what the engine gets of it."""

from __future__ import annotations

import gzip
import json
from contextlib import asynccontextmanager

import pytest

from pdproxy.server.app import build_app
from tests.fakes import behaviours
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.client import RawClient, ask, post
from tests.server.stage import listening, server

PATH = "/v1/responses"


async def echo(request: EngineRequest, answer: Answer) -> None:
    await answer.whole(200, request.body or b"nothing", [("content-type", "a/b")])


@asynccontextmanager
async def application(**options):
    async with server(**options) as made, listening(build_app(made.context)) as port:
        made.port = port
        made.play.d[0].routes[PATH] = echo
        yield made


async def test_json_passes_byte_for_byte():
    body = b'{"input" : "hi",\n "x": 1.50, "seed": 9223372036854775807}'

    async with application() as made:
        reply = await post(made.port, PATH, body)

    assert reply.body == body
    assert reply.headers["content-type"] == "a/b"


@pytest.mark.case("C12")
@pytest.mark.parametrize(
    "field",
    [
        {"kv_transfer_params": {"remote_host": "h"}},
        {"bootstrap_room": 7},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_internal_fields_are_taken_out(field):
    async with application() as made:
        reply = await post(made.port, PATH, {"input": "hi", **field})

    assert "kv_transfer_params" not in reply.body.decode()
    assert "bootstrap" not in reply.body.decode()
    assert json.loads(reply.body)["input"] == "hi"


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
async def test_json_that_cannot_be_read_reaches_no_engine(body):
    async with application() as made:
        reply = await post(made.port, PATH, body)

        assert reply.status == 400
        assert made.play.calls == (0, 0)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_other_bodies_are_streamed(framing):
    data = bytes(range(256)) * 1000
    async with application() as made, await RawClient.connect(made.port) as client:
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: audio/wav\r\n" % PATH.encode()
        if framing == "length":
            sent = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
        else:
            head += b"Transfer-Encoding: chunked\r\n\r\n"
            sent = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        await client.wire.write(sent)
        reply = await client.read_rest(await client.read_head())

        assert reply.body == data
        engine = made.play.d[0].only_call.headers
        assert ("content-length" in engine) is (framing == "length")
        assert ("transfer-encoding" in engine) is (framing == "chunked")
        assert engine["content-type"] == "audio/wav"


async def test_compressed_body_arrives_unpacked():
    async with application() as made:
        headers = [("Content-Type", "text/x"), ("Content-Encoding", "gzip")]
        reply = await ask(made.port, "POST", PATH, gzip.compress(b"hello"), headers)

        assert reply.body == b"hello"
        assert "content-encoding" not in made.play.d[0].only_call.headers


@pytest.mark.parametrize("kind", ["application/json", "text/x"])
async def test_body_that_cannot_be_unpacked_is_refused(kind):
    async with application() as made:
        headers = [("Content-Type", kind), ("Content-Encoding", "gzip")]
        reply = await ask(made.port, "POST", PATH, b"this is no gzip", headers)

        assert (reply.status, reply.error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("kind", ["application/json", "text/x"])
async def test_body_over_the_limit_is_refused(kind):
    async with application() as made:
        body = b'{"a": "' + b"x" * (1 << 20) + b'"}'
        reply = await ask(made.port, "POST", PATH, body, [("Content-Type", kind)])

        assert (reply.status, reply.error["code"]) == (413, "body_too_large")


async def test_request_without_a_body_has_none():
    async with application() as made:
        reply = await ask(made.port, "GET", f"{PATH}?a=%20&b")

        assert reply.body == b"nothing"
        call = made.play.d[0].only_call
        assert (call.method, call.query) == ("GET", "a=%20&b")
        assert "content-length" not in call.headers


async def test_whole_address_as_target_is_its_path():
    async with application() as made:
        reply = await ask(made.port, "GET", f"http://other.host:1{PATH}?a=b")

        assert reply.status == 200
        call = made.play.d[0].only_call
        assert (call.path, call.query) == (PATH, "a=b")
        assert call.headers["host"] == made.play.d[0].address


async def test_clients_encodings_and_id_travel():
    async with application() as made:
        headers = [("Accept-Encoding", "gzip"), ("X-Request-Id", "a,b"), ("X-Mine", "1")]
        reply = await ask(made.port, "GET", PATH, headers=headers)

        engine = made.play.d[0].only_call.headers
        assert (engine["accept-encoding"], engine["x-request-id"]) == ("gzip", "a_b")
        assert engine["x-mine"] == "1"
        assert reply.headers["x-request-id"] == "a,b"


async def test_redirect_does_not_show_the_engine():
    async with application() as made:
        engine = made.play.d[0]
        location = [("Location", f"http://{engine.address}{PATH}/x?a=b")]
        engine.routes[PATH] = behaviours.json_answer({}, 307, location)
        reply = await ask(made.port, "GET", PATH)

        assert (reply.status, reply.headers["location"]) == (307, f"{PATH}/x?a=b")


async def test_head_has_the_head_only():
    async with application() as made, await RawClient.connect(made.port) as client:
        for _ in range(2):  # the connection is in step for a second one
            reply = await client.ask("HEAD", PATH)
            assert reply.status == 200

        assert [call.method for call in made.play.d[0].calls] == ["HEAD", "HEAD"]


async def test_answer_that_breaks_off_is_cut():
    half = behaviours.raw([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"], then="close")

    async with application() as made:
        made.play.d[0].routes[PATH] = half
        reply = await ask(made.port, "GET", PATH)

        assert not reply.ended
        assert reply.body == b"half"
        assert made.account.outcome.value == "engine_error"
