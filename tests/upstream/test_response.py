"""Response: back-pressure on its engine, one call per read, and what closing it does."""

# Python 3.11 has no typing.override to mark the sinks' methods with.
# mypy: disable-error-code="explicit-override"

from __future__ import annotations

import asyncio

import pytest

from pdproxy import errors
from pdproxy.upstream.client import ClientLimits
from tests.fakes.waiting import until
from tests.upstream.exchanges import RecordingSink, post
from tests.upstream.raw_server import (
    REQUEST,
    answer,
    chunked,
    raw_server,
)

# --- back-pressure


async def test_a_paused_sink_stops_the_engine(client):
    size_bytes = 64 * 2**20
    async with raw_server((REQUEST, answer(b"x" * size_bytes))) as server:
        sink = RecordingSink()
        response = await post(client, server)
        response.pipe(sink)
        response.pause()
        taken_bytes = len(sink.body)

        await asyncio.sleep(0.1)

        assert len(sink.body) == taken_bytes < 2**20
        response.resume()
        assert await sink.outcome() is None
        assert len(sink.body) == size_bytes
        assert client.idle_connections(server.endpoint) == 1


async def test_a_body_that_nobody_reads_stops_the_engine(client):
    size_bytes = 64 * 2**20
    async with raw_server((REQUEST, answer(b"x" * size_bytes), REQUEST, answer())) as server:
        response = await post(client, server)
        await asyncio.sleep(0.1)
        sink = RecordingSink()

        response.pipe(sink)

        limit_bytes = ClientLimits().unclaimed_body_bytes
        assert limit_bytes <= len(sink.body) < limit_bytes + 2**20
        assert await sink.outcome() is None
        assert len(sink.body) == size_bytes
        await (await post(client, server)).read()
        assert server.connection_count == 1


async def test_a_sink_that_pauses_in_its_last_call_leaves_a_working_connection(client):
    class PausingSink(RecordingSink):
        def body_received(self, data: bytes) -> None:
            super().body_received(data)
            response.pause()

    gate = asyncio.Event()
    head, body = chunked()[:-5], b"1\r\na\r\n0\r\n\r\n"
    async with raw_server((REQUEST, head, gate, body, REQUEST, answer(b"next"))) as server:
        response = await post(client, server)
        sink = PausingSink()
        response.pipe(sink)
        gate.set()
        assert await sink.outcome() is None

        assert await (await post(client, server)).read() == b"next"
        assert server.connection_count == 1


async def test_one_read_is_one_call(client):
    gate = asyncio.Event()
    parts = [b"data: %d\n\n" % i for i in range(50)]
    head_end = chunked().index(b"\r\n\r\n") + 4
    message = chunked(*parts)
    async with raw_server((REQUEST, message[:head_end], gate, message[head_end:])) as server:
        sink = RecordingSink()
        response = await post(client, server)
        response.pipe(sink)

        gate.set()

        assert await sink.outcome() is None
        assert sink.parts == [b"".join(parts)]


# --- leaving


@pytest.mark.case("C43")
async def test_closing_a_response_is_seen_by_the_engine_at_once(client):
    async with raw_server((REQUEST, chunked(b"some")[:-5])) as server:
        sink = RecordingSink()
        response = await post(client, server)
        response.pipe(sink)
        await until(lambda: sink.parts)

        response.close()

        await until(lambda: server.open_count == 0, within_s=1)
        assert not sink.done.is_set()
        assert client.idle_connections(server.endpoint) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(chunked(b"some"), b"", id="complete before it is piped"),
        pytest.param(chunked()[:-5], b"4\r\nsome\r\n0\r\n\r\n", id="end in the same read"),
        pytest.param(chunked()[:-5], b"4\r\nsome\r\n", id="no end"),
    ],
)
async def test_a_sink_may_close_its_response_in_its_call(client, first, second):
    class ClosingSink(RecordingSink):
        def body_received(self, data: bytes) -> None:
            super().body_received(data)
            response.close()

    gate = asyncio.Event()
    async with raw_server((REQUEST, first, gate, second)) as server:
        sink = ClosingSink()
        response = await post(client, server)
        response.pipe(sink)
        gate.set()
        await until(lambda: sink.parts)
        for _ in range(10):
            await asyncio.sleep(0)

        assert not sink.done.is_set()


async def test_closing_a_finished_response_leaves_its_former_connection_alone(client):
    async with raw_server((REQUEST, answer(b"one"), REQUEST, answer(b"two"))) as server:
        first = await post(client, server)
        assert await first.read() == b"one"
        second_task = asyncio.create_task(post(client, server))
        await asyncio.sleep(0)  # the second request is under way on the same connection

        first.close()
        first.pause()

        assert await (await second_task).read() == b"two"
        assert server.connection_count == 1


async def test_a_sink_that_raises_costs_the_connection(client):
    class RaisingSink(RecordingSink):
        def body_received(self, data: bytes) -> None:
            super().body_received(data)
            raise ValueError("a fault of the caller")

    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context.get("exception")))
    gate = asyncio.Event()
    async with raw_server((REQUEST, chunked()[:-5], gate, b"1\r\nx\r\n")) as server:
        sink = RaisingSink()
        response = await post(client, server)
        response.pipe(sink)

        gate.set()

        assert isinstance(await sink.outcome(), errors.UpstreamLost)
        await until(lambda: server.open_count == 0)
        assert any(isinstance(fault, ValueError) for fault in faults)
