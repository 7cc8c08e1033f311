"""Instances that drain, die, hang, come back and are wanted in both roles, under traffic."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import behaviours, client, toy
from tests.fakes.client import Reply, assert_whole_stream
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.proxy import HasPort, metric, proxy_here, running_proxy
from tests.fakes.waiting import until, until_answer

WATCHFUL = (
    *("--probe-interval", "0.05", "--probe-timeout", "0.3", "--eject-time", "0.1"),
    *("--waiting-retry-interval", "0.05", "--slow-start", "0", "--retry-delay", "0"),
)
ROLES = ("prefill", "decode")


async def change(proxy: HasPort, act: str, role: str, address: str, **more: Any) -> Reply:
    body = {"type": role, "instances": address, **more}
    return await client.post(proxy.port, f"/instances/{act}", body)


async def told(proxy: HasPort, address: str, role: str = "decode") -> dict[str, Any]:
    """Return what is told of one instance; nothing if it is not there."""
    listed = (await client.get(proxy.port, "/instances")).json[role]["instances"]
    return next((dict(each) for each in listed if each["instance"] == address), {})


async def until_state(proxy: HasPort, address: str, state: str, role: str = "decode") -> None:
    async def is_there() -> bool:
        return (await told(proxy, address, role)).get("state") == state

    await until_answer(is_there, 20.0)


async def start_stream(stage: Scene, **fields: Any) -> asyncio.Task[Reply]:
    calls = len(stage.d1.calls)
    body = chat(stream=True, **fields)
    running = asyncio.create_task(stage.post(CHAT, body))
    await stage.d1.wait_for_calls(calls + 1)
    return running


def slow(engine: FakeEngine, delay_s: float = 0.05) -> None:
    engine.token_delay_s = delay_s


# --- draining


@pytest.mark.case("C50", "C53")
async def test_removed_and_readded_under_a_stream_it_serves_on() -> None:
    async with scene([None], [None], *WATCHFUL) as stage:
        slow(stage.d1)
        running = await start_stream(stage, max_tokens=12)
        removed = await change(stage.proxy, "remove", "decode", stage.d1.address)
        draining = await told(stage.proxy, stage.d1.address)
        again = await change(stage.proxy, "add", "decode", stage.d1.address)
        slow(stage.d1, 0)
        other = await stage.post(CHAT, chat(max_tokens=2))
        assert_whole_stream(await running)
        await stage.assert_quiescent()
        after = await told(stage.proxy, stage.d1.address)

    assert "isolated" in removed.json["message"]
    assert (draining["state"], draining["requests"]) == ("draining", 1)
    assert again.status == other.status == 200
    assert after["state"] == "active"


@pytest.mark.case("C52")
async def test_drained_instances_get_nothing_new_even_if_nobody_else_is_left() -> None:
    async with scene([None], [None, None], *WATCHFUL) as stage, FakeEngine("decode") as d3:
        for engine in stage.decoders:
            slow(engine)
        streams = [asyncio.create_task(stage.post(CHAT, chat(stream=True, max_tokens=12)))]
        await until(lambda: len(stage.d1.calls) + len(stage.d2.calls) == 1)
        streams += [asyncio.create_task(stage.post(CHAT, chat(stream=True, max_tokens=12)))]
        await until(lambda: len(stage.d1.calls) == len(stage.d2.calls) == 1)
        for engine in stage.decoders:
            await change(stage.proxy, "drain", "decode", engine.address)
        refused = await stage.post(CHAT, chat())
        await change(stage.proxy, "add", "decode", d3.address)
        await until_state(stage.proxy, d3.address, "active")
        served = await stage.post(CHAT, chat())
        for reply in await asyncio.gather(*streams):
            assert_whole_stream(reply)
        await until_state(stage.proxy, stage.d1.address, "gone")

    assert (refused.status, refused.error["code"]) == (503, "no_instance")
    assert served.status == 200
    assert [len(engine.calls) for engine in (stage.d1, stage.d2, d3)] == [1, 1, 1]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_after_the_deadline_a_stream_is_continued_elsewhere(stream: bool) -> None:
    body = chat(stream=stream, max_tokens=20)
    async with scene([None], [None, None], *WATCHFUL) as stage:
        for engine in stage.decoders:
            slow(engine)
            if not stream:
                engine.behaviour = behaviours.late(1.0, behaviours.decode)
        running = asyncio.create_task(stage.post(CHAT, body))
        await until(lambda: len(stage.d1.calls) + len(stage.d2.calls) == 1)
        first, other = (stage.d1, stage.d2) if stage.d1.calls else (stage.d2, stage.d1)
        await change(stage.proxy, "drain", "decode", first.address, deadline_s=0.2)
        reply = await running
        await until_state(stage.proxy, first.address, "gone")
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.text == toy.answer(body, 20)
    assert len([call for call in other.calls if call.path.startswith("/v1/")]) == 1


async def test_after_the_deadline_a_stream_without_another_decoder_ends_with_an_error() -> None:
    async with scene([None], [None], *WATCHFUL) as stage:
        slow(stage.d1)
        running = await start_stream(stage, max_tokens=100)
        await change(stage.proxy, "drain", "decode", stage.d1.address, deadline_s=0.2)
        reply = await running
        ended = await metric(stage.proxy, "pdproxy_requests_total", outcome="engine_error")
        await stage.assert_quiescent()

    assert reply.chunks_of_json[-1]["error"]["code"] == "upstream_drained"
    assert ended == 1


async def test_undrain_lifts_the_deadline() -> None:
    async with scene([None], [None], *WATCHFUL) as stage:
        slow(stage.d1)
        running = await start_stream(stage, max_tokens=12)
        await change(stage.proxy, "drain", "decode", stage.d1.address, deadline_s=0.2)
        back = await change(stage.proxy, "undrain", "decode", stage.d1.address)
        assert_whole_stream(await running)

    assert back.json["results"] == {stage.d1.address: "restored"}
    assert len(stage.d1.calls) == 1


async def test_undrain_of_one_that_has_drained_lets_it_join_again() -> None:
    async with scene([None], [None], *WATCHFUL) as stage:
        gone = await change(stage.proxy, "drain", "decode", stage.d1.address)
        back = await change(stage.proxy, "undrain", "decode", stage.d1.address)
        await until_state(stage.proxy, stage.d1.address, "active")
        stranger = await change(stage.proxy, "undrain", "decode", "198.51.100.1:1")

    assert gone.json["results"] == {stage.d1.address: "gone"}
    assert back.json["results"] == {stage.d1.address: "waiting"}
    assert stranger.json["results"] == {"198.51.100.1:1": "unknown"}


# --- joining


@pytest.mark.case("C54")
async def test_added_one_that_never_comes_is_dropped_visibly() -> None:
    address = f"127.0.0.1:{free_port()}"
    args = (*WATCHFUL, "--max-waiting-retries", "2")
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1], *args) as proxy,
    ):
        await change(proxy, "add", "decode", address)
        await until_state(proxy, address, "gone")
        gone = await told(proxy, address)
        await proxy.wait_for_log("is dropped")

    assert "refused" in gone["last_error"].lower()


@pytest.mark.case("C59")
async def test_one_engine_joins_in_both_roles() -> None:
    async with scene([None], [None], *WATCHFUL) as stage, FakeEngine("decode") as both:
        for role in ROLES:
            await change(stage.proxy, "add", role, both.address)
        for role in ROLES:
            await until_state(stage.proxy, both.address, "active", role)
        await change(stage.proxy, "remove", "prefill", both.address)

        assert (await told(stage.proxy, both.address, "prefill"))["state"] == "gone"
        assert (await told(stage.proxy, both.address))["state"] == "active"


# --- what dies, hangs or returns


@pytest.mark.case("C51")
async def test_probes_leave_load_alone() -> None:
    async with scene([None], [None], *WATCHFUL) as stage:
        slow(stage.d1)
        running = await start_stream(stage, max_tokens=20)
        probes = len(stage.d1.requests)
        seen = []
        while len(stage.d1.requests) < probes + 5:
            seen.append((await told(stage.proxy, stage.d1.address))["requests"])
        assert_whole_stream(await running)

    assert set(seen) == {1}


@pytest.mark.case("C58")
@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_dead_prefiller_is_left_out_and_comes_back(how: str) -> None:
    async with scene([None, None], [None], *WATCHFUL, "--prefill-timeout", "1") as stage:
        if how == "refuses":
            await stage.p1.stop()
        else:
            stage.p1.routes["/health"] = behaviours.hang
            stage.p1.behaviour = behaviours.hang
        await until_state(stage.proxy, stage.p1.address, "ejected", "prefill")
        before = len(stage.p1.calls)
        replies = [await stage.post(CHAT, chat(max_tokens=2)) for _ in range(6)]
        calls = len(stage.p1.calls) - before
        if how == "refuses":
            await stage.p1.start()
        else:
            stage.p1.routes.clear()
            stage.p1.behaviour = behaviours.prefill
        await until_state(stage.proxy, stage.p1.address, "active", "prefill")
        back = await told(stage.proxy, stage.p1.address, "prefill")

    assert {reply.status for reply in replies} == {200}
    assert calls == 0
    assert back["ejections"] >= 1
    assert back["last_error"]


async def test_decoder_whose_health_is_an_error_is_ejected_without_a_request() -> None:
    async with scene([None], [None, None], *WATCHFUL) as stage:
        stage.d1.routes["/health"] = behaviours.error(500)
        await until_state(stage.proxy, stage.d1.address, "ejected")
        one = await told(stage.proxy, stage.d1.address)

    assert one["last_error"] == "/health answered 500"
    assert stage.d1.calls == []


@pytest.mark.case("C60")
async def test_all_decoders_gone_and_back_again() -> None:
    async with scene([None], [None, None], *WATCHFUL) as stage:
        for engine in stage.decoders:
            await engine.stop()
            await until_state(stage.proxy, engine.address, "ejected")
        failed = [await stage.post(CHAT, chat()) for _ in range(3)]
        for engine in stage.decoders:
            await engine.start()
            await until_state(stage.proxy, engine.address, "active")
        served = [await stage.post(CHAT, chat()) for _ in range(4)]

    assert {reply.status for reply in failed} <= {502, 503}
    assert {reply.status for reply in served} == {200}


@pytest.mark.case("C46")
async def test_restarted_prefillers_handle_is_never_sent_twice() -> None:
    kv_failed = behaviours.one_after_another(behaviours.error(500), behaviours.decode)
    async with scene([None, None], [kv_failed, kv_failed], *WATCHFUL) as stage:
        reply = await stage.post(CHAT, chat(max_tokens=3))

    calls = [call.json["kv_transfer_params"] for d in stage.decoders for call in d.calls]
    handles = [params["remote_request_id"] for params in calls]
    assert reply.status in {200, 500}
    assert len(handles) == len(set(handles)) >= 2


async def test_clients_errors_eject_nobody() -> None:
    async with scene([behaviours.error(400)], [None], *WATCHFUL) as stage:
        replies = [await stage.post(CHAT, chat()) for _ in range(6)]
        state = (await told(stage.proxy, stage.p1.address, "prefill"))["state"]

    assert {reply.status for reply in replies} == {400}
    assert state == "active"


async def test_what_an_engine_says_of_itself_is_shown() -> None:
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(in_process(SimConfig()))
        p1 = await stack.enter_async_context(FakeEngine("prefill"))
        address = f"127.0.0.1:{sim.port}"
        proxy = await stack.enter_async_context(proxy_here([p1], [address], *WATCHFUL))

        async def has_said() -> bool:
            return (await told(proxy, address))["engine"] is not None

        await until_answer(has_said, 10.0)
        one = await told(proxy, address)

    assert one["engine"]["capacity_tokens"] == one["capacity_tokens"] > 0
    assert one["engine"]["waiting"] == 0
