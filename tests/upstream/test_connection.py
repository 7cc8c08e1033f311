"""Connection: one exchange over a socket, cut, lost, late or held back at any point."""

# Python 3.11 has no typing.override to mark the sinks' methods with.
# mypy: disable-error-code="explicit-override"

from __future__ import annotations

import asyncio

import pytest

from pdproxy import errors
from pdproxy.upstream.client import ClientLimits, EngineClient, Timeouts
from tests.fakes.waiting import until
from tests.upstream.raw_server import (
    EOF,
    PATIENT,
    PAUSE,
    REQUEST,
    RST,
    RawServer,
    answer,
    chunked,
    raw_server,
)
from tests.upstream.sinks import RecordingSink
from tests.upstream.test_framing import CHUNKED, CONTENT_LENGTH, INTERIM, UNTIL_CLOSE

IMPATIENT_S = 0.15


async def post(client: EngineClient, server: RawServer, timeouts: Timeouts = PATIENT):
    return await client.send(server.endpoint, "POST", "/x", [], b"hi", timeouts=timeouts)


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


# --- time limits


@pytest.mark.parametrize(
    "start",
    [
        pytest.param((), id="nothing"),
        pytest.param((b"HTTP/1.1 200 OK\r\nX-",), id="half a head"),
        pytest.param((b"HTTP/1.1 100 Continue\r\n\r\n",), id="an interim head"),
    ],
)
@pytest.mark.case("C69")
async def test_a_head_that_does_not_come_is_a_timeout(client, start):
    async with raw_server((REQUEST, *start)) as server:
        timeouts = Timeouts(connect_s=10, head_s=IMPATIENT_S, idle_s=10)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()

        with pytest.raises(errors.UpstreamTimeout) as caught:
            await post(client, server, timeouts)

        assert caught.value.phase == "head"
        assert IMPATIENT_S * 0.9 <= loop.time() - begin_s < 5
        await until(lambda: server.open_count == 0)


@pytest.mark.case("C69")
async def test_a_body_that_stops_is_a_timeout(client):
    async with raw_server((REQUEST, chunked(b"some")[:-5])) as server:
        timeouts = Timeouts(connect_s=10, head_s=10, idle_s=IMPATIENT_S)
        sink = RecordingSink()
        response = await post(client, server, timeouts)
        response.pipe(sink)

        error = await sink.outcome()

        assert isinstance(error, errors.UpstreamTimeout)
        assert error.phase == "body"
        assert sink.body == b"some"
        await until(lambda: server.open_count == 0)


@pytest.mark.slow
async def test_a_slow_body_that_keeps_coming_is_no_timeout(client):
    gates = [asyncio.Event() for _ in range(8)]
    steps: list[asyncio.Event | bytes] = []
    for gate in gates:
        steps += [gate, b"1\r\nx\r\n"]
    head = chunked()[: -len(b"0\r\n\r\n")]
    async with raw_server((REQUEST, head, *steps, b"0\r\n\r\n")) as server:
        timeouts = Timeouts(connect_s=10, head_s=10, idle_s=1.5)
        sink = RecordingSink()
        response = await post(client, server, timeouts)
        response.pipe(sink)

        for gate in gates:
            await asyncio.sleep(0.25)  # together longer than the limit
            gate.set()

        assert await sink.outcome() is None
        assert sink.body == b"x" * 8


async def test_the_idle_limit_does_not_run_while_paused_and_starts_anew_after_it(client):
    async with raw_server((REQUEST, chunked(b"some")[:-5])) as server:
        timeouts = Timeouts(connect_s=10, head_s=10, idle_s=IMPATIENT_S)
        sink = RecordingSink()
        response = await post(client, server, timeouts)
        response.pipe(sink)
        await until(lambda: sink.parts)

        response.pause()
        await asyncio.sleep(2 * IMPATIENT_S)
        assert not sink.done.is_set()
        response.resume()

        assert isinstance(await sink.outcome(), errors.UpstreamTimeout)


async def test_no_limits_wait_for_as_long_as_it_takes(client):
    gate = asyncio.Event()
    async with raw_server((REQUEST, gate, answer())) as server:
        waiting = asyncio.create_task(post(client, server, Timeouts(10, None, None)))
        await until(lambda: server.requests)
        assert not waiting.done()

        gate.set()

        assert await (await waiting).read() == b"ok"


async def test_a_short_limit_after_a_long_one_holds_on_the_same_connection(client):
    async with raw_server((REQUEST, answer(), REQUEST)) as server:
        await (await post(client, server, Timeouts(10, 600, 600))).read()

        with pytest.raises(errors.UpstreamTimeout):
            await post(client, server, Timeouts(10, IMPATIENT_S, 600))

        assert server.connection_count == 1


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
