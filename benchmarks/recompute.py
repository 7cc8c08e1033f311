"""Answers under a storm of recomputes: real processes, decoders with far too little KV cache.

    python -m benchmarks.recompute --requests 10000 --output benchmarks/results/recompute-auto.json

Starts 2 simulated prefillers, 2 decoders whose KV cache holds a fraction of what is asked, a
plain engine with room for all, and the proxy. Every answer that comes through is compared
with the plain engine's: text, finish reason, token counts. Exits 1 if one differs or is lost, if
fewer than a third were recomputed one to five times, or if anything is still held in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.proxy import running
from pdproxy.sim.cluster import Cluster, processes
from pdproxy.sim.config import SimConfig

MODEL = "sim"
WORDS = ("the", "a", "river", "stone", "light", "over", "under", "runs", "sleeps", "old", "new")
KINDS = 200  # different requests; each is asked of the plain engine once
MANY = 5  # recomputes of one request up to which it counts as recomputed a few times
Answer = tuple[object, ...]


@dataclass(slots=True)
class Score:
    """What came of the requests."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def make_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return path and body of one random request."""
    text = " ".join(rng.choices(WORDS, k=rng.randrange(4, 40)))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randrange(20, 80),
        "ignore_eos": True,
        "temperature": 0,
        "stream": rng.random() < 0.7,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Return (text, finish reasons, prompt and completion tokens, [DONE]s) or ("error", why)."""
    async with session.post(url, json=body) as response:
        text = await response.text()
    if response.status != 200:
        return ("error", text[:200])
    if not body["stream"]:
        whole = orjson.loads(text)
        choice, usage = whole["choices"][0], whole["usage"]
        said = choice.get("text", choice.get("message", {}).get("content"))
        ends = [choice["finish_reason"]]
        return (said, ends, usage["prompt_tokens"], usage["completion_tokens"], 0)
    return read_stream(text)


def read_stream(text: str) -> Answer:
    """Return the same of a stream."""
    said, ends, usage = "", [], {"prompt_tokens": None, "completion_tokens": None}
    for event in text.split("\n\n"):
        if not event.startswith("data: {"):
            continue
        chunk = orjson.loads(event[6:])
        if "error" in chunk:
            return ("error", event[:200])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            said += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    if "recomputed" in text:
        return ("error", "the word recomputed reached the client")
    return (said, ends, usage["prompt_tokens"], usage["completion_tokens"], text.count("[DONE]"))


async def run(args: argparse.Namespace) -> int:
    """Run the storm and report; return the exit code."""
    rng = random.Random(args.seed)
    small = SimConfig(model=MODEL, num_blocks=args.blocks, decode_base_s=0.001)
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(
            processes(SimConfig(model=MODEL), prefiller_ports=(), decoder_ports=(0,))
        )
        prefillers = await stack.enter_async_context(
            processes(SimConfig(model=MODEL), prefiller_ports=(0, 0), decoder_ports=())
        )
        decoders = await stack.enter_async_context(
            processes(small, prefiller_ports=(), decoder_ports=(0, 0))
        )
        # With the queue, decoders are hardly ever given more than they hold: 26 of 10,000.
        limits = ("--max-rounds", str(args.max_rounds), "--token-ids", args.token_ids)
        proxy_args = (*limits, "--kv-queue", "off")
        proxy = running(prefillers.prefillers, decoders.decoders, *proxy_args)
        url = await stack.enter_async_context(proxy)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        )
        kinds = [make_body(rng) for _ in range(min(KINDS, args.requests))]
        print(f"asking the plain engine {len(kinds)} requests ...", flush=True)
        wanted = [await ask(session, plain.decoders[0].url + path, body) for path, body in kinds]
        began_s = time.monotonic()
        score = await storm(session, url, kinds, wanted, args)
        took_s = time.monotonic() - began_s
        await asyncio.sleep(2)
        held = await what_is_held(session, url, prefillers, decoders)
        text = await (await session.get(f"{url}/metrics")).text()
        return report(args, score, took_s, held, text)


async def storm(
    session: aiohttp.ClientSession,
    url: str,
    kinds: list[tuple[str, dict[str, Any]]],
    wanted: list[Answer],
    args: argparse.Namespace,
) -> Score:
    """Send all requests, so many at a time; compare each answer."""
    score, numbers = Score(), iter(range(args.requests))

    async def client() -> None:
        for number in numbers:
            path, body = kinds[number % len(kinds)]
            got = await ask(session, url + path, body)
            note(score, number, got, wanted[number % len(kinds)])
            if (number + 1) % 500 == 0:
                print(f"{number + 1} of {args.requests} sent", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(args.concurrency):
            group.create_task(client())
    return score


def note(score: Score, number: int, got: Answer, wanted: Answer) -> None:
    """Count one answer."""
    if got == wanted:
        score.right += 1
    elif got[0] == "error":
        score.failed.append(f"request {number}: {got[1]}")
    else:
        score.wrong.append(f"request {number}: {got} instead of {wanted}")


async def what_is_held(
    session: aiohttp.ClientSession, url: str, prefillers: Cluster, decoders: Cluster
) -> list[str]:
    """Return what is not at zero: loads of the proxy, running requests and handles of engines."""
    pattern = (
        r"^(pdproxy_(?:requests_in_flight|instance_(?:requests_in_flight|load_tokens|kv_tokens))"
    )
    pattern += r"\{[^}]*\}|(?:vllm:num_requests_(?:running|waiting)|sim:pinned_handles)\{[^}]*\})"
    pattern += r" ([0-9.e+-]+)$"
    held: list[str] = []
    urls = [url]
    urls += [child.url for child in (*prefillers.prefillers, *decoders.decoders)]
    for url in urls:
        text = await (await session.get(f"{url}/metrics")).text()
        for name, value in re.findall(pattern, text, re.MULTILINE):
            if float(value):
                held.append(f"{url} {name} {value}")
    return held


def report(
    args: argparse.Namespace, score: Score, took_s: float, held: list[str], text: str
) -> int:
    """Print and keep what was seen; return the exit code."""
    pattern = r'^pdproxy_recomputes_total\{[^}]*result="(\w+)"\} (\S+)$'
    rounds: Counter[str] = Counter()
    for result, value in re.findall(pattern, text, re.MULTILINE):
        rounds[result] += int(float(value))
    pattern = r'^pdproxy_recompute_attempts_bucket\{le="(\S+)"\} (\S+)$'
    buckets = {le: int(float(n)) for le, n in re.findall(pattern, text, re.MULTILINE)}
    few = buckets.get(f"{MANY}.0", 0)
    is_good = score.right == args.requests and not held and few * 3 >= args.requests
    seen = {
        "requests": args.requests,
        "concurrency": args.concurrency,
        "blocks_per_decoder": args.blocks,
        "token_ids": args.token_ids,
        "seconds": round(took_s, 1),
        "right": score.right,
        "wrong": len(score.wrong),
        "failed": len(score.failed),
        "recomputed": buckets.get("+Inf", 0),
        f"recomputed_1_to_{MANY}_times": few,
        "recomputed_up_to_times": buckets,
        "further_rounds": dict(rounds),
        "still_held_afterwards": len(held),
        "is_good": is_good,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    written = orjson.dumps(seen, option=orjson.OPT_INDENT_2).decode() + "\n"
    print(written, end="")
    for line in (score.wrong + score.failed)[:5] + held[:10]:
        print("  " + line)
    if args.output:
        Path(args.output).write_text(written)
    return 0 if is_good else 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--concurrency", type=int, default=24, help="at a time (24)")
    parser.add_argument("--blocks", type=int, default=15, help="KV blocks per decoder (15)")
    parser.add_argument("--max-rounds", type=int, default=30, help="of the proxy (30)")
    modes = ("auto", "always", "never")
    parser.add_argument("--token-ids", choices=modes, default="auto", help="of the proxy (auto)")
    parser.add_argument("--output", metavar="FILE", help="where to keep the result")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (1)")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
