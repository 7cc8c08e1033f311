"""EngineClient: what goes out, what failures become, and a thousand requests at once."""

from __future__ import annotations

import asyncio
import os

import pytest

from pdproxy import errors
from pdproxy.upstream.client import ClientLimits, EngineClient, Timeouts
from tests.fakes.waiting import until
from tests.upstream.exchanges import open_sockets, post
from tests.upstream.raw_server import (
    EOF,
    PATIENT,
    PAUSE,
    REQUEST,
    answer,
    chunked,
    raw_server,
)


@pytest.mark.parametrize(
    ("method", "body", "framing"),
    [
        pytest.param("POST", b"hello", {"content-length": ["5"]}, id="bytes"),
        pytest.param("POST", b"", {"content-length": ["0"]}, id="empty"),
        pytest.param("POST", None, {"content-length": ["0"]}, id="POST without a body"),
        pytest.param("GET", None, {}, id="GET"),
        pytest.param("DELETE", None, {}, id="DELETE"),
    ],
)
@pytest.mark.case("C64", "C89")
async def test_a_request_has_one_host_and_at_most_one_framing_header(client, method, body, framing):
    async with raw_server((REQUEST, answer())) as server:
        response = await post(client, server, body=body, method=method)
        await response.read()

        request = server.requests[0]
        assert request.body == (body or b"")
        assert request.head.startswith(f"{method} /x HTTP/1.1\r\n".encode())
        assert request.values("host") == [server.endpoint.authority]
        for name in ("content-length", "transfer-encoding"):
            assert request.values(name) == framing.get(name, [])


async def test_the_answer_has_its_status_and_headers(client):
    async with (
        raw_server((REQUEST, answer(b"no", 429, b"Retry-After: 7\r\n"))) as server,
        await post(client, server) as response,
    ):
        assert response.status == 429
        assert response.header("retry-after") == "7"
        assert response.header("x-missing") is None
        assert await response.read() == b"no"
        assert await response.read() == b"no"


@pytest.mark.parametrize("size_bytes", [65_536, 65_537, 20 * 2**20])
@pytest.mark.case("C66", "C70")
async def test_large_bodies_pass_both_ways(client, size_bytes):
    body = os.urandom(64) * (size_bytes // 64) + b"x" * (size_bytes % 64)
    async with raw_server((REQUEST, answer(body[::-1]))) as server:
        response = await post(client, server, body=body)

        assert await response.read() == body[::-1]
        assert server.requests[0].body == body
        assert client.idle_connections(server.endpoint) == 1


async def test_a_body_over_the_limit_of_its_reader_is_refused(client):
    for message in (answer(b"x" * 100), chunked(b"x" * 60, b"y" * 40)):
        for steps in ((message,), (message[:-30], PAUSE, message[-30:])):
            async with raw_server((REQUEST, *steps) * 2) as server:
                response = await post(client, server)
                with pytest.raises(errors.UpstreamProtocol):
                    await response.read(99)
                response = await post(client, server)
                assert len(await response.read(100)) == 100


async def test_a_request_that_cannot_be_written_touches_no_connection(client):
    async with raw_server((REQUEST, answer())) as server:
        with pytest.raises(errors.InvalidRequest):
            await client.send(
                server.endpoint, "POST", "/x", [("X-A", "b\r\nX-B: c")], b"hi", timeouts=PATIENT
            )

        assert server.connection_count == 0


async def test_the_answer_to_head_has_no_body(client):
    async with raw_server((REQUEST, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")) as server:
        for _ in range(2):
            response = await post(client, server, body=None, method="HEAD")
            assert response.header("content-length") == "10"
            assert await response.read() == b""


# --- many


@pytest.mark.slow
@pytest.mark.case("C67")
async def test_a_thousand_requests_at_once_all_reach_the_engine(client):
    count = 1000
    gate = asyncio.Event()
    before = open_sockets()
    async with raw_server((REQUEST, gate, answer())) as server:
        tasks = [asyncio.create_task(post(client, server)) for _ in range(count)]
        await until(lambda: len(server.requests) == count, within_s=20)
        gate.set()
        bodies = [await (await task).read() for task in tasks]

        assert bodies == [b"ok"] * count
        assert client.idle_connections(server.endpoint) == count
        client.forget(server.endpoint)
        await until(lambda: server.open_count == 0, within_s=20)

    await until(lambda: open_sockets() <= before)


async def test_close_ends_requests_in_flight_and_refuses_new_ones():
    client = EngineClient(ClientLimits())
    async with raw_server((REQUEST, answer(), REQUEST)) as server:
        await (await post(client, server)).read()
        waiting = asyncio.create_task(post(client, server))
        await until(lambda: len(server.requests) == 2)

        await client.close()

        with pytest.raises(errors.UpstreamLost):
            await waiting
        with pytest.raises(errors.Overloaded):
            await post(client, server)
        await until(lambda: server.open_count == 0)


async def test_no_engine_address_is_in_a_text_for_clients(client):
    scripts = ((REQUEST, EOF), (REQUEST, b"garbage"), (REQUEST,))
    async with raw_server(*scripts) as server:
        for _ in scripts:
            with pytest.raises(errors.UpstreamError) as caught:
                await client.send(
                    server.endpoint, "POST", "/x", [], b"hi", timeouts=Timeouts(10, 0.1, 10)
                )

            assert str(server.endpoint.port) not in caught.value.message
            assert str(server.endpoint.port) in caught.value.detail
