"""Simulated engines with the real proxy in front, in a thread with an event loop of its own.

So blocking clients can be tested as well as asynchronous ones. Beside the fleet runs one plain
engine with the same weights: what it answers is what the proxy has to answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import TypeVar

import uvloop

from pdproxy.core.instance import Role
from pdproxy.core.load import Load
from pdproxy.runtime.sources import load_settings
from pdproxy.runtime.worker import Worker, serving
from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from pdproxy.sim.server import Sim
from tests.fakes.ports import free_port

T = TypeVar("T")

MODEL = "sim"
HOST = "127.0.0.1"
WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Lab:
    """What runs in the thread; its figures may be read from any thread."""

    loop: asyncio.AbstractEventLoop
    worker: Worker
    prefillers: tuple[Sim, ...]
    decoders: tuple[Sim, ...]
    plain: Sim

    @property
    def port(self) -> int:
        return self.worker.port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def engines(self) -> tuple[Sim, ...]:
        return self.prefillers + self.decoders

    @property
    def prefills(self) -> int:
        """How many requests the prefillers have got."""
        return sum(len(engine.requests) for engine in self.prefillers)

    def left_behind(self) -> dict[str, object]:
        """Return what is still in flight; empty if nothing is."""
        return left_behind(self.worker, self.engines)

    def assert_quiescent(self, within_s: float = 5.0) -> None:
        wait_until(lambda: not self.left_behind(), within_s, self.left_behind)

    def running(self) -> int:
        """How many choices the decoders are writing now."""
        return sum(engine.engine.running_count for engine in self.decoders)

    @contextmanager
    def another_proxy(self, *args: str, decoders: bool = True) -> Iterator[Worker]:
        """Run a second proxy before the same engines until the block ends."""
        found = self.decoders if decoders else ()
        with held(self.loop, proxy(self.prefillers, found, *args)) as worker:
            yield worker


def left_behind(worker: Worker, engines: tuple[Sim, ...]) -> dict[str, object]:
    loads = {i.label: worker.fleet.load(i) for r in Role for i in worker.fleet.instances(r)}
    found: dict[str, object] = {f"load of {k}": load for k, load in loads.items() if load != Load()}
    for engine in engines:
        if engine.node.in_flight:
            found[f"requests at {engine.url}"] = engine.node.in_flight
        if busy := engine.engine.running_count + engine.engine.waiting_count:
            found[f"sequences at {engine.url}"] = busy
    if worker.metrics.in_flight:
        found["in flight"] = worker.metrics.in_flight
    return found


@contextmanager
def lab(config: SimConfig | None = None, *args: str) -> Iterator[Lab]:
    """Run two prefillers, two decoders, a plain engine and a proxy with these further arguments."""
    with running_loop() as loop, held(loop, everything(loop, config or SimConfig(), *args)) as all_:
        yield all_


@asynccontextmanager
async def everything(
    loop: asyncio.AbstractEventLoop, config: SimConfig, *args: str
) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:

        async def start(config: SimConfig) -> Sim:
            return await stack.enter_async_context(in_process(replace(config, model=MODEL)))

        prefillers = tuple([await start(replace(config, role="prefill")) for _ in range(2)])
        decoders = tuple([await start(replace(config, role="decode")) for _ in range(2)])
        plain = await start(config)
        worker = await stack.enter_async_context(proxy(prefillers, decoders, *args))
        yield Lab(loop, worker, prefillers, decoders, plain)


@asynccontextmanager
async def proxy(
    prefillers: tuple[Sim, ...], decoders: tuple[Sim, ...], *args: str
) -> AsyncIterator[Worker]:
    argv = ["--host", HOST, "--port", str(free_port()), "--shutdown-grace", "1"]
    # A busy machine may stand still for longer than a connection may take by default.
    argv += ["--connect-timeout", "60", *args]
    for flag, engines in (("--prefillers", prefillers), ("--decoders", decoders)):
        if engines:
            argv += [flag, *(f"{engine.host}:{engine.port}" for engine in engines)]
    async with serving(load_settings(argv, {})) as worker:
        async with asyncio.timeout(WITHIN_S):
            while len(worker.fleet.available(Role.DECODE)) < len(decoders):  # noqa: ASYNC110 - no event tells us
                await asyncio.sleep(0.01)
        yield worker


# --- threads and waiting


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop of the kind that serves in production in a thread until the block ends."""
    started: Future[asyncio.AbstractEventLoop] = Future()
    ended = threading.Event()

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        started.set_result(loop)
        await stop.wait()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        finally:
            ended.set()

    stops: list[Callable[[], object]] = []
    thread = threading.Thread(target=run, name="lab", daemon=True)
    thread.start()
    try:
        yield started.result(WITHIN_S)
    finally:
        stops[0]()
        thread.join(WITHIN_S)
        assert ended.is_set(), "the loop did not end"


@contextmanager
def held(loop: asyncio.AbstractEventLoop, what: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `what` in the loop's thread, and leave it there in the same task."""
    entered: Future[T] = Future()
    stop = asyncio.Event()

    async def hold() -> None:
        try:
            async with what as value:
                entered.set_result(value)
                await stop.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            raise

    holding = asyncio.run_coroutine_threadsafe(hold(), loop)
    value = entered.result(WITHIN_S)
    try:
        yield value
    finally:
        loop.call_soon_threadsafe(stop.set)
        holding.result(WITHIN_S)


def wait_until(
    condition: Callable[[], object], within_s: float, describe: Callable[[], object] = str
) -> None:
    """Return when `condition` holds; fail with a description if it does not within the bound."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, describe()
        time.sleep(0.005)
