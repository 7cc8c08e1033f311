"""Start-up: faults are named at once and exit non-zero; engines may come later than the proxy."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cases.scene import CHAT, chat
from tests.fakes import client
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.proxy import proxy_here, run_command, running_proxy, start, until_ready

PROJECT = Path(__file__).parents[2]
QUICK_PROBES = ("--probe-interval", "0.2")


async def refuse(*args: str) -> str:
    """Run a command line that must be refused; return what it said."""
    code, output = await run_command(*args)
    assert code not in {0, None}, output
    assert "Traceback" not in output
    return output


# --- C83


@pytest.mark.case("C83")
async def test_proxy_starts_before_its_engines_and_takes_them_in_when_they_come() -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        await p1.stop()
        await d1.stop()
        async with proxy_here([p1], [d1], *QUICK_PROBES, wait_ready=False) as proxy:
            health = await client.get(proxy.port, "/healthcheck")
            ready = await client.get(proxy.port, "/ready")
            async with asyncio.timeout(3):
                too_early = await client.post(proxy.port, CHAT, chat(max_tokens=2))
            await p1.start()
            await d1.start()
            await until_ready(proxy, within_s=3)
            reply = await client.post(proxy.port, CHAT, chat(max_tokens=2))

    assert health.status == 200
    assert ready.status == 503
    assert too_early.status == 503
    assert too_early.error["type"]
    assert reply.status == 200


@pytest.mark.case("C83")
async def test_one_of_two_prefillers_is_enough() -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("prefill") as p2, FakeEngine("decode") as d1:
        await p1.stop()
        async with proxy_here([p1, p2], [d1], *QUICK_PROBES) as proxy:
            replies = [await client.post(proxy.port, CHAT, chat(max_tokens=2)) for _ in range(4)]

    assert {reply.status for reply in replies} == {200}
    assert len(p2.calls) == 4


# --- C84


@pytest.mark.case("C84")
@pytest.mark.e2e
@pytest.mark.parametrize("role", ["prefiller", "decoder"])
@pytest.mark.parametrize(("hosts", "ports"), [(3, 2), (1, 2), (2, 1)])
async def test_lists_of_different_length_are_refused_with_both_counts(
    role: str, hosts: int, ports: int
) -> None:
    port = free_port()
    args = [f"--{role}-hosts", *["h"] * hosts, f"--{role}-ports", *["8100"] * ports]

    output = await refuse("--host", "127.0.0.1", "--port", str(port), *args)

    lines = [line for line in output.splitlines() if f"--{role}-" in line]
    assert len(lines) == 1
    assert re.search(rf"\b{hosts} hosts?\b", lines[0])
    assert re.search(rf"\b{ports} ports?\b", lines[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


# --- C85


@pytest.mark.case("C85")
@pytest.mark.e2e
async def test_instance_given_twice_is_registered_once_with_a_warning() -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        same: list[FakeEngine | str] = [d1, f"localhost:{d1.port}", d1]
        async with running_proxy([p1], same) as proxy:
            await proxy.wait_for_log("listening on")
            health = (await client.get(proxy.port, "/healthcheck")).json
            log = proxy.log_text()

    assert health["prefill_instances"] == 1
    assert health["decode_instances"] == 1
    warnings = [line for line in log.splitlines() if "WARNING" in line and str(d1.port) in line]
    assert len(warnings) == 1, log


# --- C86


@pytest.mark.case("C86")
@pytest.mark.e2e
@pytest.mark.parametrize("value", ["0", "70000", "-1", "8e3", ""], ids=repr)
async def test_port_that_is_none_is_refused_by_name(value: str) -> None:
    of_engine = await refuse("--decoder-hosts", "h", "--decoder-ports", value)
    own = await refuse(f"--port={value}")

    assert "--decoder-ports" in of_engine
    assert "--port" in own
    if value:
        assert value in of_engine
        assert value in own


@pytest.mark.case("C86")
@pytest.mark.e2e
async def test_own_address_as_an_engine_is_refused() -> None:
    port = str(free_port())

    output = await refuse(
        *("--host", "127.0.0.1", "--port", port),
        *("--decoder-hosts", "localhost", "--decoder-ports", port),
    )

    assert port in output
    assert "--decoder-hosts" in output


@pytest.mark.case("C86")
async def test_proxy_that_calls_itself_stops_the_loop() -> None:
    async with FakeEngine("prefill") as p1, proxy_here([p1], [], wait_ready=False) as proxy:
        change = {"type": "decode", "instances": f"localhost:{proxy.port}"}
        added = await client.post(proxy.port, "/instances/add", change)
        async with asyncio.timeout(10):
            reply = await client.post(proxy.port, CHAT, chat(max_tokens=2))
        health = (await client.get(proxy.port, "/healthcheck")).json

    assert added.status in {200, 400}
    assert reply.status in {503, 508}
    assert health["request_num"] == 0
    assert len(p1.calls) <= 3


@pytest.mark.case("C86")
@pytest.mark.e2e
async def test_taken_listen_port_ends_the_start_with_a_message() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])

        output = await refuse("--host", "127.0.0.1", "--port", port)

    assert port in output


# --- C87


def dependencies() -> dict[str, str]:
    """Return the range of each run-time dependency by its name."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    pattern = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(.*)")
    matches = [pattern.fullmatch(line) for line in project["dependencies"]]
    return {match[1]: match[2] for match in matches if match is not None}


@pytest.mark.case("C87")
def test_every_dependency_is_bounded_on_both_sides() -> None:
    ranges = dependencies()

    assert ranges
    for name, bounds in ranges.items():
        assert ">=" in bounds, name
        assert re.search(r"<\d", bounds), name


@pytest.mark.case("C87")
@pytest.mark.e2e
async def test_importing_the_proxy_needs_no_engine_and_no_accelerator() -> None:
    program = (
        "import sys\n"
        "for name in ('vllm', 'vllm_ascend', 'torch', 'torch_npu', 'transformers', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import pdproxy.cli, pdproxy.runtime.worker\n"
    )

    process = await start([sys.executable, "-c", program])
    output, _ = await process.communicate()

    assert process.returncode == 0, output.decode()


@pytest.mark.case("C87")
@pytest.mark.e2e
async def test_start_up_logs_the_versions_it_runs_on() -> None:
    async with running_proxy([], [], wait_ready=False) as proxy:
        await proxy.wait_for_log("listening on")
        log = proxy.log_text()

    for name in ("pdproxy", "python", "aiohttp"):
        assert re.search(rf"{name}\W+\d+\.\d+", log, re.IGNORECASE), log
