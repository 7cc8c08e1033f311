"""The dashboard of the real command with real traffic: its numbers are those of the other pages."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.browser.browsing import visit
from tests.fakes import client
from tests.fakes.ports import free_port
from tests.fakes.proxy import metric, start
from tests.fakes.waiting import until_answer

START_S = 60.0
CHAT = "/v1/chat/completions"
REQUESTS = 12
TOKENS = 20


@dataclass(frozen=True, slots=True)
class Demo:
    port: int


@asynccontextmanager
async def demo() -> AsyncIterator[Demo]:
    """`pdproxy --demo`, as a user starts it and ends it."""
    port = free_port()
    process = await start([sys.executable, "-m", "pdproxy", "--demo", "--port", str(port)])
    assert process.stdout is not None
    reading = asyncio.get_running_loop().create_task(process.stdout.read())
    try:
        await until_answer(lambda: is_ready(port), START_S)
        yield Demo(port)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(START_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


async def is_ready(port: int) -> bool:
    try:
        return (await client.get(port, "/ready")).status == 200
    except OSError:
        return False


async def ask(port: int, model: str = "demo") -> int:
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    return (await client.post(port, CHAT, body)).status


async def test_numbers_are_those_of_the_metrics_and_of_the_data(browser):
    async with demo() as running:
        statuses = await asyncio.gather(*(ask(running.port) for _ in range(REQUESTS)))
        unknown = await ask(running.port, "none-such")
        async with visit(browser, running.port, width=1360) as seen:
            await seen.until_text("#stat-requests", str(REQUESTS + 1))
            for figure in ("#rate-all", "#tpot-p50"):
                await seen.until(
                    "(id) => /[0-9]/.test(document.querySelector(id).textContent)", figure
                )
            tokens = int((await seen.text("#stat-tokens")).replace(",", ""))
            clients, failed = await seen.text("#stat-clients"), await seen.text("#stat-failed")
            failures = await seen.text("#failures")
            in_flight = await seen.text("#stat-in-flight")
            names = await seen.evaluate(
                "[...document.querySelectorAll('.name')].map((node) => node.textContent)"
            )
        data = (await client.get(running.port, "/dashboard/data")).json
        counted = {
            outcome: await metric(running, "pdproxy_requests_total", outcome=outcome)
            for outcome in ("success", "client_error")
        }
        generated = await metric(running, "pdproxy_generation_tokens_total")
        first_tokens = await metric(running, "pdproxy_time_to_first_token_seconds_count")

    assert statuses == [200] * REQUESTS
    assert unknown == 404
    assert counted == data["window"]["outcomes"] == {"success": REQUESTS, "client_error": 1}
    assert tokens == generated == data["window"]["output_tokens"] == REQUESTS * TOKENS
    assert first_tokens == REQUESTS
    assert (clients, failed, in_flight) == ("1", "0", "0")
    assert "client error 404" in failures
    assert "none-such" in failures
    assert sorted(names) == sorted(each["instance"] for each in data["instances"])
    assert len(names) == 4


async def test_drain_by_click_is_carried_out_and_shown_and_taken_back(browser):
    async with demo() as running, visit(browser, running.port) as seen:
        await seen.until_text("#health", "2 of 2 decoders active")
        name = await seen.text("#list-decode .name")
        await seen.page.get_by_role("button", name=f"Drain decoder {name}").click()
        await seen.page.click("#confirm [value=yes]")
        await seen.until_text("#health", "1 of 1 decoder active")
        told, listed = await seen.text("#told"), await states(running.port)
        statuses = [await ask(running.port) for _ in range(3)]
        await seen.page.get_by_role("button", name=f"Undrain decoder {name}").click()
        await seen.page.click("#confirm [value=yes]")
        await seen.until_text("#health", "2 of 2 decoders active")

        assert name in told
        assert listed[name] == "gone"
        assert statuses == [200] * 3
        assert (await states(running.port))[name] == "active"


async def states(port: int) -> dict[str, str]:
    told = (await client.get(port, "/instances")).json
    return {each["instance"]: each["state"] for each in told["decode"]["instances"]}
