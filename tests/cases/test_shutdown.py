"""The end of the proxy: who may finish, who is told, and how long it takes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.cases.scene import CHAT, chat
from tests.fakes import behaviours, client
from tests.fakes.client import DONE, RawClient, Reply
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.proxy import ProxyProcess, metric, running_proxy
from tests.fakes.waiting import until, until_answer

pytestmark = [pytest.mark.e2e]

# Exit within a second of the cut; more only since the tests' machine may be busy.
EXIT_S = 3.0
LONG = {"stream": True, "max_tokens": 2000}


@asynccontextmanager
async def streaming(
    *args: str, exit_code: int, token_delay_s: float = 0.05
) -> AsyncIterator[tuple[ProxyProcess, FakeEngine, RawClient, Reply]]:
    """A proxy with one stream in the middle of its answer."""
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1], *args, exit_code=exit_code) as proxy,
        await RawClient.connect(proxy.port) as peer,
    ):
        d1.token_delay_s = token_delay_s
        await peer.send_request("POST", CHAT, client.as_json(chat(**LONG)), client.JSON_TYPE)
        reply = await peer.read_head()
        await peer.read_event(reply)
        yield proxy, d1, peer, reply


async def answer_of(peer: RawClient, within_s: float) -> Reply:
    return await peer.read_rest(await peer.read_head(within_s), within_s)


async def ended(proxy: ProxyProcess, within_s: float) -> float:
    """Wait for the process to end; return how many seconds that took."""
    started = time.monotonic()
    async with asyncio.timeout(within_s):
        await proxy.process.wait()
    return time.monotonic() - started


@pytest.mark.case("C81")
async def test_a_stream_beyond_the_grace_is_told_and_cut() -> None:
    async with streaming("--shutdown-grace", "1", exit_code=1) as (proxy, d1, peer, reply):
        proxy.process.send_signal(signal.SIGTERM)
        await peer.read_rest(reply, 1 + EXIT_S)
        took_s = await ended(proxy, EXIT_S)
        await until(lambda: d1.open_answers == 0)

    *earlier, last = reply.chunks_of_json
    assert (reply.status, reply.ended) == (200, True)
    assert last["error"]["code"] == "shutting_down"
    assert DONE not in reply.events
    assert not any(c.get("finish_reason") for event in earlier for c in event["choices"])
    assert took_s < EXIT_S


@pytest.mark.case("C81")
async def test_a_second_signal_cuts_at_once() -> None:
    async with streaming("--shutdown-grace", "60", exit_code=1) as (proxy, _, peer, reply):
        proxy.process.send_signal(signal.SIGINT)
        await proxy.wait_for_log("may end within")
        is_running = proxy.process.returncode is None
        proxy.process.send_signal(signal.SIGINT)
        await peer.read_rest(reply, EXIT_S)
        await ended(proxy, EXIT_S)

    assert is_running
    assert reply.chunks_of_json[-1]["error"]["code"] == "shutting_down"


@pytest.mark.case("C81")
async def test_a_request_without_output_is_refused_when_the_grace_is_over() -> None:
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode", behaviours.hang) as d1,
        running_proxy([p1], [d1], "--shutdown-grace", "0.5", exit_code=1) as proxy,
        await RawClient.connect(proxy.port) as peer,
    ):
        body = client.as_json(chat())
        await peer.send_request("POST", CHAT, body, client.JSON_TYPE)
        await d1.wait_for_calls(1)
        proxy.process.send_signal(signal.SIGTERM)
        reply = await answer_of(peer, EXIT_S)
        await ended(proxy, EXIT_S)

    assert reply.status == 503
    assert reply.error["code"] == "shutting_down"
    assert "retry-after" in reply.headers


@pytest.mark.case("C81")
async def test_a_stream_within_the_grace_ends_whole() -> None:
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1], "--shutdown-grace", "20") as proxy,
        await RawClient.connect(proxy.port) as peer,
    ):
        d1.token_delay_s = 0.05
        body = client.as_json(chat(stream=True, max_tokens=20))
        await peer.send_request("POST", CHAT, body, client.JSON_TYPE)
        await until(lambda: d1.open_answers == 1)
        proxy.process.send_signal(signal.SIGTERM)
        reply = await answer_of(peer, 10)
        await ended(proxy, EXIT_S)

    assert reply.events[-1] == DONE


@pytest.mark.case("C81")
async def test_idle_clients_do_not_delay_the_end() -> None:
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1], "--shutdown-grace", "60") as proxy,
        await RawClient.connect(proxy.port) as idle,
        await RawClient.connect(proxy.port),
    ):
        await idle.send_request("GET", "/health")
        await answer_of(idle, EXIT_S)
        proxy.process.send_signal(signal.SIGTERM)
        await ended(proxy, EXIT_S)


@pytest.mark.case("C81")
async def test_a_body_that_is_on_its_way_may_still_come() -> None:
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1], "--shutdown-grace", "20") as proxy,
        await RawClient.connect(proxy.port) as peer,
    ):
        whole = client.request_bytes(
            "POST", CHAT, client.as_json(chat(max_tokens=2)), client.JSON_TYPE
        )
        await peer.wire.write(whole[:-10])
        await until_in_flight(proxy, 1)
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.wait_for_log("may end within")
        await peer.wire.write(whole[-10:])
        reply = await answer_of(peer, EXIT_S)
        await ended(proxy, EXIT_S)

    assert reply.status == 200


@pytest.mark.case("C81")
async def test_an_idle_connection_closes_when_no_more_are_accepted() -> None:
    async with (
        streaming("--shutdown-grace", "60", exit_code=1) as (proxy, _, _, _),
        await RawClient.connect(proxy.port) as idle,
    ):
        await idle.send_request("GET", "/health")
        await answer_of(idle, EXIT_S)
        proxy.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(idle.wire.gone.wait(), EXIT_S)
        is_running = proxy.process.returncode is None
        proxy.process.send_signal(signal.SIGTERM)
        await ended(proxy, EXIT_S)

    assert is_running


async def until_in_flight(proxy: ProxyProcess, count: int) -> None:
    async def is_so() -> bool:
        return await metric(proxy, "pdproxy_requests_in_flight") == count

    await until_answer(is_so)


@pytest.mark.case("C82")
async def test_readiness_ends_before_the_listener_does() -> None:
    args = ("--shutdown-delay", "30", "--shutdown-grace", "20")
    async with streaming(*args, exit_code=1) as (proxy, _, peer, reply):
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.wait_for_log("not ready")
        ready = await client.get(proxy.port, "/ready")
        health = await client.get(proxy.port, "/health")
        shown = (await client.get(proxy.port, "/healthcheck")).json["request_num"]
        counted = await metric(proxy, "pdproxy_requests_in_flight")
        late = await client.post(proxy.port, CHAT, chat(max_tokens=1))
        late_stream = await client.post(proxy.port, CHAT, chat(max_tokens=1, stream=True))
        refused = await client.post(proxy.port, CHAT, b"{")
        unknown = await client.get(proxy.port, "/unknown")
        proxy.process.send_signal(signal.SIGTERM)
        await peer.read_rest(reply, EXIT_S)
        await ended(proxy, EXIT_S)

    assert (ready.status, ready.json["stopping"]) == (503, True)
    assert (health.status, shown, counted) == (200, 1, 1)
    assert [r.status for r in (late, late_stream, refused, unknown)] == [200, 200, 400, 404]
    for each in (ready, health, late, late_stream, refused, unknown):
        assert each.headers["connection"] == "close"
    assert "connection" not in reply.headers


@pytest.mark.case("C82")
async def test_without_a_delay_nothing_but_the_port_for_metrics_is_answered_any_more() -> None:
    port = free_port()
    args = ("--shutdown-grace", "60", "--metrics-port", str(port))
    async with streaming(*args, exit_code=1) as (proxy, _, peer, reply):
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.wait_for_log("may end within")
        with pytest.raises(ConnectionRefusedError):
            await client.get(proxy.port, "/ready")
        health = await client.get(port, "/health")
        page = await client.get(port, "/metrics")
        proxy.process.send_signal(signal.SIGTERM)
        await peer.read_rest(reply, EXIT_S)
        await ended(proxy, EXIT_S)

    assert health.status == 200
    assert b"\npdproxy_requests_in_flight{" in page.body
