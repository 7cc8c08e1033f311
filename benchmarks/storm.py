"""What a storm of recomputes leaves of other traffic on the same prefillers.

    python -m benchmarks.storm --output benchmarks/results/storm.json

Starts simulated engines and the proxy. Some clients send requests one after the other, at first
alone, then beside requests that the decoder always gives back, each followed by the next once it
has ended. Exits 1 if the clients keep 80 % or less of their rate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import orjson

from benchmarks.proxy import running
from pdproxy.sim.cluster import processes
from pdproxy.sim.config import SimConfig

PATH = "/v1/completions"
ENOUGH = 0.8
# A prompt of some 200 tokens takes a prefiller 25 ms, so the clients leave it mostly idle, as
# prefillers that keep their latency are.
PREFILLER = SimConfig(prefill_base_s=0.005, prefill_per_token_s=0.0001)
DECODER = SimConfig(decode_base_s=0.02)
WORDS = ("river", "stone", "light", "under", "sleeps", "old", "new", "hand", "word", "late")


class Traffic:
    """Clients that send one request after the other."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._rng = random.Random(seed)
        self.statuses: Counter[int] = Counter()

    async def run(self, clients: int, *, recompute_after: int | None = None) -> None:
        """Send until cancelled."""
        headers = {}
        if recompute_after is not None:
            headers["x-sim-recompute-after"] = str(recompute_after)
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(headers))

    async def _client(self, headers: dict[str, str]) -> None:
        while True:
            text = " ".join(self._rng.choices(WORDS, k=200))
            body = {"prompt": text, "max_tokens": 16, "ignore_eos": True, "stream": True}
            async with self._session.post(self._url + PATH, json=body, headers=headers) as response:
                await response.read()
            self.statuses[response.status] += 1


async def measured_s(traffic: Traffic, seconds: float) -> float:
    """Return the answers per second during so many seconds."""
    before, began_s = traffic.statuses.total(), time.monotonic()
    await asyncio.sleep(seconds)
    return (traffic.statuses.total() - before) / (time.monotonic() - began_s)


async def run(args: argparse.Namespace) -> int:
    """Measure and report; return the exit code."""
    async with AsyncExitStack() as stack:
        prefillers = await stack.enter_async_context(
            processes(PREFILLER, prefiller_ports=(0, 0), decoder_ports=())
        )
        decoders = await stack.enter_async_context(
            processes(DECODER, prefiller_ports=(), decoder_ports=(0, 0))
        )
        url = await stack.enter_async_context(running(prefillers.prefillers, decoders.decoders))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        )
        others, storm = Traffic(session, url, 1), Traffic(session, url, 2)
        traffic = asyncio.ensure_future(others.run(args.clients))
        await asyncio.sleep(2)
        alone = await measured_s(others, args.seconds)
        stuck = asyncio.ensure_future(storm.run(args.storm, recompute_after=args.recompute_after))
        beside = await measured_s(others, args.seconds)
        again = stuck.cancel()
        await asyncio.wait([stuck])
        await asyncio.sleep(1)
        after = await measured_s(others, args.seconds)
        traffic.cancel()
        await asyncio.wait([traffic])
        assert again
    return report(args, (alone, beside, after), others, storm)


def report(
    args: argparse.Namespace, rates: tuple[float, float, float], others: Traffic, storm: Traffic
) -> int:
    """Print and keep what was seen; return the exit code."""
    alone, beside, after = rates
    kept = beside / ((alone + after) / 2)
    seen = {
        "storm_requests_at_a_time": args.storm,
        "given_back_after_tokens": args.recompute_after,
        "clients": args.clients,
        "seconds": args.seconds,
        "requests_per_s_before": round(alone, 1),
        "requests_per_s_beside_the_storm": round(beside, 1),
        "requests_per_s_afterwards": round(after, 1),
        "kept": round(kept, 3),
        "statuses_of_clients": {str(status): n for status, n in others.statuses.items()},
        "statuses_of_the_storm": {str(status): n for status, n in storm.statuses.items()},
        "is_good": kept > ENOUGH and set(others.statuses) == {200},
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    written = orjson.dumps(seen, option=orjson.OPT_INDENT_2).decode() + "\n"
    print(written, end="")
    if args.output:
        Path(args.output).write_text(written)
    return 0 if seen["is_good"] else 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--storm", type=int, default=50, help="requests always given back (50)")
    parser.add_argument("--recompute-after", type=int, default=1, help="tokens (1)")
    parser.add_argument("--clients", type=int, default=8, help="of the other traffic (8)")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement (10)")
    parser.add_argument("--output", metavar="FILE", help="where to keep the result")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
