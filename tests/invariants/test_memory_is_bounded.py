"""Invariant 6: memory per stream is bounded; a slow client throttles its decoder."""

from __future__ import annotations

import asyncio

from pdproxy.core.api import Api
from pdproxy.server.generate import generate
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.client import streaming
from tests.fakes.waiting import until
from tests.server.stage import handling, server

CHUNK = event_bytes({"choices": [{"index": 0, "delta": {"content": "x" * 60_000}}]})
# Sockets on either side of the proxy hold some megabytes; its own share is `buffer_bytes`.
MOST_BYTES = 40 << 20
ENDLESS_BYTES = 200 << 20
BODY = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def test_decoder_is_throttled_while_its_client_does_not_read():
    written = 0

    async def endless(_: EngineRequest, answer: Answer) -> None:
        nonlocal written
        await answer.start_stream()
        while written < ENDLESS_BYTES:
            await answer.chunk(CHUNK)
            written += len(CHUNK)
        await answer.hang()

    async with server(d=[endless]) as made:

        async def handler(request):
            return await generate(made.context, request, Api.CHAT)

        async with (
            handling(handler) as port,
            streaming(port, "/", BODY) as (client, _),
        ):
            client.wire.pause_reading()
            await until_still(lambda: written)
            assert written < MOST_BYTES

            stopped_at = written
            client.wire.resume_reading()
            await until(lambda: written > stopped_at + MOST_BYTES, 20)
        await until(lambda: made.requests.finished)
        made.play.assert_idle()


async def until_still(value, still_s: float = 0.3) -> None:
    """Return when `value` has not changed for a while."""
    async with asyncio.timeout(30):
        seen = None
        while seen != value():
            seen = value()
            await asyncio.sleep(still_s)
