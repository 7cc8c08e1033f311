"""The way back to one client, seen from the other end of the wire."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from pdproxy.errors import ClientStalled
from pdproxy.server.downstream import ClientDownstream
from tests.fakes.client import RawClient, ask
from tests.fakes.waiting import until
from tests.server.stage import Handler, handling

ENGINE_HEADERS = [
    ("content-type", "text/event-stream"),
    ("x-mine", "1"),
    ("server", "uvicorn/1"),
    ("transfer-encoding", "chunked"),
    ("x-request-id", "engines"),
]
EVENT = b'data: {"a":1}\n\n'


def downstream_of(request: web.Request, **limits) -> ClientDownstream:
    given = {"buffer_bytes": 1 << 16, "write_stall_s": 5.0, **limits}
    return ClientDownstream(request, "r-1", **given)


def is_congested(downstream: ClientDownstream) -> bool:
    return downstream.is_congested


def streaming(*blocks: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request)
        await downstream.start(ENGINE_HEADERS)
        for block in blocks:
            downstream.write(block)
        await downstream.finish()
        assert downstream.response is not None
        return downstream.response

    return handler


@pytest.mark.case("C21", "C22")
async def test_stream_has_one_chunk_for_each_write():
    async with handling(streaming(EVENT, EVENT * 2)) as port:
        reply = await ask(port, "POST", "/")

    assert reply.ended
    assert [chunk for _, chunk in reply.chunks] == [EVENT, EVENT * 2]
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"


@pytest.mark.case("C64")
async def test_engines_headers_pass_but_for_those_of_the_proxy():
    async with handling(streaming(EVENT)) as port:
        reply = await ask(port, "POST", "/")

    names = [name.lower() for name, _ in reply.header_list]
    assert reply.headers["x-mine"] == "1"
    assert (reply.headers["server"], reply.headers["x-request-id"]) == ("pdproxy", "r-1")
    assert len(set(names)) == len(names)


async def test_connection_is_good_for_the_next_request():
    async with handling(streaming(EVENT)) as port, await RawClient.connect(port) as client:
        for _ in range(3):
            reply = await client.ask("POST", "/", b"x")
            assert reply.body == EVENT


async def test_client_of_http_1_0_gets_the_bytes_and_the_end():
    async with handling(streaming(EVENT, EVENT)) as port, await RawClient.connect(port) as client:
        await client.wire.write(b"POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        reply = await client.read_head()
        body = b""
        while piece := await client.wire.read_some():
            body += piece

    assert "transfer-encoding" not in reply.headers
    assert body == EVENT * 2


async def test_nothing_is_committed_before_the_start():
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request)
        seen.append((downstream.is_committed, downstream.status, downstream.is_congested))
        downstream.write(EVENT)  # without a start there is nowhere to write to
        await downstream.respond(201, [("content-type", "a/b"), ("x-mine", "1")], b"whole")
        seen.append((downstream.is_committed, downstream.status, downstream.is_congested))
        assert downstream.response is not None
        return downstream.response

    async with handling(handler) as port:
        reply = await ask(port, "POST", "/")

    assert seen == [(False, 0, False), (True, 201, False)]
    assert (reply.status, reply.body) == (201, b"whole")
    assert reply.headers["content-type"] == "a/b"
    assert reply.headers["content-length"] == "5"


async def test_answer_without_a_type_is_json():
    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request)
        await downstream.respond(200, [], b"{}")
        assert downstream.response is not None
        return downstream.response

    async with handling(handler) as port:
        reply = await ask(port, "GET", "/")

    assert reply.headers["content-type"] == "application/json"


# --- failures


async def test_failure_in_a_stream_is_an_error_event_and_a_proper_end():
    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request)
        await downstream.start(ENGINE_HEADERS)
        downstream.fail(b'{"error":{}}')
        await downstream.finish()
        assert downstream.response is not None
        return downstream.response

    async with handling(handler) as port:
        reply = await ask(port, "POST", "/")

    assert reply.ended
    assert reply.body == b'data: {"error":{}}\n\n'


async def test_failure_of_an_answer_that_passes_through_cuts_it():
    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request)
        await downstream.start_raw(207, [("content-type", "a/b")])
        downstream.write(b"half")
        downstream.fail(b'{"error":{}}')
        assert downstream.response is not None
        return downstream.response

    async with handling(handler) as port:
        reply = await ask(port, "POST", "/")

    assert (reply.status, reply.headers["content-type"]) == (207, "a/b")
    assert not reply.ended
    assert b"error" not in reply.body


# --- slow clients, and those that left


@pytest.mark.case("C22")
async def test_slow_client_congests_until_it_reads():
    seen: list[str] = []
    blocks = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal blocks
        downstream = downstream_of(request)
        await downstream.start(ENGINE_HEADERS)
        while not downstream.is_congested:
            downstream.write(b"data: " + b"x" * 100_000 + b"\n\n")
            blocks += 1
            await asyncio.sleep(0)
        seen.append("congested")
        await downstream.drain()
        seen.append("still congested" if is_congested(downstream) else "drained")
        await downstream.finish()
        assert downstream.response is not None
        return downstream.response

    async with handling(handler) as port, await RawClient.connect(port) as client:
        await client.send_request("POST", "/", b"")
        reply = await client.read_head()
        client.wire.pause_reading()
        await until(lambda: seen == ["congested"])
        client.wire.resume_reading()
        await client.read_rest(reply)

    assert seen == ["congested", "drained"]
    assert reply.ended
    assert len(reply.events) == blocks


async def test_client_that_never_reads_is_cut():
    failures: list[Exception] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request, write_stall_s=0.1)
        await downstream.start(ENGINE_HEADERS)
        while not downstream.is_congested:
            downstream.write(b"data: " + b"x" * 100_000 + b"\n\n")
            await asyncio.sleep(0)
        try:
            await downstream.drain()
        except ClientStalled as error:
            failures.append(error)
        assert downstream.response is not None
        return downstream.response

    async with handling(handler) as port, await RawClient.connect(port) as client:
        await client.send_request("POST", "/", b"")
        reply = await client.read_head()
        client.wire.pause_reading()
        await until(lambda: failures)
        client.wire.resume_reading()
        await client.read_rest(reply)

    assert not reply.ended


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_writing_to_a_client_that_left_is_harmless(how):
    states: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        downstream = downstream_of(request)
        await downstream.start(ENGINE_HEADERS)
        states.append("started")
        try:
            await asyncio.sleep(10)
        finally:
            downstream.write(EVENT)
            downstream.fail(b"{}")
            downstream.cut()
            states.append("left")
        raise AssertionError("the handler was not cancelled")

    async with handling(handler) as port:
        async with await RawClient.connect(port) as client:
            await client.send_request("POST", "/", b"")
            await client.read_head()
            client.leave(how)
        await until(lambda: states == ["started", "left"])
