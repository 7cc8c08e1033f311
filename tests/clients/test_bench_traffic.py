"""Traffic of benchmark and evaluation tools, with the habits by which they read and ask.

What each tool does was seen on the wire: vllm bench serve 0.32, aiperf 0.13, guidellm 0.8,
lm-eval 0.4.13, AISBench 3.1.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from pdproxy.sim import tokenizer
from pdproxy.sim.cluster import processes
from pdproxy.sim.config import SimConfig
from tests.clients.asked import lasting, says
from tests.clients.lab import MODEL, Lab
from tests.fakes.proxy import running_proxy

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
REQUESTS = 200
AT_ONCE = 50
TOKENS = 16
STEP_S = 0.025
IDEAL_S = REQUESTS / AT_ONCE * TOKENS * STEP_S
# How much longer a run may take than one on the engine alone.
SLOWER, SLOWER_S = 1.5, 0.5
ROUNDS = 8  # a busy machine may spoil one


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        yield session


# --- vllm bench serve


@dataclass(slots=True)
class BenchReader:
    """Reads a stream as the benchmark does: each read is stripped, then cut at blank lines.

    What is left over at the end of a read is tried as an event of its own, so an event in two
    reads, a line end of two bytes or a comment in a read of its own loses data.
    """

    events: list[str] = field(default_factory=list)
    _rest: str = ""

    def read(self, data: bytes) -> None:
        stripped = data.strip()
        if not stripped:
            return
        *whole, self._rest = (self._rest + stripped.decode()).split("\n\n")
        self.events.extend(whole)
        if self._is_an_event(self._rest):
            self.events.append(self._rest)
            self._rest = ""

    @staticmethod
    def _is_an_event(text: str) -> bool:
        value = text.removeprefix("data: ").strip()
        if value == text or not value:
            return False
        try:
            return value == "[DONE]" or bool(json.loads(value))
        except ValueError:
            return False


@dataclass(slots=True)
class Measured:
    """What the benchmark writes down of one request."""

    reads: list[bytes] = field(default_factory=list)
    text: str = ""
    deltas: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    is_done: bool = False


def bench_body(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": f"Sujet {number}"}]}],
        "max_completion_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def measure(session: aiohttp.ClientSession, url: str, number: int) -> Measured:
    """Make one request and read its answer read by read."""
    seen, reader = Measured(), BenchReader()
    async with session.post(url + CHAT, json=bench_body(number)) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for data in response.content.iter_any():
            seen.reads.append(data)
            reader.read(data)
    for event in reader.events:
        value = event.removeprefix("data: ")
        if value == "[DONE]":
            seen.is_done = True
            continue
        chunk = json.loads(value)
        if choices := chunk.get("choices"):
            said = choices[0]["delta"].get("content")
            seen.text += said or ""
            seen.deltas += bool(said)
        elif usage := chunk.get("usage"):
            seen.output_tokens = usage["completion_tokens"]
            seen.prompt_tokens = usage["prompt_tokens"]
    return seen


async def bench(session: aiohttp.ClientSession, url: str) -> tuple[float, list[Measured]]:
    """Return seconds in total, and what was measured, of all requests."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Measured:
        async with gate:
            return await measure(session, url, number)

    started_s = time.monotonic()
    results = await asyncio.gather(*map(one, range(REQUESTS)))
    return time.monotonic() - started_s, results


def assert_complete(result: Measured) -> None:
    assert result.is_done
    assert result.output_tokens == TOKENS
    assert result.prompt_tokens > 0
    for data in result.reads:
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        assert b"\r" not in data
        assert all(event.startswith(b"data: ") for event in data[:-2].split(b"\n\n"))


@pytest.mark.slow
@pytest.mark.e2e
async def test_bench_serve_is_as_fast_as_the_engine_and_counts_every_token(
    session: aiohttp.ClientSession,
) -> None:
    times: list[tuple[float, float]] = []

    async with processes(SimConfig(model=MODEL, decode_base_s=STEP_S)) as fleet:
        prefillers = [f"{engine.host}:{engine.port}" for engine in fleet.prefillers]
        decoders = [f"{engine.host}:{engine.port}" for engine in fleet.decoders]
        async with running_proxy(prefillers, decoders) as proxy:
            while len(times) < ROUNDS and not is_as_fast(times):
                direct_s, expected = await bench(session, fleet.decoders[0].url)
                through_s, results = await bench(session, proxy.url)
                times.append((direct_s, through_s))

                for result, other in zip(results, expected, strict=True):
                    assert_complete(result)
                    # Not one for each token, since some end within a character.
                    assert result.deltas == other.deltas
                    assert result.text == other.text
                    assert result.prompt_tokens == other.prompt_tokens

    assert is_as_fast(times), times


def is_as_fast(times: list[tuple[float, float]]) -> bool:
    """Tell whether any round through the proxy was about as fast as the engine alone."""
    return any(through_s <= direct_s * SLOWER + SLOWER_S for direct_s, through_s in times)


async def test_bench_serve_finds_the_model_and_the_tokenizer(
    lab: Lab, session: aiohttp.ClientSession
) -> None:
    async with session.get(f"{lab.url}/v1/models") as response:
        card = (await response.json())["data"][0]
    async with session.get(f"{lab.url}/metrics") as response:
        assert response.status == 200
        page = await response.text()
    ask = {"model": MODEL, "prompt": "Bonjour"}
    async with session.post(f"{lab.url}/tokenize", json=ask) as response:
        tokens = (await response.json())["tokens"]

    assert card["root"]
    assert "# TYPE pdproxy_requests_in_flight gauge" in page
    assert tokens == tokenizer.encode("Bonjour")


# --- aiperf


async def test_aiperf_looks_at_the_metrics_and_its_ids_come_through(
    lab: Lab, session: aiohttp.ClientSession
) -> None:
    run = f"run-{uuid.uuid4()}"
    ids = {"X-Request-ID": run, "X-Correlation-ID": "session-1", "X-Session-Affinity": "s-1"}

    async with session.head(f"{lab.url}/metrics") as head:
        assert head.status == 200
        assert await head.read() == b""
    async with session.get(f"{lab.url}/metrics") as page:
        assert page.status == 200
        assert page.headers["content-type"] == head.headers["content-type"]
        text = await page.text()
    async with session.post(lab.url + CHAT, json=bench_body(0), headers=ids) as response:
        body = await response.read()

    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")]
    assert names == helped
    assert not any(":" in name for name in names)
    assert response.headers["x-request-id"] == run
    assert body.endswith(b"data: [DONE]\n\n")
    for engines in (lab.prefillers, lab.decoders):
        seen = [r.headers for e in engines for r in e.requests if run in str(r.headers)]
        assert len(seen) == 1
        assert seen[0]["X-Correlation-ID"] == "session-1"
        assert seen[0]["X-Session-Affinity"] == "s-1"


# --- guidellm


async def test_guidellm_gets_usage_in_every_chunk(lab: Lab, session: aiohttp.ClientSession) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**bench_body(1), "stream_options": options, "max_tokens": TOKENS}
    async with session.get(f"{lab.url}/health") as response:
        assert response.status == 200

    async with session.post(lab.url + CHAT, json=body) as response:
        lines = (await response.text()).split("\n\n")[:-1]

    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert lines[-1] == "data: [DONE]"
    assert counts == sorted(counts)
    assert counts[-1] == TOKENS
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


# --- lm-eval


async def post(session: aiohttp.ClientSession, url: str, path: str, body: Any) -> Any:
    async with session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_lm_eval_gets_the_logprobs_of_its_prompts(
    lab: Lab, session: aiohttp.ClientSession
) -> None:
    prompts = [tokenizer.encode(text) for text in ("Le ciel est bleu", "Deux et deux", "Oui")]
    body = {
        "model": MODEL,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    before = lab.prefills

    answer = await post(session, lab.url, COMPLETIONS, body)

    assert lasting(answer) == lasting(await post(session, lab.plain.url, COMPLETIONS, body))
    assert lab.prefills == before
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(prompt) + 1
        assert logprobs[0] is None
        assert all(value is not None for value in logprobs[1:])


async def test_lm_eval_generates_from_token_ids(lab: Lab, session: aiohttp.ClientSession) -> None:
    prompts = [tokenizer.encode(f"Question {number}") for number in range(8)]
    body = {
        "model": MODEL,
        "prompt": prompts,
        "max_tokens": 20,
        "temperature": 0,
        "stop": ["."],
        "seed": 1234,
    }
    before = lab.prefills

    answer = await post(session, lab.url, COMPLETIONS, body)

    assert lasting(answer) == lasting(await post(session, lab.plain.url, COMPLETIONS, body))
    assert lab.prefills == before + len(prompts)


async def test_lm_eval_is_told_that_there_is_no_tokenizer_page(
    lab: Lab, session: aiohttp.ClientSession
) -> None:
    async with session.get(f"{lab.url}/tokenizer_info") as response:
        assert response.status == 404


# --- AISBench


async def test_aisbench_finds_a_model_and_the_usage_of_streams(
    lab: Lab, session: aiohttp.ClientSession
) -> None:
    async with session.get(f"{lab.url}/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    body = {**bench_body(2), "model": model, "max_tokens": TOKENS}

    async with session.post(lab.url + CHAT, json=body) as response:
        lines = [line async for line in response.content]

    payloads = [line[6:] for line in lines if line.startswith(b"data: ")]
    last = json.loads(payloads[-2])
    assert payloads[-1] == b"[DONE]\n"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
async def test_aisbench_gets_the_logprobs_of_a_prompt(
    lab: Lab, session: aiohttp.ClientSession, path: str
) -> None:
    asks = {"messages": says("Le ciel est bleu")} if path == CHAT else {"prompt": "Le ciel"}
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, **asks}
    before = lab.prefills

    answer = await post(session, lab.url, path, body)

    plain = await post(session, lab.plain.url, path, body)
    holder = answer if path == CHAT else answer["choices"][0]
    assert lasting(answer) == lasting(plain)
    assert len(holder["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert lab.prefills == before
