"""Workers start, end and are asked together: through the real command and its signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest

from pdproxy.runtime.control import connect
from pdproxy.runtime.crew import Child, Crew
from tests.cases.scene import CHAT, Scene, chat
from tests.fakes.client import assert_ends_in_error, assert_whole_stream
from tests.fakes.ports import free_port
from tests.fakes.proxy import instance_args, metric, run_command
from tests.fakes.waiting import until, until_answer
from tests.runtime.crew_scene import (
    Gate,
    Stream,
    begin,
    crew,
    is_refused,
    process,
    until_serving,
    workers_of,
)

pytestmark = pytest.mark.e2e
# Ends each worker before it has said anything.
BROKEN_START = """
import os, sys
if any("worker_process" in part for part in sys.orig_argv):
    os._exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("are_workers_first", [False, True])
async def test_one_signal_to_all_processes_lets_streams_end(are_workers_first):
    gate = Gate()
    async with crew(2, 2, gate) as made:
        proxy = process(made)
        streams = await begin(made, 8)
        workers = workers_of(proxy)
        for pid in (*workers, proxy.pid) if are_workers_first else (proxy.pid, *workers):
            os.kill(pid, signal.SIGTERM)
        await proxy.wait_for_log("stopping; 8 requests in flight")
        await until_answer(lambda: is_refused(made.port))
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())

        assert await proxy.process.wait() == 0


@pytest.mark.slow
@pytest.mark.case("C81")
async def test_streams_that_outlast_the_grace_are_told_and_make_the_exit_code_1():
    gate = Gate()
    async with crew(2, 2, gate, "--shutdown-grace", "1", exit_code=1) as made:
        streams = await begin(made, 8)
        process(made).process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert_ends_in_error(await stream.end())

        assert await process(made).process.wait() == 1


@pytest.mark.slow
@pytest.mark.case("C81")
async def test_second_signal_takes_the_rest_of_the_grace_in_all_workers():
    gate = Gate()
    async with crew(2, 2, gate, "--shutdown-grace", "60", exit_code=1) as made:
        proxy = process(made)
        streams = await begin(made, 8)
        proxy.process.send_signal(signal.SIGINT)
        await until_answer(lambda: is_refused(made.port))
        proxy.process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        for stream in streams:
            assert_ends_in_error(await stream.end())

        assert await proxy.process.wait() == 1
        assert time.monotonic() - began_s < 10  # of 60


@pytest.mark.slow
@pytest.mark.case("C80")
async def test_workers_without_supervisor_cut_what_outlasts_the_grace():
    gate = Gate()
    args = ("--shutdown-grace", "1")
    async with crew(2, 2, gate, *args, exit_code=-signal.SIGKILL) as made:
        proxy = process(made)
        pids = workers_of(proxy)
        streams = await begin(made, 8)
        os.kill(proxy.pid, signal.SIGKILL)
        for stream in streams:
            assert_ends_in_error(await stream.end())
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20.0)


async def test_workers_that_never_start_end_the_proxy_with_the_reason(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BROKEN_START)
    path = os.pathsep.join((str(tmp_path), os.getcwd()))
    args = ["--host", "127.0.0.1", "--port", str(free_port()), "--workers", "2"]
    args += instance_args("decoder", ["127.0.0.1:9"])
    code, output = await run_command(*args, env={"PYTHONPATH": path}, within_s=30.0)

    assert code == 2
    assert "the workers do not start: exit code 7" in output


@pytest.mark.slow
async def test_workers_that_are_ending_still_show_the_requests_of_all():
    gate = Gate()
    async with crew(2, 2, gate, "--shutdown-delay", "30") as made:
        proxy = process(made)
        streams = await begin(made, 8)
        proxy.process.send_signal(signal.SIGTERM)
        await until(lambda: proxy.log_text().count("not ready") == 2)
        for _ in range(6):
            reply = await made.get("/debug/requests")
            assert len(reply.json["requests"]) == 8
            assert (await made.get("/dashboard/data")).status == 200
            assert (await made.get("/ready")).status == 503
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())
        proxy.process.send_signal(signal.SIGTERM)  # the delay has served its purpose


@pytest.mark.slow
async def test_limits_of_what_runs_and_waits_are_those_of_the_whole_proxy():
    gate = Gate()
    args = ("--max-in-flight", "8", "--max-queue", "4", "--queue-timeout", "60")
    async with crew(4, 2, gate, *args) as made:
        # One after another, as two that come at once in two workers may both see room.
        running = [(await begin(made, 1))[0] for _ in range(8)]
        waiting = []
        for count in range(1, 5):
            waiting.append(Stream(made))
            await until_answer(partial(_is_queue, made, count))
        replies = [await made.post(CHAT, chat(max_tokens=2)) for _ in range(8)]
        held = sum(decoder.open_answers for decoder in made.decoders)
        gate.is_open = True
        for stream in (*running, *waiting):
            assert_whole_stream(await stream.end())

        assert [reply.status for reply in replies] == [429] * 8
        assert held == 8


async def _is_queue(made: Scene, count: int) -> bool:
    return await metric(process(made), "pdproxy_admission_queue_depth") == count


async def test_metrics_port_shows_the_sums_of_all_workers():
    port = free_port()
    async with crew(2, 2, None, "--metrics-port", str(port)) as made:
        for _ in range(20):
            assert (await made.post(CHAT, chat(max_tokens=2))).status == 200
        scrapers = _At(port)
        await until_answer(lambda: _has_served(scrapers, 20))
        for _ in range(6):
            assert await _has_served(scrapers, 20)


class _At:
    """Where scrapers ask."""

    def __init__(self, port: int) -> None:
        self.port = port


async def _has_served(scrapers: _At, count: int) -> bool:
    return await metric(scrapers, "pdproxy_requests_total", outcome="success") == count


@pytest.mark.slow
async def test_others_accept_for_a_worker_that_stands_still_and_it_is_replaced():
    async with crew(2) as made:
        proxy = process(made)
        stopped, _ = workers_of(proxy)
        os.kill(stopped, signal.SIGSTOP)
        # Some of these wait at the sockets of the one that is stopped, until the other takes them.
        replies = [await made.post(CHAT, chat(max_tokens=2)) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(made.post(CHAT, chat(max_tokens=2))) for _ in range(20)]
        replies += [task.result() for task in tasks]
        await proxy.wait_for_log("has not answered", within_s=40)
        await until_serving(proxy, 3)

        assert {reply.status for reply in replies} == {200}
        assert stopped not in workers_of(proxy)


@pytest.mark.slow
async def test_the_last_worker_without_a_supervisor_removes_what_they_shared():
    gate = Gate()
    async with crew(2, 2, gate, exit_code=-signal.SIGKILL) as made:
        proxy = process(made)
        pids = workers_of(proxy)
        streams = await begin(made, 4)
        shared = shared_directories()
        os.kill(proxy.pid, signal.SIGKILL)
        await until_answer(lambda: is_refused(made.port))
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20.0)

        assert len(shared) >= 1
        await until(lambda: len(shared_directories() & shared) < len(shared))


def shared_directories() -> set[Path]:
    places = (Path("/dev/shm"), Path("/tmp"))
    return {each for place in places for each in place.glob("pdproxy-*")}


@pytest.mark.slow
async def test_a_worker_that_stands_still_before_it_serves_is_killed_and_replaced():
    launched: list[asyncio.subprocess.Process] = []

    async def launch(row: int) -> Child:
        ours, theirs = socket.socketpair()
        with theirs:
            started = await asyncio.create_subprocess_exec(
                "sleep", "60", pass_fds=[theirs.fileno()]
            )
        launched.append(started)
        return Child(row, started, await connect(ours))

    async def answer(_: object) -> bytes:
        return b""

    dead: list[int] = []
    made = Crew(1, launch, lambda _: None, answer, dead.append, time.monotonic, start_s=0.1)
    running = asyncio.get_running_loop().create_task(made.run())
    await until(lambda: len(launched) == 2, 20.0)
    made.stop(0)
    launched[1].kill()

    assert not await running
    assert launched[0].returncode == -signal.SIGKILL
    assert dead == [0, 0]
