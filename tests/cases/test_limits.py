"""Big bodies, big handles, many streams, few descriptors, and engines that say nothing."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pdproxy.runtime.settings import Settings
from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import behaviours, client
from tests.fakes.answer import Answer, EngineRequest, chunk_bytes, event_bytes
from tests.fakes.behaviours import DONE, Behaviour
from tests.fakes.client import RawClient, Reply, assert_ends_in_error
from tests.fakes.engine import FakeEngine
from tests.fakes.pinger import pinging
from tests.fakes.ports import black_hole, free_port
from tests.fakes.proxy import (
    ProxyProcess,
    instance_args,
    metric,
    proxy_here,
    running_proxy,
    start,
)
from tests.fakes.waiting import until, until_answer
from tests.fakes.wire import PeerGone

HANDLE = "kv_transfer_params"
MEGABYTE = 1_000_000
# What the proxy's own work costs shows in every try; what the machine adds need not, so the best
# of some tries counts.
LONGEST_GAP_S = 0.1
TRIES = 3

JSON_TYPE = ("Content-Type", "application/json")
QUIET_ANSWER = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}


def process_of(stage: Scene) -> ProxyProcess:
    assert isinstance(stage.proxy, ProxyProcess)
    return stage.proxy


def handing(handle: Any) -> Behaviour:
    answer_bytes = json.dumps({"choices": [], HANDLE: handle}).encode()

    async def behaviour(_: EngineRequest, answer: Answer) -> None:
        await answer.whole(200, answer_bytes, [("content-type", "application/json")])

    return behaviour


# --- C66


async def post_big(port: int, body: bytes, framing: str, *, expect: bool) -> Reply:
    """POST a body by its length or in chunks, asking for leave first if `expect`."""
    headers = [JSON_TYPE, ("Host", "proxy.test")]
    headers += [("Expect", "100-continue")] if expect else []
    is_chunked = framing == "chunked"
    headers += [
        ("Transfer-Encoding", "chunked") if is_chunked else ("Content-Length", str(len(body)))
    ]
    head = f"POST {CHAT} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers)
    async with await RawClient.connect(port) as peer:
        await peer.wire.write(head.encode() + b"\r\n")
        if expect:
            assert (await peer.wire.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        if is_chunked:
            body = b"".join(chunk_bytes(body[at : at + 65536]) for at in range(0, len(body), 65536))
            body += b"0\r\n\r\n"
        await peer.wire.write(body)
        return await peer.read_rest(await peer.read_head())


# Big blocks go back to the system when they are freed, so that no hole in the heap is counted.
TIDY_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(MEGABYTE)}


def peak_memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.case("C66")
@pytest.mark.e2e
async def test_twenty_megabyte_body_reaches_both_engines_intact() -> None:
    image = "data:image/png;base64," + "QUJD" * (5 * MEGABYTE)
    content = [{"type": "image_url", "image_url": {"url": image}}]
    body = chat(messages=[{"role": "user", "content": content}], max_tokens=1)
    data = json.dumps(body).encode()
    answers = ([handing({"a": 1})], [behaviours.json_answer(QUIET_ANSWER)])

    async with scene(*answers, process=True, env=TIDY_HEAP) as stage:
        before = peak_memory_bytes(process_of(stage).pid)
        replies: list[Reply] = []
        gaps_s: list[float] = []
        for framing in ("length", "chunked"):
            for expect in (False, True):
                async with pinging(stage.port, process_of(stage).pid) as pings:
                    replies.append(await post_big(stage.port, data, framing, expect=expect))
                gaps_s.append(pings.longest_s)
        growth = peak_memory_bytes(process_of(stage).pid) - before
        await stage.assert_quiescent()

    assert [reply.status for reply in replies] == [200] * 4
    for asked, decoded in zip(stage.p1.calls, stage.d1.calls, strict=True):
        assert asked.json["messages"] == body["messages"]
        assert {k: v for k, v in decoded.json.items() if k != HANDLE} == body
    assert growth <= 5 * len(data)
    assert min(gaps_s) < LONGEST_GAP_S


@pytest.mark.case("C66")
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_over_the_configured_limit_is_a_413(framing: str) -> None:
    data = json.dumps(chat(user="x" * 300_000)).encode()

    async with scene([None], [None], "--max-body-bytes", "200KB") as stage:
        reply = await post_big(stage.port, data, framing, expect=False)
        fine = await stage.post(CHAT, chat(user="x" * 100_000, max_tokens=1))
        await stage.assert_quiescent()

    assert reply.status == 413
    assert reply.error["type"] == "invalid_request_error"
    assert fine.status == 200
    assert (stage.prefill_calls, stage.decode_calls) == (1, 1)


# --- C67


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.case("C67")
@pytest.mark.e2e
@pytest.mark.slow
async def test_a_thousand_streams_are_open_at_one_decoder_at_once() -> None:
    count = 1000
    go_on = asyncio.Event()

    async def hold(_: EngineRequest, answer: Answer) -> None:
        await answer.start_stream()
        await go_on.wait()
        end = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}
        await answer.chunk(event_bytes(end) + DONE)
        await answer.end()

    args = ("--engine-keepalive-timeout", "0.5")
    async with scene([None], [hold], *args, process=True) as stage:
        pid = process_of(stage).pid
        idle_files = open_files(pid)
        asking = [
            asyncio.get_running_loop().create_task(stage.post(CHAT, chat(stream=True)))
            for _ in range(count)
        ]
        await until(lambda: stage.d1.open_answers == count, within_s=30)
        go_on.set()
        replies = await asyncio.gather(*asking)
        await stage.assert_quiescent()
        await until(lambda: open_files(pid) <= idle_files + 8, within_s=10)

    assert {reply.status for reply in replies} == {200}
    assert stage.d1.connections >= count


# --- C68


def with_open_file_limit(soft: int, hard: int) -> list[str]:
    """Return a command that runs pdproxy under these limits."""
    limits = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    return ["/bin/sh", "-c", limits, "sh", sys.executable, "-m", "pdproxy"]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def refusal(peer: RawClient) -> int | None:
    """Return the status a refused client was told; None if it waits or was cut off."""
    if not peer.wire.gone.is_set():
        return None
    try:
        return (await peer.read_head()).status
    except PeerGone:
        return None


@pytest.mark.case("C68")
@pytest.mark.e2e
@pytest.mark.slow
async def test_proxy_without_free_descriptors_stays_alive_and_recovers() -> None:
    command = with_open_file_limit(256, 256)
    body = client.as_json(chat(stream=True))

    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode", behaviours.hang) as d1,
        running_proxy([p1], [d1], command=command) as proxy,
    ):
        peers: list[RawClient] = []
        for _ in range(300):
            with suppress(ConnectionResetError):  # refused before it was noticed to be open
                peers.append(await RawClient.connect(proxy.port))
        for peer in peers:
            with suppress(PeerGone):
                await peer.send_request("POST", CHAT, body, client.JSON_TYPE)
        await d1.wait_for_calls(50)
        before = cpu_s(proxy.pid)
        await asyncio.sleep(1)
        used_s = cpu_s(proxy.pid) - before
        statuses = [status for peer in peers if (status := await refusal(peer)) is not None]
        for peer in peers:
            peer.leave()
        d1.behaviour = behaviours.decode
        await until(lambda: d1.open_answers == 0, within_s=10)
        reply = await client.post(proxy.port, CHAT, chat(max_tokens=2), within_s=10)

    assert used_s < 0.5
    assert set(statuses) == {503}
    assert reply.status == 200


async def is_healthy(port: int) -> bool:
    try:
        return (await client.get(port, "/health")).status == 200
    except OSError:
        return False


@pytest.mark.case("C68")
@pytest.mark.e2e
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_clients_that_wait_for_the_start_do_not_end_it(workers: str) -> None:
    port = free_port()
    argv = [*with_open_file_limit(256, 256), "--port", str(port), "--workers", workers]
    argv += instance_args("prefiller", ["127.0.0.1:1"]) + instance_args("decoder", ["127.0.0.1:1"])
    process = await start(argv)
    peers: list[RawClient] = []

    async def flood() -> None:
        while len(peers) < 300:
            try:
                peers.append(await RawClient.connect(port))
            except ConnectionError:
                await asyncio.sleep(0.001)

    try:
        async with asyncio.timeout(20):
            await flood()
        # Those that find no room are told once the proxy serves.
        await until(lambda: sum(peer.wire.gone.is_set() for peer in peers) > 100, within_s=20)
        for peer in peers:
            peer.leave()
        await until_answer(lambda: is_healthy(port), 20)
        process.terminate()
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 0, output.decode()


@pytest.mark.case("C68")
@pytest.mark.e2e
async def test_soft_limit_of_open_files_is_raised_at_start() -> None:
    command = with_open_file_limit(256, 4096)

    async with running_proxy([], [], command=command, wait_ready=False) as proxy:
        soft_limit, _ = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)

    assert soft_limit == 4096


# --- C69

SHORT = tuple(
    word
    for name in ("connect", "prefill", "first-token", "answer", "idle")
    for word in (f"--{name}-timeout", "0.5")
)


async def head_only(_: EngineRequest, answer: Answer) -> None:
    """Answer a head and not a byte of the body."""
    await answer.start_stream()
    await answer.hang()


async def half_a_body(_: EngineRequest, answer: Answer) -> None:
    await answer.head(200, [("content-type", "application/json"), ("content-length", "1000")])
    await answer.send(b'{"choices": [')
    await answer.hang()


@pytest.mark.case("C69")
def test_default_timeouts_are_bounded() -> None:
    settings = Settings()

    assert settings.connect_timeout <= 10
    for limit_s in (settings.prefill_timeout, settings.first_token_timeout, settings.idle_timeout):
        assert 0 < limit_s <= 3600


@pytest.mark.case("C69")
@pytest.mark.parametrize("silent", [behaviours.hang, half_a_body], ids=["no-head", "no-body"])
async def test_silent_prefiller_is_left_for_another_and_noted(silent: Behaviour) -> None:
    async with scene([silent, None], [None], *SHORT) as stage:
        replies = [await stage.post(CHAT, chat(max_tokens=2)) for _ in range(2)]
        errors = await metric(
            stage.proxy, "pdproxy_upstream_errors_total", instance=stage.p1.address
        )
        await stage.assert_quiescent()

    assert [reply.status for reply in replies] == [200, 200]
    assert stage.p1.calls
    assert all(call.closed_early for call in stage.p1.calls)
    assert errors == len(stage.p1.calls)


@pytest.mark.case("C69")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_silence_of_the_only_engine_is_a_504(role: str, stream: bool) -> None:
    p, d = ([behaviours.hang], [None]) if role == "prefill" else ([None], [behaviours.hang])

    async with scene(p, d, *SHORT, "--max-retries", "1") as stage:
        async with asyncio.timeout(10):
            reply = await stage.post(CHAT, chat(stream=stream))
        await stage.assert_quiescent()

    assert reply.status == 504
    assert reply.error["type"]


@pytest.mark.case("C69")
@pytest.mark.parametrize("silent", [behaviours.hang, head_only], ids=["no-head", "no-event"])
async def test_silent_decoder_is_left_for_another(silent: Behaviour) -> None:
    async with scene([None], [silent, None], *SHORT) as stage:
        replies = [await stage.post(CHAT, chat(max_tokens=2, stream=True)) for _ in range(2)]
        await stage.assert_quiescent()

    for reply in replies:
        client.assert_whole_stream(reply)
        assert "STALE" not in reply.text
    assert stage.d1.calls


@pytest.mark.case("C69")
async def test_decoder_that_falls_silent_mid_stream_ends_it_with_an_error() -> None:
    start = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}

    falls_silent = behaviours.stream([event_bytes(start)], then="hang")

    async with scene([None], [falls_silent], *SHORT, "--continue-lost", "off") as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert reply.text == "x"
    assert_ends_in_error(reply)
    assert stage.d1.only_call.closed_early


LONG = tuple(
    word
    for name in ("connect", "prefill", "first-token", "answer", "idle")
    for word in (f"--{name}-timeout", "60")
)
SILENCES = [
    pytest.param("prefill", behaviours.hang, "prefill", True, id="prefill"),
    pytest.param("prefill", half_a_body, "idle", True, id="within-a-prefill"),
    pytest.param("decode", behaviours.hang, "first-token", True, id="no-head-of-a-stream"),
    pytest.param("decode", head_only, "first-token", True, id="no-event"),
    pytest.param("decode", behaviours.hang, "answer", False, id="no-answer"),
    pytest.param("decode", half_a_body, "idle", False, id="within-an-answer"),
]


@pytest.mark.case("C69")
@pytest.mark.parametrize(("role", "silent", "limit", "stream"), SILENCES)
async def test_each_silence_is_ended_by_its_own_limit_with_a_504(
    role: str, silent: Behaviour, limit: str, stream: bool
) -> None:
    p, d = ([silent], [None]) if role == "prefill" else ([None], [silent])
    args = (*LONG, f"--{limit}-timeout", "0.3", "--max-retries", "1")

    async with scene(p, d, *args) as stage:
        async with asyncio.timeout(20):
            reply = await stage.post(CHAT, chat(stream=stream))
        await stage.assert_quiescent()

    assert reply.status == 504
    assert reply.error["code"] == "upstream_timeout"
    assert reply.error["type"] == "timeout_error"


@pytest.mark.case("C69")
async def test_request_that_waits_too_long_for_its_turn_is_a_429() -> None:
    args = ("--max-in-flight", "1", "--queue-timeout", "0.3")
    async with scene([None], [behaviours.late(2, behaviours.decode)], *args) as stage:
        running = asyncio.get_running_loop().create_task(stage.post(CHAT, chat()))
        await stage.p1.wait_for_calls(1)
        reply = await stage.post(CHAT, chat(stream=True))
        answered = await running

    assert answered.status == 200
    assert reply.status == 429
    assert reply.error["code"] == "queue_timeout"
    assert reply.headers["retry-after"] == "1"


@pytest.mark.case("C69")
async def test_engine_that_swallows_connection_attempts_is_left_for_another() -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        with black_hole() as port:
            instances: list[FakeEngine | str] = [f"127.0.0.1:{port}", p1]
            async with proxy_here(instances, [d1], *SHORT) as proxy:
                replies = [await client.post(proxy.port, CHAT, chat(max_tokens=2)) for _ in "ab"]

    assert [reply.status for reply in replies] == [200, 200]


# --- C45, C70


def big_handle(entries: int) -> dict[str, Any]:
    """Return a handle of some 13 bytes an entry, nested as one group per KV cache group."""
    first, group = 10**10, 1000
    groups = [list(range(at, at + group)) for at in range(first, first + entries, group)]
    unknown = {f"unknown_{number}": [number, None, {"deep": 2**60}] for number in range(30)}
    return {"do_remote_prefill": True, "remote_block_ids": groups, **unknown}


@pytest.mark.case("C45", "C70")
@pytest.mark.e2e
async def test_huge_handle_is_relayed_whole_while_others_go_on() -> None:
    handle = big_handle(620_000)
    answers = ([handing(handle)], [behaviours.json_answer(QUIET_ANSWER)])

    async with scene(*answers, process=True) as stage:
        gaps_s: list[float] = []
        for _ in range(TRIES):
            async with pinging(stage.port, process_of(stage).pid) as pings:
                reply = await stage.post(CHAT, chat())
                assert reply.status == 200
            gaps_s.append(pings.longest_s)
        await stage.assert_quiescent()

    assert len(json.dumps(handle)) > 8 * MEGABYTE
    for call in stage.d1.calls:
        assert call.json == {**chat(), HANDLE: handle}
    assert min(gaps_s) < LONGEST_GAP_S


@pytest.mark.case("C70")
async def test_large_response_head_is_no_reason_to_fail() -> None:
    async def wordy(request: EngineRequest, answer: Answer) -> None:
        headers = [(f"X-Wordy-{number}", "w" * 1000) for number in range(40)]
        body = behaviours.prefill_body(request, request.engine.new_handle())
        await answer.json(body, headers=headers)

    async with scene([wordy]) as stage:
        reply = await stage.post(CHAT, chat(max_tokens=2))
        await stage.assert_quiescent()

    assert reply.status == 200
