"""Failures on demand do what they say."""

import asyncio

import aiohttp
import pytest

from pdproxy.sim.faults import Fault, asked_for
from tests.sim.clients import CHAT, COMPLETIONS, send, until

BODY = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}


async def test_a_status_comes_with_its_error_body_and_retry_after(session, decoder):
    decoder.faults.status = [None, 503]
    decoder.faults.retry_after_s = 7

    first = await send(session, decoder, COMPLETIONS, BODY)
    second = await send(session, decoder, COMPLETIONS, BODY)

    assert first.status == 200
    assert (second.status, second.json["error"]["code"]) == (503, 503)
    assert second.headers["retry-after"] == "7"


@pytest.mark.parametrize("after", [0, 3])
async def test_a_connection_breaks_after_so_many_events(session, decoder, after):
    decoder.faults.drop_after = [after]
    received = b""

    async def read():
        nonlocal received
        async with session.post(decoder.url + COMPLETIONS, json=BODY) as response:
            async for part in response.content.iter_any():
                received += part

    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
        await read()
    assert received.count(b"data: ") == after
    await until(lambda: decoder.books.held_blocks == 0)


@pytest.mark.parametrize(
    ("headers", "role", "wanted"),
    [
        ({"x-sim-recompute-after": "3"}, "decode", 3),
        ({"x-sim-recompute-after": "3"}, "prefill", None),
        ({"x-sim-recompute-after": "soon"}, "decode", None),
        ({}, "decode", None),
    ],
)
def test_a_request_can_ask_to_be_given_back(headers, role, wanted):
    assert asked_for(Fault(), headers, role) == Fault(recompute_after=wanted)


async def test_a_stalled_stream_frees_everything_when_the_client_leaves(session, decoder):
    decoder.faults.stall_after = [2]

    async with session.post(decoder.url + COMPLETIONS, json=BODY) as response:
        events = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.1)
        response.close()

    assert len(events) == 2
    await until(lambda: decoder.node.in_flight == 0)


async def test_an_error_event_ends_the_stream(session, decoder):
    decoder.faults.error_after = [2]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}

    answer = await send(session, decoder, CHAT, body)

    assert len(answer.events) == 3
    assert answer.events[-1]["error"]["code"] == 500


async def test_faults_can_be_sent(session, decoder):
    await send(session, decoder, "/sim/faults", {"status": [429]})

    assert (await send(session, decoder, COMPLETIONS, BODY)).status == 429
    assert (await send(session, decoder, COMPLETIONS, BODY)).status == 200


async def test_requests_are_remembered(session, decoder):
    await send(session, decoder, COMPLETIONS, BODY, **{"X-Request-Id": "abc"})

    seen = decoder.requests[-1]
    assert (seen.method, seen.path, seen.body) == ("POST", COMPLETIONS, BODY)
    assert seen.headers["X-Request-Id"] == "abc"
