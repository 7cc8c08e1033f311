"""Streamed request bodies: their framing, their pace, and how they break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdproxy import errors
from pdproxy.upstream.client import EngineClient, Response, Timeouts
from tests.fakes.waiting import until
from tests.upstream.exchanges import RecordingSink
from tests.upstream.raw_server import (
    EOF,
    PATIENT,
    PAUSE,
    REQUEST,
    STALL,
    RawServer,
    answer,
    chunked,
    raw_server,
)


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


async def post(
    client: EngineClient,
    server: RawServer,
    body: AsyncIterator[bytes],
    *,
    content_length: int | None = None,
    timeouts: Timeouts = PATIENT,
) -> Response:
    return await client.send(
        server.endpoint, "POST", "/x", [], body, timeouts=timeouts, content_length=content_length
    )


class Endless:
    """A body that never ends; counts what was taken of it."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.is_over = False

    async def parts(self, size_bytes: int = 65536) -> AsyncIterator[bytes]:
        try:
            while True:
                self.taken_bytes += size_bytes
                yield b"x" * size_bytes
                await asyncio.sleep(0)
        finally:
            self.is_over = True


async def test_parts_are_sent_in_chunks(client):
    async with raw_server((REQUEST, answer())) as server:
        response = await post(client, server, parts_of(b"hello", b"", b" world"))

        assert await response.read() == b"ok"
        request = server.requests[0]
        assert request.values("transfer-encoding") == ["chunked"]
        assert request.values("content-length") == []
        assert request.body == b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
        assert client.idle_connections(server.endpoint) == 1


async def test_parts_of_a_known_length_are_sent_as_they_are(client):
    async with raw_server((REQUEST, answer())) as server:
        response = await post(client, server, parts_of(b"hello", b" world"), content_length=11)

        assert await response.read() == b"ok"
        assert server.requests[0].values("content-length") == ["11"]
        assert server.requests[0].values("transfer-encoding") == []
        assert server.requests[0].body == b"hello world"


@pytest.mark.parametrize("announced", [3, 9])
@pytest.mark.case("C89")
async def test_a_body_of_another_length_than_announced_is_refused(client, announced):
    async with raw_server((REQUEST, answer())) as server:
        with pytest.raises(errors.InvalidRequest):
            await post(client, server, parts_of(b"hello"), content_length=announced)

        await until(lambda: server.open_count == 0)
        assert server.requests == []


async def test_a_streamed_body_does_not_risk_a_stale_connection(client):
    async with raw_server((REQUEST, answer(), REQUEST, EOF), (REQUEST, answer(b"2"))) as server:
        response = await client.send(server.endpoint, "GET", "/", [], None, timeouts=PATIENT)
        await response.read()

        assert await (await post(client, server, parts_of(b"a"))).read() == b"2"


async def test_a_body_that_raises_closes_the_connection_and_its_error_is_the_callers(client):
    class ClientLeft(Exception):
        pass

    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        raise ClientLeft

    async with raw_server((REQUEST, answer())) as server:
        with pytest.raises(ClientLeft):
            await post(client, server, broken())

        await until(lambda: server.connection_count == 1)
        await until(lambda: server.open_count == 0)
        assert server.requests == []


async def test_a_body_that_raises_after_the_head_fails_the_response(client):
    gate = asyncio.Event()

    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        await gate.wait()
        raise ValueError

    async with raw_server((PAUSE, chunked(b"early")[:-5])) as server:
        sink = RecordingSink()
        response = await post(client, server, broken())
        response.pipe(sink)
        await until(lambda: sink.parts)

        gate.set()

        assert isinstance(await sink.outcome(), errors.UpstreamLost)
        assert sink.body == b"early"


async def test_an_engine_that_takes_no_more_stops_the_body(client):
    endless = Endless()
    async with raw_server((STALL,)) as server:
        timeouts = Timeouts(connect_s=10, head_s=0.3, idle_s=10)

        with pytest.raises(errors.UpstreamTimeout) as caught:
            await post(client, server, endless.parts(), timeouts=timeouts)

        assert caught.value.phase == "head"
        assert endless.taken_bytes < 64 * 2**20
        await until(lambda: endless.is_over)


async def test_a_caller_that_is_slow_to_give_parts_is_no_timeout_of_the_engine(client):
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0.3)
        yield b"b"

    async with raw_server((REQUEST, answer())) as server:
        timeouts = Timeouts(connect_s=10, head_s=0.1, idle_s=10)

        response = await post(client, server, slow(), timeouts=timeouts)

        assert await response.read() == b"ok"


async def test_the_head_limit_starts_when_the_body_is_handed_over(client):
    async with raw_server((REQUEST,)) as server:
        timeouts = Timeouts(connect_s=10, head_s=0.1, idle_s=10)

        with pytest.raises(errors.UpstreamTimeout):
            await post(client, server, parts_of(b"a"), timeouts=timeouts)

        await until(lambda: server.requests)


@pytest.mark.slow
async def test_the_head_limit_starts_when_whole_bytes_are_taken(client):
    taking, answering = asyncio.Event(), asyncio.Event()
    async with raw_server((taking, REQUEST, answering, answer())) as server:
        timeouts = Timeouts(connect_s=10, head_s=1.5, idle_s=10)
        body = b"x" * 20 * 2**20
        task = asyncio.create_task(
            client.send(server.endpoint, "POST", "/x", [], body, timeouts=timeouts)
        )
        for gate in (taking, answering):  # together longer than the limit
            await asyncio.sleep(0.8)
            gate.set()

        assert await (await task).read() == b"ok"


async def test_an_answer_before_the_end_of_the_body_is_delivered_and_ends_the_upload(client):
    endless = Endless()
    async with raw_server((PAUSE, answer(b"too much", 413), STALL)) as server:
        response = await post(client, server, endless.parts())

        assert response.status == 413
        assert await response.read() == b"too much"
        assert client.idle_connections(server.endpoint) == 0
        await until(lambda: endless.is_over)


async def test_an_answer_before_the_end_of_whole_bytes_is_delivered(client):
    async with raw_server((PAUSE, answer(b"too much", 413), STALL)) as server:
        response = await client.send(
            server.endpoint, "POST", "/x", [], b"x" * 20 * 2**20, timeouts=PATIENT
        )

        assert response.status == 413
        assert await response.read() == b"too much"
        assert client.idle_connections(server.endpoint) == 0


async def test_an_answer_followed_by_a_close_with_unread_request_bytes_is_delivered(client):
    async with raw_server((PAUSE, answer(b"too much", 413), EOF)) as server:
        for _ in range(10):
            response = await client.send(
                server.endpoint, "POST", "/x", [], b"x" * 8 * 2**20, timeouts=PATIENT
            )

            assert response.status == 413
            assert await response.read() == b"too much"


async def test_a_body_goes_on_while_the_answer_streams(client):
    gate = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"first"
        await gate.wait()
        yield b"second"

    head = chunked()[:-5]
    async with raw_server((head, REQUEST, b"1\r\nx\r\n0\r\n\r\n")) as server:
        timeouts = Timeouts(connect_s=10, head_s=10, idle_s=0.2)
        response = await post(client, server, body(), timeouts=timeouts)
        await asyncio.sleep(0.4)  # the engine waits for us: its idle limit does not run

        gate.set()

        assert await response.read() == b"x"
        assert server.requests[0].body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
        assert client.idle_connections(server.endpoint) == 1


async def test_a_cancelled_caller_ends_the_upload(client):
    endless = Endless()
    async with raw_server((STALL,)) as server:
        task = asyncio.create_task(post(client, server, endless.parts()))
        await until(lambda: endless.taken_bytes)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: endless.is_over)


async def test_closing_the_response_ends_the_upload(client):
    endless = Endless()
    async with raw_server((chunked()[:-5], STALL)) as server:
        response = await post(client, server, endless.parts())

        response.close()

        await until(lambda: endless.is_over)
