"""Several engines at once, for tests, benchmarks and the demo.

async with in_process(SimConfig()) as sim:      # one engine in this event loop
    sim.url, sim.books, sim.engine.counters, sim.requests, sim.faults

async with processes(SimConfig()) as fleet:     # 2 prefillers + 2 decoders as child processes
    fleet.prefillers[0].port, fleet.decoders[1].url
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace

import aiohttp

from pdproxy.sim.config import Role, SimConfig
from pdproxy.sim.server import Sim, serve

_READY = re.compile(rb"pdproxy-sim ready: \w+ at http://(.+):(\d+) ")
_KEPT_REQUESTS = 1000
_STOP_S = 3.0
_POLL_S = 0.02
_OK = 200


class ClusterError(Exception):
    """An engine did not come up."""


@dataclass(frozen=True, slots=True)
class Child:
    """An engine in a child process."""

    role: Role
    host: str
    port: int
    process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The engines of `processes`."""

    prefillers: tuple[Child, ...]
    decoders: tuple[Child, ...]


@asynccontextmanager
async def in_process(
    config: SimConfig, on_crash: Callable[[], None] | None = None
) -> AsyncIterator[Sim]:
    """One engine in this event loop, which also remembers the requests it gets."""
    kept = config.keep_requests or _KEPT_REQUESTS
    async with serve(replace(config, keep_requests=kept), on_crash) as sim:
        yield sim


@asynccontextmanager
async def processes(
    config: SimConfig | None = None,
    *,
    prefiller_ports: Sequence[int] = (0, 0),
    decoder_ports: Sequence[int] = (0, 0),
    timeout_s: float = 15.0,
) -> AsyncIterator[Cluster]:
    """Engines as child processes, healthy on entry and gone on exit.

    They also go when this process dies, whatever the reason: each watches a pipe from here.

    Args:
        config: What all of them have in common; role and port are set here.
        prefiller_ports: One prefiller per port; 0 takes a free one.
        decoder_ports: One decoder per port.
        timeout_s: How long all of them may take to come up.

    Raises:
        ClusterError: One did not.
    """
    config = config or SimConfig()
    async with AsyncExitStack() as stack:
        wanted: list[tuple[Role, int]] = [("prefill", port) for port in prefiller_ports]
        wanted += [("decode", port) for port in decoder_ports]
        starting = [
            await _start(stack, replace(config, role=role, port=port)) for role, port in wanted
        ]
        try:
            async with asyncio.timeout(timeout_s):
                children = [await _ready(process, role) for role, process in starting]
                await _healthy(children)
        except TimeoutError:
            raise ClusterError(f"an engine was not healthy after {timeout_s} s") from None
        yield Cluster(
            prefillers=tuple(child for child in children if child.role == "prefill"),
            decoders=tuple(child for child in children if child.role == "decode"),
        )


async def _start(
    stack: AsyncExitStack, config: SimConfig
) -> tuple[Role, asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdproxy.sim.cli",
        "--exit-with-stdin",
        *arguments_of(config),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C in a terminal goes to the parent alone, which then stops its children in order.
        start_new_session=True,
    )
    stack.push_async_callback(_stop, process)
    return config.role, process


def arguments_of(config: SimConfig) -> list[str]:
    """The command line that makes this engine; what only tests in this process see is left out."""
    arguments: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name == "keep_requests":
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


async def _ready(process: asyncio.subprocess.Process, role: Role) -> Child:
    """Wait for the ready line, which tells the port."""
    assert process.stdout is not None, "started with a pipe"
    async for line in process.stdout:
        found = _READY.match(line)
        if found is not None:
            return Child(role, found.group(1).decode(), int(found.group(2)), process)
    raise ClusterError(f"a {role} engine ended with status {await process.wait()}")


async def _healthy(children: Sequence[Child]) -> None:
    """Wait until each answers /health; the caller sets the bound."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        for child in children:
            while not await _is_healthy(session, child):  # noqa: ASYNC110 - another process
                await asyncio.sleep(_POLL_S)


async def _is_healthy(session: aiohttp.ClientSession, child: Child) -> bool:
    try:
        async with session.get(f"{child.url}/health") as response:
            return response.status == _OK
    except aiohttp.ClientError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a child: ask, then insist."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
