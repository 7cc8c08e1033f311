"""Idle connections: the youngest first, none too old, none too many."""

from __future__ import annotations

import asyncio

from pdproxy.upstream.client import ClientLimits, EngineClient
from tests.fakes.waiting import until
from tests.upstream.raw_server import PATIENT, REQUEST, RawServer, answer, raw_server

SCRIPT = (REQUEST, answer()) * 20


async def exchange(client: EngineClient, server: RawServer) -> bytes:
    response = await client.send(server.endpoint, "POST", "/x", [], b"hi", timeouts=PATIENT)
    return await response.read()


async def fill(client: EngineClient, server: RawServer, count: int) -> None:
    """Leave `count` idle connections."""
    gate = asyncio.Event()
    scripts = list(server.scripts)
    server.scripts = [(REQUEST, gate, answer(), *SCRIPT)]
    tasks = [asyncio.create_task(exchange(client, server)) for _ in range(count)]
    await until(lambda: len(server.requests) == count)
    server.scripts = scripts
    gate.set()
    await asyncio.gather(*tasks)


async def test_idle_connections_are_closed_after_their_time():
    client = EngineClient(ClientLimits(idle_keepalive_s=0.1))
    async with raw_server(SCRIPT) as server:
        await fill(client, server, 5)
        assert client.idle_connections(server.endpoint) == 5

        await until(lambda: server.open_count == 0, within_s=2)

        assert client.idle_connections(server.endpoint) == 0
        await client.close()


async def test_a_connection_in_use_is_not_swept():
    client = EngineClient(ClientLimits(idle_keepalive_s=0.05))
    gate = asyncio.Event()
    async with raw_server((REQUEST, answer(), REQUEST, gate, answer(b"late"))) as server:
        await exchange(client, server)
        task = asyncio.create_task(exchange(client, server))
        await asyncio.sleep(0.2)

        gate.set()

        assert await task == b"late"
        await client.close()


async def test_a_connection_that_is_too_old_is_not_used_even_before_a_sweep():
    client = EngineClient(ClientLimits(idle_keepalive_s=0.0))
    async with raw_server(SCRIPT) as server:
        for _ in range(3):
            assert await exchange(client, server) == b"ok"

        assert server.connection_count == 3
        await client.close()


async def test_the_youngest_is_used_first_so_that_the_others_can_age():
    client = EngineClient(ClientLimits(idle_keepalive_s=0.4))
    async with raw_server(SCRIPT) as server:
        await fill(client, server, 5)

        for _ in range(12):
            await exchange(client, server)
            await asyncio.sleep(0.05)

        assert client.idle_connections(server.endpoint) == 1
        assert server.connection_count == 5
        await client.close()


async def test_no_more_idle_connections_are_kept_than_allowed():
    client = EngineClient(ClientLimits(max_idle_per_endpoint=3))
    async with raw_server(SCRIPT) as server:
        await fill(client, server, 10)

        assert client.idle_connections(server.endpoint) == 3
        await until(lambda: server.open_count == 3)
        await client.close()


async def test_a_forgotten_endpoint_keeps_no_connection():
    client = EngineClient(ClientLimits())
    gate = asyncio.Event()
    async with raw_server((REQUEST, gate, answer())) as server:
        task = asyncio.create_task(exchange(client, server))
        await until(lambda: server.requests)

        client.forget(server.endpoint)
        client.forget(server.endpoint)
        gate.set()

        assert await task == b"ok"
        await until(lambda: server.open_count == 0)
        assert client.idle_connections(server.endpoint) == 0
        await client.close()


async def test_a_forgotten_endpoint_can_be_used_again():
    client = EngineClient(ClientLimits())
    async with raw_server(SCRIPT) as server:
        await exchange(client, server)
        client.forget(server.endpoint)
        assert client.idle_connections(server.endpoint) == 0

        assert await exchange(client, server) == b"ok"

        assert client.idle_connections(server.endpoint) == 1
        await client.close()


async def test_endpoints_do_not_share_connections():
    client = EngineClient(ClientLimits())
    async with raw_server(SCRIPT) as one, raw_server(SCRIPT) as other:
        await exchange(client, one)
        await exchange(client, other)
        await exchange(client, one)

        assert (one.connection_count, other.connection_count) == (1, 1)
        assert client.idle_connections(one.endpoint) == 1
        await client.close()


async def test_close_closes_idle_connections():
    client = EngineClient(ClientLimits())
    async with raw_server(SCRIPT) as server:
        await fill(client, server, 5)

        await client.close()

        await until(lambda: server.open_count == 0)


async def test_a_connection_that_is_closing_is_not_used():
    client = EngineClient(ClientLimits())
    async with raw_server(SCRIPT) as server:
        await exchange(client, server)
        assert client._pool is not None
        for connection in client._pool.connections:
            connection.abort()  # the loop has not told of it yet

        assert await exchange(client, server) == b"ok"

        assert len(server.requests) == 2
        await client.close()
