"""Each wait for an engine ends after its own limit, and only the engine's waits count."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy import errors
from pdproxy.upstream.client import Timeouts
from tests.fakes.waiting import until
from tests.upstream.exchanges import RecordingSink, post
from tests.upstream.raw_server import (
    REQUEST,
    answer,
    chunked,
    raw_server,
)

IMPATIENT_S = 0.15


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
