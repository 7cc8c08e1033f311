"""The real proxy for tests: the `pdproxy` command as a process.

Rule: at the end it gets SIGTERM, must exit with 0 within a bound, and its log must hold no
traceback, unless the test says otherwise, and no task that was left behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from pdproxy.runtime.sources import load_settings
from pdproxy.runtime.worker import serving
from tests.fakes import client
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.waiting import until, until_answer

START_S = 20.0
STOP_S = 15.0

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LOAD_METRICS = (
    "pdproxy_requests_in_flight",
    "pdproxy_instance_requests_in_flight",
    "pdproxy_instance_load_tokens",
    "pdproxy_instance_kv_tokens",
)


class HasPort(Protocol):
    """A proxy that listens on loopback."""

    @property
    def port(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


class ProxyProcess:
    """A running `pdproxy` command. `log_text` is all of its stdout and stderr so far."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self._output = bytearray()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        return self._output.decode("utf-8", "replace")

    async def wait_for_log(self, text: str, within_s: float = 5.0) -> None:
        await until(lambda: text in self.log_text(), within_s)

    async def collect_output(self) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(65536):
            self._output += data


@asynccontextmanager
async def running_proxy(
    prefill: Sequence[FakeEngine | str],
    decode: Sequence[FakeEngine | str],
    *args: str,
    wait_ready: bool = True,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    allow_traceback: bool = False,
    exit_code: int = 0,
) -> AsyncIterator[ProxyProcess]:
    """Run the real command in front of these engines (or `host:port` texts) until the block ends.

    Args:
        prefill: prefillers.
        decode: decoders.
        args: further arguments.
        wait_ready: wait for /ready to be 200, else only for /healthcheck to answer.
        env: additions to the environment.
        command: what runs pdproxy, if not this Python with `-m pdproxy`.
        allow_traceback: do not fail for a traceback in the log.
        exit_code: what it must end with.
    """
    port = free_port()
    argv = [*(command or (sys.executable, "-m", "pdproxy"))]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += instance_args("prefiller", prefill) + instance_args("decoder", decode) + [*args]
    process = await start(argv, env)
    proxy = ProxyProcess(process, port)
    reading = asyncio.get_running_loop().create_task(proxy.collect_output())
    try:
        up = _wait_for_ok(port, "/ready" if wait_ready else "/healthcheck", START_S)
        waiting = asyncio.get_running_loop().create_task(up)
        # A command that ends at once is told from one that is slow.
        await asyncio.wait({waiting, reading}, return_when=asyncio.FIRST_COMPLETED)
        assert not reading.done(), proxy.log_text()
        await waiting
        yield proxy
        await _end(proxy, reading, exit_code, allow_traceback=allow_traceback)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


async def start(
    argv: Sequence[str], env: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a command with one pipe for both of its outputs and no proxy settings of ours."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PDPROXY_") and name != "OPENAI_API_KEY"
    }
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**ours, "PYTHONUNBUFFERED": "1", **(env or {})},
    )


async def run_command(
    *args: str, env: Mapping[str, str] | None = None, within_s: float = 20.0
) -> tuple[int, str]:
    """Run `pdproxy` with `args` to its end; return exit code and output."""
    process = await start([sys.executable, "-m", "pdproxy", *args], env)
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode("utf-8", "replace")


def instance_args(role: str, instances: Sequence[FakeEngine | str]) -> list[str]:
    """Return the two-list form of instances, such as `--decoder-hosts A B --decoder-ports 1 2`."""
    if not instances:
        return []
    addresses = [item if isinstance(item, str) else item.address for item in instances]
    pairs = [address.rpartition(":") for address in addresses]
    hosts = [host for host, _, _ in pairs]
    ports = [port for _, _, port in pairs]
    return [f"--{role}-hosts", *hosts, f"--{role}-ports", *ports]


async def _wait_for_ok(port: int, path: str, within_s: float) -> None:
    await until_answer(lambda: _is_ok(port, path), within_s)


async def _is_ok(port: int, path: str) -> bool:
    try:
        return (await client.get(port, path)).status == 200
    except OSError:
        return False


async def _end(
    proxy: ProxyProcess, reading: asyncio.Task[None], exit_code: int, *, allow_traceback: bool
) -> None:
    if proxy.process.returncode is None:
        proxy.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(STOP_S):
        code = await proxy.process.wait()
        await asyncio.wait({reading})
    log = proxy.log_text()
    assert code == exit_code, log
    assert "was destroyed but it is pending" not in log, log
    assert "was never awaited" not in log, log
    assert allow_traceback or "Traceback" not in log, log


# --- what the proxy shows of itself


async def metrics(proxy: HasPort) -> list[Sample]:
    """Return the samples of the metrics page."""
    reply = await client.get(proxy.port, "/metrics")
    assert reply.status == 200, reply.body
    return [
        Sample(match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"]))
        for match in _SAMPLE.finditer(reply.body.decode())
    ]


async def metric(proxy: HasPort, name: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels."""
    return sum(
        sample.value
        for sample in await metrics(proxy)
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def loads(proxy: HasPort) -> dict[str, float]:
    """Return all load figures that the proxy shows; none may ever be negative."""
    health = (await client.get(proxy.port, "/healthcheck")).json
    figures = {"request_num": float(health["request_num"])}
    for sample in await metrics(proxy):
        if sample.name in _LOAD_METRICS:
            figures[f"{sample.name}{dict(sample.labels)}"] = sample.value
    assert all(value >= 0 for value in figures.values()), figures
    return figures


async def assert_quiescent(proxy: HasPort, *engines: FakeEngine, within_s: float = 3.0) -> None:
    """Wait until nothing is in flight: all loads zero, no handle held, no upstream request open."""
    left: dict[str, float] = {}
    try:
        async with asyncio.timeout(within_s):
            while True:
                left = {name: value for name, value in (await loads(proxy)).items() if value}
                left.update({f"held by {e.address}": e.held for e in engines if e.held})
                left.update(
                    {f"open at {e.address}": e.open_answers for e in engines if e.open_answers}
                )
                if not left:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not quiescent after {within_s} s: {left}") from None


# --- the proxy in the test's own loop


@dataclass(frozen=True, slots=True)
class ProxyHere:
    """The real application on a real socket, in this process and this event loop."""

    port: int


@asynccontextmanager
async def proxy_here(
    prefill: Sequence[FakeEngine | str],
    decode: Sequence[FakeEngine | str],
    *args: str,
    wait_ready: bool = True,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[ProxyHere]:
    """Serve in front of these engines until the block ends; much cheaper than a process."""
    argv = ["--host", "127.0.0.1", "--port", str(free_port())]
    argv += instance_args("prefiller", prefill) + instance_args("decoder", decode) + [*args]
    async with serving(load_settings(argv, env or {})) as worker:
        proxy = ProxyHere(worker.port)
        if wait_ready:
            await until_ready(proxy)
        yield proxy


async def until_ready(proxy: HasPort, within_s: float = START_S) -> None:
    await _wait_for_ok(proxy.port, "/ready", within_s)
