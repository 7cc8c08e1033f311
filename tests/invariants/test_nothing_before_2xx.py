"""Invariant 2: nothing reaches the client before a decoder answered 2xx."""

from __future__ import annotations

from contextlib import suppress

import pytest

from pdproxy.errors import PDProxyError
from tests.dispatch.stage import FakeDownstream, stage
from tests.fakes import behaviours
from tests.invariants.chaos import CHAT, DECODERS, PREFILLERS


class Watching(FakeDownstream):
    """A client that checks the decoders' answers with its first byte."""

    def __init__(self, statuses: list[int]) -> None:
        super().__init__()
        self._statuses = statuses

    async def start(self, headers):  # type: ignore[explicit-override]  # typing has it from 3.12
        assert any(200 <= status < 300 for status in self._statuses)
        await super().start(headers)

    async def respond(  # type: ignore[explicit-override]  # typing has it from 3.12
        self, status, headers, body
    ):
        assert any(200 <= each < 300 for each in self._statuses)
        await super().respond(status, headers, body)


async def run_watched(p, d, body):
    """Return the client after a request to one prefiller and one decoder, and what was answered."""
    statuses: list[int] = []
    async with stage([p], [d], max_attempts=2) as play:
        endpoint = play.instance(play.d[0]).endpoint
        play.client.on_head = lambda asked, response: (
            statuses.append(response.status) if asked == endpoint else None
        )
        downstream = Watching(statuses)
        with suppress(PDProxyError):
            await play.run(downstream, body)
    return downstream, statuses


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [204, 301, 304, 400, 401, 404, 408, 429, 500, 503, 599])
async def test_status_of_the_decoder_comes_first(status, stream):
    refusing = behaviours.raw(
        [b"HTTP/1.1 %d X\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n" % status],
        then="keep",
    )

    downstream, statuses = await run_watched(
        behaviours.prefill, refusing, {**CHAT, "stream": stream}
    )

    assert status in statuses
    assert downstream.is_committed is False


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nothing_comes_by_a_prefiller(stream):
    for prefiller in PREFILLERS:
        if prefiller is not behaviours.hang:
            await run_watched(prefiller, behaviours.close, {**CHAT, "stream": stream})


@pytest.mark.parametrize("decoder", [b for b in DECODERS[:-1] if b is not behaviours.hang])
async def test_no_decoder_gets_a_byte_through_without_a_good_status(decoder):
    await run_watched(behaviours.prefill, decoder, {**CHAT, "stream": True})
