"""A decoder that cannot pull the KV cache: nobody gets a wrong or a half answer.

An engine tells it by status 500 or, in a stream, by 200, the role and then an error event; one
that is set to recompute answers as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.fakes.proxy import loads, running_proxy
from tests.real_engines.engines import Engines
from tests.real_engines.exchange import CHAT, COMPLETIONS, Lab, answer_of
from tests.real_engines.misdirecting import JsonObject, Misdirecting, gone, misdirecting, restarted

SPOILERS = [pytest.param(restarted, id="restarted"), pytest.param(gone, id="gone")]
MODES = [(CHAT, True), (CHAT, False), (COMPLETIONS, True), (COMPLETIONS, False)]


@asynccontextmanager
async def trap(
    engines: Engines, spoil: Callable[[JsonObject], JsonObject], decoder: str, *, healthy: int
) -> AsyncIterator[tuple[Lab, Misdirecting]]:
    """Run a proxy with a misdirecting prefiller, so many healthy ones, and one decoder."""
    async with misdirecting(engines.prefillers[0], decoder, spoil) as bad:
        prefillers = [bad.address, *engines.prefillers[-healthy:]] if healthy else [bad.address]
        options = ("--prefill-policy", "round_robin", "--retry-delay", "0")
        async with running_proxy(prefillers, [decoder], *options) as proxy:
            yield Lab(proxy, engines), bad


@pytest.mark.parametrize("spoil", SPOILERS)
async def test_answers_are_right_while_another_prefiller_is_healthy(
    engines: Engines, spoil: Callable[[JsonObject], JsonObject]
) -> None:
    for decoder in engines.decoders:
        async with trap(engines, spoil, decoder, healthy=1) as (lab, bad):
            for path, stream in MODES:
                make = lab.chat if path == CHAT else lab.completion
                await lab.assert_equal(path, make(stream=stream))
            assert bad.handles > 0
            assert not any((await loads(lab.proxy)).values())


@pytest.mark.parametrize("spoil", SPOILERS)
async def test_without_a_healthy_prefiller_the_answer_is_right_or_a_plain_error(
    engines: Engines, spoil: Callable[[JsonObject], JsonObject]
) -> None:
    for decoder in engines.decoders:
        async with trap(engines, spoil, decoder, healthy=0) as (lab, bad):
            body = lab.chat(stream=True)

            reply = await lab.post(CHAT, body)

            assert bad.handles > 0
            if reply.status == 200:
                assert answer_of(reply) == answer_of(await lab.plain(CHAT, body))
            else:
                assert reply.status >= 500
                assert reply.error
