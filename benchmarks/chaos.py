"""Everything that can go wrong at once: real processes, and what becomes of each request.

    python -m benchmarks.chaos --requests 10000 --output benchmarks/results/chaos.json

Starts simulated engines, a plain one that nothing befalls, and the proxy. Clients send requests of
all shapes, some of which end as recomputed, and some clients leave at a random byte. Meanwhile
engines answer 400 and 500, break connections, fall silent, are killed and come back, and
instances are drained, removed and added. Each request must get the plain engine's answer or an
error that says so; none may hang. Exits 1 if one does not, or if anything is still held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.chaos_engines import Engine, wreck
from benchmarks.proxy import started
from benchmarks.recompute import WORDS, what_is_held
from pdproxy.sim.cluster import Cluster
from pdproxy.sim.config import SimConfig

MODEL = "sim"
KINDS = 100  # different requests; each is asked of the plain engine once
HANG_S = 90.0  # beyond all timeouts and retries of the proxy together
IDLE_S = 30.0  # for everything to be given back once the last client is gone
# Probes and scrapes, which come and go.
SPARE_FILES = 8
# What a lost decoder may have used is not released but expires.
LEASE_S = 10.0
# Short, since silent engines are part of it.
LIMITS = (
    *("--connect-timeout", "1", "--prefill-timeout", "3", "--first-token-timeout", "3"),
    *("--idle-timeout", "3", "--answer-timeout", "6", "--probe-interval", "0.5"),
    *("--kv-handle-ttl", "8", "--waiting-retry-interval", "0.5", "--max-waiting-retries", "60"),
)
Kind = tuple[str, dict[str, Any]]
# Text and finish reason per choice, prompt and completion tokens.
Answer = tuple[dict[int, tuple[str, str | None]], int | None, int | None]


class Verdicts:
    """What came of the requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []

    def note(self, verdict: str, number: int, text: str = "") -> None:
        """Count one request; what must not happen is kept in words."""
        self.counts[verdict] += 1
        if verdict not in {"right", "told", "left"}:
            self.faults.append(f"request {number} {verdict}: {text[:400]}")


def make_kind(rng: random.Random) -> Kind:
    """Return path and body of one random request."""
    text = " ".join(rng.choices(WORDS, k=rng.randrange(4, 40)))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randrange(5, 60),
        "ignore_eos": True,
        "n": rng.choice((1, 1, 1, 2)),
        "stream": rng.random() < 0.6,
    }
    # Engines refuse several choices at temperature 0.
    body |= {"temperature": 0} if body["n"] == 1 else {"temperature": 1, "seed": rng.randrange(99)}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


def differs(got: Answer, wanted: Answer) -> str:
    """Return where an answer differs, short enough for a line."""
    parts = [f"counts {got[1:]} instead of {wanted[1:]}"] if got[1:] != wanted[1:] else []
    for index in sorted({*got[0], *wanted[0]}):
        ours, theirs = got[0].get(index, ("", None)), wanted[0].get(index, ("", None))
        if ours != theirs:
            pairs = zip(ours[0], theirs[0], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            rest, other = ours[0][same:][:60], theirs[0][same:][:60]
            parts.append(
                f"choice {index} after {same} of {len(theirs[0])} characters: "
                f"{rest!r} ({ours[1]}) instead of {other!r} ({theirs[1]})"
            )
    return "; ".join(parts)


def read_answer(is_stream: bool, text: str) -> tuple[Answer, bool, dict[str, Any] | None]:
    """Return the answer, whether it came to its end, and its error event if it has one."""
    if not is_stream:
        return _answer([orjson.loads(text)]), True, None
    events = [e[6:] for e in text.split("\n\n") if e.startswith("data: ")]
    chunks = [orjson.loads(event) for event in events if event != "[DONE]"]
    error = next((chunk for chunk in chunks if "error" in chunk), None)
    good = [chunk for chunk in chunks if "error" not in chunk]
    return _answer(good), bool(events) and events[-1] == "[DONE]", error


def _answer(chunks: list[dict[str, Any]]) -> Answer:
    said: dict[int, tuple[str, str | None]] = {}
    usage: dict[str, Any] = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text, end = said.get(choice["index"], ("", None))
            part = choice.get("delta") or choice.get("message") or {}
            text += choice.get("text") or part.get("content") or ""
            said[choice["index"]] = (text, choice.get("finish_reason") or end)
    return said, usage.get("prompt_tokens"), usage.get("completion_tokens")


class Storm:
    """The clients."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        kinds: list[Kind],
        wanted: list[Answer],
        seed: int,
    ) -> None:
        self._session = session
        self._url = url
        self._kinds = kinds
        self._wanted = wanted
        self._seed = seed
        self.verdicts = Verdicts()

    async def run(self, requests: int, concurrency: int) -> None:
        """Send all requests, so many at a time."""
        numbers = iter(range(requests))

        async def client() -> None:
            for number in numbers:
                await self._one(number)
                if (number + 1) % 500 == 0:
                    print(f"{number + 1} of {requests} sent", flush=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def _one(self, number: int) -> None:
        rng = random.Random(self._seed * 1_000_003 + number)
        path, body = self._kinds[number % len(self._kinds)]
        headers = {"X-Request-Id": f"chaos-{number}"}
        if rng.random() < 0.2:
            # Each round ends after so many tokens, so few of them mean several rounds.
            headers["x-sim-recompute-after"] = str(
                max(1, body["max_tokens"] // rng.randrange(1, 4))
            )
        leaves_after = rng.randrange(2000) if rng.random() < 0.15 else None
        try:
            async with asyncio.timeout(HANG_S):
                await self._ask(number, path, body, headers, leaves_after)
        except TimeoutError:
            self.verdicts.note("hung", number, str(body))
        except aiohttp.ClientError as error:
            self.verdicts.note("broken", number, repr(error))

    async def _ask(
        self,
        number: int,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        leaves_after: int | None,
    ) -> None:
        if leaves_after is not None and leaves_after % 4 == 0:  # before the answer began
            try:
                async with asyncio.timeout(leaves_after / 20_000):
                    async with self._session.post(self._url + path, json=body, headers=headers):
                        pass
            except TimeoutError:
                pass
            self.verdicts.note("left", number)
            return
        async with self._session.post(self._url + path, json=body, headers=headers) as response:
            if leaves_after is not None:
                await response.content.read(leaves_after)
                response.close()
                self.verdicts.note("left", number)
                return
            text = await response.text()
        self._judge(number, response.status, body["stream"], text)

    def _judge(self, number: int, status: int, is_stream: bool, text: str) -> None:
        wanted = self._wanted[number % len(self._wanted)]
        if status != 200:
            error = orjson.loads(text).get("error", {})
            is_told = bool(error.get("message")) and error.get("code") != "internal_error"
            self.verdicts.statuses[f"{status} {error.get('code')}"] += 1
            self.verdicts.note("told" if is_told else "untold", number, f"{status} {text}")
            return
        got, is_whole, error = read_answer(is_stream, text)
        if "recomputed" in text:
            self.verdicts.note("leaked", number, text)
        elif error is not None:
            is_begun = all(
                wanted[0].get(index, ("", None))[0].startswith(said)
                for index, (said, _) in got[0].items()
            )
            self.verdicts.statuses[f"event {error['error'].get('code')}"] += 1
            self.verdicts.note("told" if is_begun else "wrong", number, differs(got, wanted))
        elif not is_whole:
            self.verdicts.note("truncated", number, text[-200:])
        else:
            self.verdicts.note("right" if got == wanted else "wrong", number, differs(got, wanted))


async def run(args: argparse.Namespace) -> int:
    """Run the storm and report; return the exit code."""
    rng = random.Random(args.seed)
    config = SimConfig(model=MODEL, decode_base_s=0.002, prefill_base_s=0.002, kv_lease_s=LEASE_S)
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(Engine("decode", SimConfig(model=MODEL)))
        engines = [
            await stack.enter_async_context(Engine(role, config))
            for role in ("prefill", "prefill", "prefill", "decode", "decode", "decode")
        ]
        cluster = Cluster(
            tuple(e.child for e in engines if e.role == "prefill"),
            tuple(e.child for e in engines if e.role == "decode"),
        )
        limits = (*LIMITS, "--workers", str(args.workers))
        proxy = started(cluster.prefillers, cluster.decoders, *limits)
        url, pid = await stack.enter_async_context(proxy)
        idle_files = await _settled_files(pid)
        kinds = [make_kind(rng) for _ in range(min(KINDS, args.requests))]
        async with _session() as session:
            wanted = [await _plain_answer(session, plain.child.url, kind) for kind in kinds]
            storm = Storm(session, url, kinds, wanted, args.seed)
            began_s = time.monotonic()
            async with wreck(engines, session, url, rng) as acts:
                await storm.run(args.requests, args.concurrency)
            took_s = time.monotonic() - began_s
        held = await _what_is_left(url, pid, engines, idle_files)
        return report(args, storm.verdicts, acts, took_s, held)


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)


async def _plain_answer(session: aiohttp.ClientSession, url: str, kind: Kind) -> Answer:
    path, body = kind
    async with session.post(url + path, json=body) as response:
        return read_answer(body["stream"], await response.text())[0]


async def _what_is_left(url: str, pid: int, engines: list[Engine], idle_files: int) -> list[str]:
    """Return what is not back at its idle level, after some time for it to get there."""
    cluster = Cluster(
        tuple(e.child for e in engines if e.role == "prefill"),
        tuple(e.child for e in engines if e.role == "decode"),
    )
    end_s = time.monotonic() + IDLE_S
    while True:
        async with _session() as session:
            held = await what_is_held(session, url, cluster, cluster)
            running = orjson.loads(await (await session.get(f"{url}/debug/requests")).read())
        held += [f"running: {each}" for each in running["requests"]]
        files = _files(pid)
        if files > idle_files + SPARE_FILES:
            held.append(f"{files} open files, {idle_files} when idle before")
        if not held or time.monotonic() > end_s:
            return held
        await asyncio.sleep(1)


def _files(pid: int) -> int:
    return sum(len(os.listdir(f"/proc/{each}/fd")) for each in (pid, *_children(pid)))


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _settled_files(pid: int) -> int:
    """Return how many files the proxy has open once its first probes are over."""
    counts = [_files(pid)]
    while len(counts) < 10 or max(counts[-10:]) > min(counts[-10:]) + 2:
        await asyncio.sleep(0.2)
        counts.append(_files(pid))
    return max(counts[-10:])


def report(
    args: argparse.Namespace,
    verdicts: Verdicts,
    acts: Counter[str],
    took_s: float,
    held: list[str],
) -> int:
    """Print and keep what was seen; return the exit code."""
    is_good = not verdicts.faults and not held and sum(verdicts.counts.values()) == args.requests
    seen = {
        "requests": args.requests,
        "concurrency": args.concurrency,
        "workers": args.workers,
        "seed": args.seed,
        "seconds": round(took_s, 1),
        "verdicts": dict(verdicts.counts),
        "errors_told": dict(verdicts.statuses.most_common()),
        "acts": dict(acts),
        "still_held_afterwards": len(held),
        "is_good": is_good,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    written = orjson.dumps(seen, option=orjson.OPT_INDENT_2).decode() + "\n"
    print(written, end="")
    for line in verdicts.faults[:10] + held[:10]:
        print("  " + line)
    if args.output:
        Path(args.output).write_text(written)
    return 0 if is_good else 1


def main(argv: list[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--concurrency", type=int, default=40, help="at a time (40)")
    parser.add_argument("--workers", type=int, default=1, help="of the proxy (1)")
    parser.add_argument("--output", metavar="FILE", help="where to keep the result")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults (1)")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
