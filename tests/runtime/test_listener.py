"""Binding, descriptors, and what a client gets for which there is no room."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import closing

import pytest

from pdproxy.errors import ConfigError
from pdproxy.runtime.listener import (
    DESCRIPTORS_PER_CLIENT,
    MAX_DESCRIPTORS,
    MAX_PATIENT,
    MIN_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    bind,
    bounded,
    max_connections,
    raise_descriptor_limit,
)
from tests.fakes.client import RawClient
from tests.fakes.waiting import until
from tests.fakes.wire import Wire


@pytest.mark.case("C86")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_port_in_use_is_named(host):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError) as caught:
            bind(host, port, 16)

    (fault,) = [fault for fault in caught.value.faults if "in use" in fault]
    assert "--host, --port" in fault
    assert f"127.0.0.1 port {port}" in fault


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "two..dots"])
def test_unknown_host_is_named(host):
    with pytest.raises(ConfigError) as caught:
        bind(host, 1999, 16)

    assert repr(host) in caught.value.faults[0]


def test_address_of_another_machine_is_a_fault():
    with pytest.raises(ConfigError) as caught:
        bind("192.0.2.1", 0, 16)

    assert "192.0.2.1" in caught.value.faults[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_sockets_listen_without_blocking(host):
    sockets = bind(host, 0, 16)
    try:
        for listening in sockets:
            assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            assert listening.getblocking() is False
            assert listening.getsockname()[1] > 0
        assert len({listening.family for listening in sockets}) == len(sockets)
    finally:
        for listening in sockets:
            listening.close()


@pytest.mark.needs("ipv6")
@pytest.mark.case("C55")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_brackets_of_an_ipv6_host_are_no_part_of_it(host):
    (listening,) = bind(host, 0, 16)
    with closing(listening):
        assert listening.getsockname()[0] == "::1"


def test_port_is_free_again_at_once():
    (first,) = bind("127.0.0.1", 0, 16)
    port = first.getsockname()[1]
    with closing(socket.create_connection(("127.0.0.1", port))):
        accepted, _ = until_accepted(first)
        accepted.close()  # the side that closes first keeps the address waiting
    first.close()

    (second,) = bind("127.0.0.1", port, 16)
    second.close()


def until_accepted(listening):
    listening.setblocking(True)
    listening.settimeout(5)
    return listening.accept()


# --- descriptors


@pytest.mark.case("C68")
@pytest.mark.parametrize(
    ("descriptors", "connections"),
    [
        (0, MIN_CONNECTIONS),
        (64, MIN_CONNECTIONS),
        (256, 64),
        (1024, 320),
        (MAX_DESCRIPTORS, 349_504),
    ],
)
def test_each_client_finds_its_descriptors(descriptors, connections):
    assert max_connections(descriptors) == connections
    if connections > MIN_CONNECTIONS:
        needed = RESERVED_DESCRIPTORS + connections * DESCRIPTORS_PER_CLIENT
        assert descriptors - DESCRIPTORS_PER_CLIENT < needed <= descriptors


@pytest.mark.case("C68")
def test_soft_limit_is_raised_to_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, wanted), hard))
    try:
        assert raise_descriptor_limit() == wanted
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
        assert raise_descriptor_limit() == wanted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- the bound


class Serving(asyncio.Protocol):
    """Stands for the server: it only exists."""


async def serve(limit, count):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(bounded(Serving, count, limit), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_client_beyond_the_limit_is_told_so():
    server, port = await serve(2, lambda: 2)

    async with server, await RawClient.connect(port) as client:
        reply = await client.ask("POST", "/v1/completions", b"{}" * 1000)

        assert reply.status == 503
        assert reply.error["code"] == "overloaded"
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["connection"] == "close"
        assert reply.headers["server"] == "pdproxy"
        await until(client.wire.gone.is_set)


async def test_client_within_the_limit_is_served():
    count = 1
    server, port = await serve(2, lambda: count)

    async with server, await RawClient.connect(port) as client:
        await client.send_request("GET", "/")
        await asyncio.sleep(0.02)

        assert client.wire.total_in_bytes == 0
        assert not client.wire.gone.is_set()


async def test_room_counts_at_the_moment_of_each_connection():
    count = 5
    server, port = await serve(2, lambda: count)

    async with server:
        async with await RawClient.connect(port) as client:
            assert (await client.ask("GET", "/")).status == 503
        count = 0
        async with await RawClient.connect(port) as client:
            await client.send_request("GET", "/")
            await asyncio.sleep(0.02)
            assert not client.wire.gone.is_set()


async def test_only_some_silent_clients_are_waited_for():
    server, port = await serve(0, lambda: 0)

    async with server:
        patient = [await Wire.connect(port) for _ in range(MAX_PATIENT)]
        beyond = await Wire.connect(port)
        await until(beyond.gone.is_set)

        assert beyond.total_in_bytes > 0
        assert sum(wire.total_in_bytes for wire in patient) == 0
        for wire in (*patient, beyond):
            wire.close()
