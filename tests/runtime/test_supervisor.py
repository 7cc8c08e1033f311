"""Several workers serve as one: through the real command, with real processes that die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cases.scene import CHAT, Scene, chat
from tests.fakes.client import Reply, assert_whole_stream
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import ProxyProcess, instance_args, loads, metric, run_command
from tests.fakes.waiting import until, until_answer
from tests.runtime.crew_scene import (
    Gate,
    begin,
    crew,
    is_refused,
    process,
    until_serving,
    workers_of,
)

pytestmark = pytest.mark.e2e


@pytest.mark.slow
@pytest.mark.case("C79")
async def test_equal_streams_are_spread_evenly_over_decoders_whichever_worker_has_them():
    gate = Gate()
    async with crew(4, 4, gate) as made:
        streams = await begin(made, 80)
        held = [decoder.open_answers for decoder in made.decoders]
        in_flight = (await made.get("/healthcheck")).json["request_num"]
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())

        assert all(18 <= each <= 22 for each in held), held
        assert in_flight == 80
        log = process(made).log_text()
        assert sum(f" w{row} pdproxy.access" in log for row in range(4)) == 4
        assert log.count("listening on 127.0.0.1 port") == 1
        await made.assert_quiescent()


@pytest.mark.slow
async def test_worker_that_is_killed_is_replaced_and_others_notice_nothing():
    gate = Gate()
    async with crew(2, 2, gate) as made:
        proxy = process(made)
        streams = await begin(made, 24)
        victim = workers_of(proxy)[0]
        os.kill(victim, signal.SIGKILL)
        await proxy.wait_for_log("killed by SIGKILL; it is replaced")
        # The sockets of the dead are served at once, and by the one that replaces it later.
        for _ in range(10):
            assert (await made.get("/health")).status == 200
        await until_serving(proxy, 3)
        gate.is_open = True
        replies = [await stream.end() for stream in streams]
        broken = [stream for stream in streams if stream.is_broken]

        assert 0 < len(broken) < 24
        for stream, reply in zip(streams, replies, strict=True):
            if not stream.is_broken:
                assert_whole_stream(reply)
        assert victim not in workers_of(proxy)
        await until_answer(lambda: _is_idle(made))
        assert (await made.post(CHAT, chat(max_tokens=2, stream=True))).status == 200


async def _is_idle(made: Scene) -> bool:
    return not any((await loads(made.proxy)).values())


@pytest.mark.slow
@pytest.mark.case("C80")
async def test_supervisor_that_stands_still_holds_up_no_stream_and_no_request():
    gate = Gate()
    async with crew(2, 2, gate) as made:
        proxy = process(made)
        streams = await begin(made, 8)
        os.kill(proxy.pid, signal.SIGSTOP)
        try:
            stopped_s = time.monotonic()
            more = await begin(made, 8)
            admin = asyncio.get_running_loop().create_task(_remove(made, made.d2))
            await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - stopped_s)))
            assert not admin.done()
        finally:
            os.kill(proxy.pid, signal.SIGCONT)
        assert (await admin).status == 200
        gate.is_open = True
        for stream in (*streams, *more):
            assert_whole_stream(await stream.end())
        # Whatever waited for the supervisor would have waited for a second; a tick is 20 ms, the
        # rest is for a busy machine.
        assert max(stream.largest_gap_s for stream in streams) < 0.6


async def _remove(made: Scene, engine: FakeEngine) -> Reply:
    return await made.post("/instances/remove", {"type": "decode", "instances": [engine.address]})


@pytest.mark.slow
@pytest.mark.case("C80")
async def test_supervisor_that_never_answers_makes_admin_calls_fail_clearly():
    async with crew(2) as made:
        proxy = process(made)
        os.kill(proxy.pid, signal.SIGSTOP)
        try:
            reply = await made.post(
                "/instances/add", {"type": "decode", "instances": ["127.0.0.1:9"]}
            )
        finally:
            os.kill(proxy.pid, signal.SIGCONT)

        assert reply.status == 503
        assert reply.json["error"]["code"] == "supervisor_silent"


@pytest.mark.slow
@pytest.mark.case("C80")
async def test_workers_without_supervisor_finish_their_streams_and_end():
    gate = Gate()
    async with crew(2, 2, gate, exit_code=-signal.SIGKILL) as made:
        proxy = process(made)
        pids = workers_of(proxy)
        streams = await begin(made, 8)
        os.kill(proxy.pid, signal.SIGKILL)
        await until_answer(lambda: is_refused(made.port))
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20.0)
    assert "the supervisor is gone" in proxy.log_text()


@pytest.mark.slow
async def test_streams_end_within_the_grace_when_the_proxy_stops():
    gate = Gate()
    async with crew(2, 2, gate) as made:
        proxy = process(made)
        streams = await begin(made, 8)
        proxy.process.send_signal(signal.SIGTERM)
        await until_answer(lambda: is_refused(made.port))
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())

        assert await proxy.process.wait() == 0
        assert proxy.log_text().count("stopping; 8 requests in flight") == 1


@pytest.mark.slow
async def test_worker_that_is_told_to_end_finishes_its_streams_and_is_replaced():
    gate = Gate()
    async with crew(2, 2, gate) as made:
        proxy = process(made)
        streams = await begin(made, 8)
        os.kill(workers_of(proxy)[1], signal.SIGTERM)
        for _ in range(10):
            assert (await made.get("/health")).status == 200
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())
        await until_serving(proxy, 3)
        assert "exit code 0; it is replaced" in proxy.log_text()


@pytest.mark.slow
async def test_each_worker_answers_calls_alike_and_metrics_are_sums():
    async with crew(3, 2) as made:
        proxy = process(made)
        for _ in range(30):
            assert (await made.post(CHAT, chat(max_tokens=2))).status == 200
        await until_answer(lambda: _has_served(proxy, 30))
        os.kill(workers_of(proxy)[0], signal.SIGKILL)
        await until_serving(proxy, 4)
        for _ in range(10):
            assert (await made.post(CHAT, chat(max_tokens=2))).status == 200
        await until_answer(lambda: _has_served(proxy, 40))
        for _ in range(8):
            assert await _has_served(proxy, 40)
            for engine in (*made.prefillers, *made.decoders):
                served = await metric(
                    proxy, "pdproxy_upstream_requests_total", instance=engine.address
                )
                assert served == len(engine.calls)
        assert await metric(proxy, "process_open_fds") > 20

        assert (await _remove(made, made.d2)).status == 200
        for _ in range(8):
            await until_answer(lambda: _has_decoders(made, 1))
            assert await metric(proxy, "pdproxy_instance_up", instance=made.d2.address) == 0
            assert (
                await metric(proxy, "pdproxy_upstream_requests_total", instance=made.d2.address)
                == 0
            )
        calls = len(made.d2.calls)
        for _ in range(8):
            assert (await made.post(CHAT, chat(max_tokens=2))).status == 200
        assert len(made.d2.calls) == calls


@pytest.mark.slow
async def test_each_worker_shows_the_requests_of_all():
    gate = Gate()
    async with crew(2, 2, gate) as made:
        streams = await begin(made, 8)
        for _ in range(6):
            reply = await made.get("/debug/requests")
            assert [each["stage"] for each in reply.json["requests"]] == ["decode"] * 8
            assert (await made.get("/healthcheck")).json["request_num"] == 8
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())
        await until_answer(lambda: _shows_none(made))


@pytest.mark.slow
async def test_each_worker_tells_the_time_that_a_drain_has_left():
    gate = Gate()
    async with crew(2, 2, gate) as made:
        streams = await begin(made, 4)
        body = {"type": "decode", "instances": made.d1.address, "deadline_s": 600}
        assert (await made.post("/instances/drain", body)).status == 200
        for _ in range(6):
            told = (await made.get("/instances")).json["decode"]["instances"]
            left_s = {each["instance"]: each["deadline_left_s"] for each in told}
            assert 500 < left_s[made.d1.address] <= 600
            assert left_s[made.d2.address] is None
        gate.is_open = True
        for stream in streams:
            assert_whole_stream(await stream.end())


@pytest.mark.slow
async def test_each_worker_shows_the_history_of_all():
    async with crew(2, 2) as made:
        for _ in range(20):
            assert (await made.post(CHAT, chat(max_tokens=2))).status == 200
        assert (await made.post(CHAT, chat(messages=7))).status >= 400
        for _ in range(6):
            told = (await made.get("/dashboard/data")).json
            assert told["window"]["requests"] == 21
            assert told["window"]["outcomes"]["success"] == 20
            assert len(told["failures"]) == 21 - 20
            assert [each["state"] for each in told["instances"]] == ["active"] * 3


async def _shows_none(made: Scene) -> bool:
    return bool((await made.get("/debug/requests")).json == {"requests": []})


async def _has_served(proxy: ProxyProcess, count: int) -> bool:
    return await metric(proxy, "pdproxy_requests_total", outcome="success") == count


async def _has_decoders(made: Scene, count: int) -> bool:
    return bool((await made.get("/healthcheck")).json["decode_instances"] == count)


@pytest.mark.slow
async def test_instance_that_fails_in_one_worker_is_left_out_by_all():
    async with crew(3, 2) as made:
        await made.d2.stop()
        for _ in range(12):
            assert (await made.post(CHAT, chat(max_tokens=2))).status == 200
        ready = [(await made.get("/ready")).json for _ in range(8)]

        assert {each["available_decode_instances"] for each in ready} == {1}
        assert {each["status"] for each in ready} == {"ready"}


async def test_second_proxy_on_the_same_port_is_refused():
    async with crew(2) as made:
        args = ["--host", "127.0.0.1", "--port", str(made.port), "--workers", "2"]
        code, output = await run_command(*args, *instance_args("decoder", ["127.0.0.1:9"]))

        assert code == 2
        assert "in use" in output


async def test_secrets_are_not_on_the_command_lines_of_workers():
    async with crew(2, 1, None, "--admin-token", "hidden-token") as made:
        pids = workers_of(process(made))
        lines = [_command_of(pid) for pid in pids]

        assert not any("hidden" in line for line in lines)
        assert (await made.post("/instances/add", {})).status == 401


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
