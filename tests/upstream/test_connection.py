"""Connection: one exchange over a socket, cut or lost at any byte, or not HTTP at all."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy import errors
from tests.fakes.waiting import until
from tests.upstream.exchanges import RecordingSink, post
from tests.upstream.raw_server import (
    EOF,
    PAUSE,
    REQUEST,
    RST,
    answer,
    chunked,
    raw_server,
)
from tests.upstream.test_framing import CHUNKED, CONTENT_LENGTH, INTERIM, UNTIL_CLOSE

# --- cuts and ends at every byte


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(CONTENT_LENGTH, id="content-length"),
        pytest.param(CHUNKED, id="chunked"),
        pytest.param(INTERIM, id="interim heads"),
    ],
)
async def test_an_answer_cut_at_any_byte_is_the_same_answer(client, message):
    steps = [(REQUEST, message[:cut], PAUSE, message[cut:]) for cut in range(1, len(message))]
    async with raw_server([step for script in steps for step in script]) as server:
        for _ in steps:
            response = await post(client, server)
            assert response.status == 200
            assert await response.read() == b"hello world"

        assert server.connection_count == 1
        assert client.idle_connections(server.endpoint) == 1


async def test_an_answer_that_ends_with_the_connection_may_be_cut_anywhere(client):
    message = UNTIL_CLOSE
    scripts = [(REQUEST, message[:cut], PAUSE, message[cut:], EOF) for cut in range(len(message))]
    async with raw_server(*scripts) as server:
        for _ in scripts:
            response = await post(client, server)
            assert await response.read() == b"hello world"

        assert client.idle_connections(server.endpoint) == 0


@pytest.mark.parametrize("message", [CONTENT_LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("end", [EOF, RST])
async def test_an_end_at_any_byte_of_an_answer_is_a_loss(client, message, end):
    scripts = [(REQUEST, message[:cut], PAUSE, end) for cut in range(len(message))]
    async with raw_server(*scripts) as server:
        for _ in scripts:
            with pytest.raises(errors.UpstreamLost):
                await (await post(client, server)).read()

        assert len(server.requests) == len(scripts)
        assert client.idle_connections(server.endpoint) == 0


async def test_a_reset_is_no_end_of_a_body_that_ends_with_the_connection(client):
    async with raw_server((REQUEST, UNTIL_CLOSE, PAUSE, RST)) as server:
        response = await post(client, server)

        with pytest.raises(errors.UpstreamLost):
            await response.read()


async def test_body_bytes_ahead_of_a_loss_reach_the_sink_before_it(client):
    async with raw_server((REQUEST, CHUNKED[:-20], PAUSE, EOF)) as server:
        sink = RecordingSink()
        response = await post(client, server)

        response.pipe(sink)

        assert isinstance(await sink.outcome(), errors.UpstreamLost)
        assert b"hello world".startswith(sink.body)
        assert sink.body


# --- what is not HTTP


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"garbage\r\n\r\n", id="garbage"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\nabc", id="101"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 300_000, id="endless head"),
    ],
)
async def test_an_answer_that_is_not_http_closes_the_connection(client, message):
    async with raw_server((REQUEST, message)) as server:
        with pytest.raises(errors.UpstreamProtocol) as caught:
            await post(client, server)

        assert "127.0.0.1" not in caught.value.message
        assert str(server.endpoint) in caught.value.detail
        await until(lambda: server.open_count == 0)


async def test_a_broken_chunk_fails_the_body(client):
    async with raw_server((REQUEST, chunked(b"ok")[:-5], PAUSE, b"zz\r\n")) as server:
        response = await post(client, server)

        with pytest.raises(errors.UpstreamProtocol):
            await response.read()

        await until(lambda: server.open_count == 0)


async def test_bytes_after_the_end_cost_the_connection_and_not_the_answer(client):
    async with raw_server((REQUEST, answer(b"mine") + answer(b"whose?"))) as server:
        assert await (await post(client, server)).read() == b"mine"
        assert client.idle_connections(server.endpoint) == 0
        assert await (await post(client, server)).read() == b"mine"

        assert server.connection_count == 2


async def test_bytes_on_an_idle_connection_close_it(client):
    gate = asyncio.Event()
    async with raw_server((REQUEST, answer(b"mine"), gate, answer(b"whose?"))) as server:
        assert await (await post(client, server)).read() == b"mine"
        assert client.idle_connections(server.endpoint) == 1

        gate.set()

        await until(lambda: client.idle_connections(server.endpoint) == 0)
        assert await (await post(client, server)).read() == b"mine"
        assert server.connection_count == 2


async def test_a_close_while_idle_is_noticed_at_once(client):
    gate = asyncio.Event()
    async with raw_server((REQUEST, answer(), gate, EOF)) as server:
        await (await post(client, server)).read()
        assert client.idle_connections(server.endpoint) == 1

        gate.set()

        await until(lambda: client.idle_connections(server.endpoint) == 0)
