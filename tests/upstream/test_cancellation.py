"""A caller that leaves at any point leaves neither a connection nor another's answer behind."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.core.instance import Endpoint
from pdproxy.upstream.client import Timeouts
from tests.fakes.ports import black_hole
from tests.fakes.waiting import until
from tests.upstream.exchanges import open_sockets, post
from tests.upstream.raw_server import (
    PAUSE,
    REQUEST,
    Step,
    answer,
    raw_server,
)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param((REQUEST,), id="waiting for the head"),
        pytest.param((REQUEST, b"HTTP/1.1 200 OK\r\nX"), id="inside the head"),
        pytest.param((REQUEST, answer(b"x" * 9)[:-1]), id="inside the body"),
    ],
)
@pytest.mark.case("C44")
async def test_a_cancelled_caller_closes_the_connection(client, script):
    async def whole() -> bytes:
        return await (await post(client, server)).read()

    async with raw_server(script) as server:
        task = asyncio.create_task(whole())
        await until(lambda: server.requests)
        for _ in range(10):
            await asyncio.sleep(0)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.open_count == 0, within_s=1)
        assert client.idle_connections(server.endpoint) == 0


@pytest.mark.case("C44")
async def test_a_caller_cancelled_at_any_turn_of_the_loop_leaves_nothing(client):
    async def whole() -> bytes:
        return await (await post(client, server)).read()

    script: list[bytes | Step] = []
    for _ in range(100):
        script += [REQUEST, answer(b"ok")[:20], PAUSE, answer(b"ok")[20:]]
    async with raw_server(script) as server:
        for turns in range(40):
            task = asyncio.create_task(whole())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

            # Whatever became of it, what is idle now works.
            assert await whole() == b"ok"

        await until(lambda: server.open_count <= 1)


async def test_a_caller_cancelled_while_connecting_leaves_no_file_open(client):
    with black_hole() as port:
        endpoint = Endpoint.of("127.0.0.1", port)
        before = open_sockets()
        task = asyncio.create_task(
            client.send(endpoint, "GET", "/", [], None, timeouts=Timeouts(10, 10, 10))
        )
        await until(lambda: open_sockets() > before)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: open_sockets() == before)
        assert client._pool is not None
        assert not client._pool.connections


async def test_a_head_that_arrives_with_the_cancellation_does_not_disturb_the_next_request(client):
    async with raw_server((REQUEST, answer(b"one"), REQUEST, answer(b"two"))) as server:
        first = asyncio.create_task(post(client, server))
        # The answer is complete and its connection idle before the caller has run again.
        for _ in range(200):
            await asyncio.sleep(0)
            if client.idle_connections(server.endpoint):
                break
        second = asyncio.create_task(post(client, server))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        assert await (await second).read() == b"two"
