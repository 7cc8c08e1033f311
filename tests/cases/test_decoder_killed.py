"""A decoder is killed under steady load: who notices, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import pytest

from benchmarks.chaos import read_answer
from benchmarks.chaos_engines import Engine
from benchmarks.proxy import started
from pdproxy.sim.config import SimConfig

RATE = 20  # requests a second
SECONDS = 4
BODY = {
    "model": "sim",
    "prompt": "a river of some length that runs over old stones",
    "max_tokens": 30,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


async def ask(session: aiohttp.ClientSession, url: str) -> str:
    """Return the text, or "error"."""
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        text = await response.text()
    if response.status != 200:
        return "error"
    answer, is_whole, error = read_answer(True, text)
    return answer[0][0][0] if is_whole and error is None else "error"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.case("C58", "C71")
async def test_a_killed_decoder_is_noticed_by_three_clients_at_most_and_comes_back() -> None:
    config = SimConfig(model="sim", decode_base_s=0.01)
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(Engine("prefill", config))
        decoders = [await stack.enter_async_context(Engine("decode", config)) for _ in range(2)]
        limits = ("--probe-interval", "1", "--slow-start", "0")
        proxy = started([p.child], [d.child for d in decoders], *limits)
        url, _ = await stack.enter_async_context(proxy)
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        wanted = await ask(session, url)

        tasks = []
        for number in range(RATE * SECONDS):
            tasks.append(asyncio.create_task(ask(session, url)))
            if number == RATE * SECONDS // 2:
                await decoders[0].kill()
            await asyncio.sleep(1 / RATE)
        seen = Counter(await asyncio.gather(*tasks))

        assert seen[wanted] >= RATE * SECONDS - 3, seen
        assert set(seen) <= {wanted, "error"}

        await decoders[0].start()
        async with asyncio.timeout(15):  # one probe interval, and a busy machine's time to start
            while not await _has_served(session, decoders[0]):
                assert await ask(session, url) == wanted


async def _has_served(session: aiohttp.ClientSession, engine: Engine) -> bool:
    async with session.get(f"{engine.child.url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
    return any(float(line.rsplit(" ", 1)[1]) for line in lines)
