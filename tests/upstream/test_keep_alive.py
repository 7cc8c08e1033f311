"""Which connection a request uses: kept ones, and a fresh one when those are dead."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy import errors
from tests.fakes.waiting import until
from tests.upstream.exchanges import post
from tests.upstream.raw_server import (
    EOF,
    PAUSE,
    REQUEST,
    RST,
    answer,
    chunked,
    raw_server,
)


async def test_a_connection_serves_one_request_after_another(client):
    async with raw_server((REQUEST, answer(), REQUEST, chunked(b"a"), REQUEST, answer())) as server:
        for body in (b"ok", b"a", b"ok"):
            assert await (await post(client, server)).read() == body

        assert server.connection_count == 1


async def test_a_connection_is_free_as_soon_as_its_answer_is_complete(client):
    async with raw_server((REQUEST, answer(), REQUEST, answer())) as server:
        first = await post(client, server)
        await until(lambda: client.idle_connections(server.endpoint) == 1)

        second = await post(client, server)

        assert (await first.read(), await second.read()) == (b"ok", b"ok")
        assert server.connection_count == 1


async def test_an_answer_that_closes_is_not_reused(client):
    closing = answer(extra=b"Connection: close\r\n")
    async with raw_server((REQUEST, closing)) as server:
        for _ in range(3):
            assert await (await post(client, server)).read() == b"ok"

        assert server.connection_count == 3
        await until(lambda: server.open_count == 0)


@pytest.mark.parametrize("end", [EOF, RST])
async def test_a_stale_connection_is_replaced_once(client, end):
    async with raw_server((REQUEST, answer(), REQUEST, end), (REQUEST, answer(b"new"))) as server:
        await (await post(client, server)).read()

        response = await post(client, server)

        assert await response.read() == b"new"
        assert [request.body for request in server.requests] == [b"hi"] * 3


@pytest.mark.case("C75")
@pytest.mark.parametrize("end", [EOF, RST])
async def test_an_engine_that_died_with_a_request_may_have_read_it(client, end):
    # Refused alone would say that it certainly did not, and its KV handle would be used again.
    async with raw_server((REQUEST, answer(), REQUEST, end)) as server:
        await (await post(client, server)).read()
        server.stop_listening()

        with pytest.raises(errors.UpstreamLost):
            await post(client, server)


async def test_a_fresh_connection_that_closes_without_a_byte_is_not_tried_again(client):
    async with raw_server((REQUEST, EOF)) as server:
        with pytest.raises(errors.UpstreamLost):
            await post(client, server)

        assert server.connection_count == 1


async def test_the_replacement_of_a_stale_connection_is_not_replaced(client):
    async with raw_server((REQUEST, answer(), REQUEST, EOF), (REQUEST, EOF)) as server:
        await (await post(client, server)).read()

        with pytest.raises(errors.UpstreamLost):
            await post(client, server)

        assert server.connection_count == 2


@pytest.mark.parametrize(
    "start", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"]
)
async def test_a_reused_connection_that_sent_a_byte_is_not_tried_again(client, start):
    async with raw_server((REQUEST, answer(), REQUEST, start, PAUSE, EOF)) as server:
        await (await post(client, server)).read()

        with pytest.raises(errors.UpstreamLost):
            await post(client, server)

        assert server.connection_count == 1


@pytest.mark.case("C75")
async def test_after_a_restart_each_request_needs_at_most_one_failed_attempt(client):
    count = 200
    restart = asyncio.Event()
    gathered = asyncio.Event()
    old = (REQUEST, gathered, answer(), REQUEST, restart, RST)
    new = (REQUEST, answer(b"new"))
    async with raw_server(*[old] * count, new) as server:
        firsts = [asyncio.create_task(post(client, server)) for _ in range(count)]
        await until(lambda: len(server.requests) == count)
        gathered.set()
        for first in firsts:
            await (await first).read()
        assert client.idle_connections(server.endpoint) == count

        seconds = [asyncio.create_task(post(client, server)) for _ in range(count)]
        await until(lambda: len(server.requests) == 2 * count)
        restart.set()
        bodies = [await (await second).read() for second in seconds]

        assert bodies == [b"new"] * count
        assert len(server.requests) == 3 * count


@pytest.mark.case("C75")
async def test_one_stale_connection_empties_the_idle_list(client):
    gathered = asyncio.Event()
    first = (REQUEST, gathered, answer(), REQUEST, RST)
    async with raw_server(*[first] * 5, (REQUEST, answer(b"new"))) as server:
        tasks = [asyncio.create_task(post(client, server)) for _ in range(5)]
        await until(lambda: len(server.requests) == 5)
        gathered.set()
        for task in tasks:
            await (await task).read()

        assert await (await post(client, server)).read() == b"new"

        assert client.idle_connections(server.endpoint) == 1
        await until(lambda: server.open_count == 1)
