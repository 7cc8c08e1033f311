"""connect: what a connection that does not come about is called, and how an open one is set up."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import pytest

from pdproxy import errors
from pdproxy.core.instance import Endpoint
from pdproxy.upstream.client import EngineClient, Response, Timeouts
from tests.fakes.ports import black_hole
from tests.upstream.exchanges import post
from tests.upstream.raw_server import PATIENT, REQUEST, answer, raw_server


def highest_file() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


async def get(client: EngineClient, endpoint: Endpoint, timeouts: Timeouts = PATIENT) -> Response:
    return await client.send(endpoint, "GET", "/", [], None, timeouts=timeouts)


async def test_a_refused_connection_is_unreachable(client):
    async with raw_server((REQUEST, answer())) as server:
        pass

    with pytest.raises(errors.UpstreamUnreachable) as caught:
        await post(client, server)

    assert str(server.endpoint.port) not in caught.value.message
    assert str(server.endpoint) in caught.value.detail


@pytest.mark.case("C69")
async def test_a_connection_that_does_not_come_is_a_timeout(client):
    with black_hole() as port, pytest.raises(errors.UpstreamTimeout) as caught:
        await get(client, Endpoint.of("127.0.0.1", port), Timeouts(0.1, 10, 10))

    assert caught.value.phase == "connect"


async def test_an_unknown_name_is_unreachable(client):
    for host in ("no-such-engine.invalid", "a" * 63 + ".invalid"):
        with pytest.raises(errors.UpstreamUnreachable):
            await get(client, Endpoint.of(host, 80))


@pytest.mark.case("C68")
async def test_a_lack_of_file_descriptors_is_no_engines_fault(client):
    async with raw_server((REQUEST, answer())) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        holders: list[socket.socket] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest_file() + 8, hard))
            with contextlib.suppress(OSError):
                while True:
                    holders.append(socket.socket())

            with pytest.raises(errors.Overloaded):
                await post(client, server)
        finally:
            for holder in holders:
                holder.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        assert await (await post(client, server)).read() == b"ok"


async def test_small_writes_go_out_at_once_and_dead_peers_are_noticed(client):
    async with raw_server((REQUEST, answer())) as server:
        await (await post(client, server)).read()

        assert client._pool is not None
        (connection,) = client._pool.connections
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
