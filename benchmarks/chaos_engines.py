"""Engines that suffer: child processes with faults, kills and restarts, and an unquiet operator."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import aiohttp

from pdproxy.sim.cluster import Child, processes
from pdproxy.sim.config import Role, SimConfig

FAULT_PAUSE_S = 0.15
KILL_PAUSE_S = 4.0
ADMIN_PAUSE_S = 0.7


class Engine:
    """One engine process that keeps its port over restarts."""

    child: Child

    def __init__(self, role: Role, config: SimConfig) -> None:
        self.role = role
        self._config = config
        self._port = 0
        self._stack = AsyncExitStack()
        self.is_up = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """Start it, on the port it had before."""
        ports = {"prefill": ((self._port,), ()), "decode": ((), (self._port,))}[self.role]
        made = processes(
            self._config, prefiller_ports=ports[0], decoder_ports=ports[1], timeout_s=60
        )
        cluster = await self._stack.enter_async_context(made)
        self.child = (*cluster.prefillers, *cluster.decoders)[0]
        self._port = self.child.port
        self.is_up = True

    async def kill(self) -> None:
        """End it as the kernel would."""
        self.is_up = False
        self.child.process.kill()
        await self.child.process.wait()
        await self._stack.aclose()

    @property
    def address(self) -> str:
        """What the proxy knows it by."""
        return f"127.0.0.1:{self._port}"


@asynccontextmanager
async def wreck(
    engines: list[Engine], session: aiohttp.ClientSession, url: str, rng: random.Random
) -> AsyncIterator[Counter[str]]:
    """Let everything go wrong within the block; in the end all is up, in service and sound."""
    acts: Counter[str] = Counter()
    over = asyncio.Event()
    tasks = [
        asyncio.create_task(_faults(engines, session, rng, acts, over)),
        asyncio.create_task(_kills(engines, rng, acts, over)),
        asyncio.create_task(_admin(engines, session, url, rng, acts, over)),
    ]
    try:
        yield acts
    finally:
        over.set()
        await asyncio.gather(*tasks)
        for engine in engines:
            await _post(session, f"{engine.child.url}/sim/faults", _NO_FAULTS)
            body = {"type": engine.role, "instances": engine.address}
            await _post(session, f"{url}/instances/add", body)


_NO_FAULTS: dict[str, Any] = {
    name: [] for name in ("status", "recompute_after", "drop_after", "stall_after", "error_after")
}


async def _faults(
    engines: list[Engine],
    session: aiohttp.ClientSession,
    rng: random.Random,
    acts: Counter[str],
    over: asyncio.Event,
) -> None:
    while not await _is_over(over, FAULT_PAUSE_S):
        engine = rng.choice(engines)
        name = rng.choice(("status", "status", "drop_after", "drop_after", "error_after"))
        if rng.random() < 0.1:
            name = "stall_after"  # rarer: each costs a client the whole idle timeout
        values = (400, 500, 503) if name == "status" else range(12)
        if engine.is_up:
            body = {name: rng.choices(values, k=rng.randrange(1, 4))}
            acts[name] += await _post(session, f"{engine.child.url}/sim/faults", body)


async def _kills(
    engines: list[Engine], rng: random.Random, acts: Counter[str], over: asyncio.Event
) -> None:
    while not await _is_over(over, KILL_PAUSE_S):
        engine = rng.choice(engines)
        await engine.kill()
        await _is_over(over, rng.uniform(0.2, 2.0))
        await engine.start()
        acts["killed"] += 1


async def _admin(
    engines: list[Engine],
    session: aiohttp.ClientSession,
    url: str,
    rng: random.Random,
    acts: Counter[str],
    over: asyncio.Event,
) -> None:
    while not await _is_over(over, ADMIN_PAUSE_S):
        engine = rng.choice(engines)
        away, back = rng.choice((("remove", "add"), ("drain", "undrain"), ("drain", "add")))
        body = {"type": engine.role, "instances": engine.address}
        acts[away] += await _post(session, f"{url}/instances/{away}", body)
        await _is_over(over, rng.uniform(0, 0.5))
        # One that has drained is gone by now and has to be added.
        await _post(session, f"{url}/instances/{back}", body)
        await _post(session, f"{url}/instances/add", body)


async def _is_over(over: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await over.wait()
    except TimeoutError:
        return False
    return True


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bool:
    try:
        async with session.post(url, json=body) as response:
            return response.status == 200
    except aiohttp.ClientError:  # killed in the meantime
        return False
