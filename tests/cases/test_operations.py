"""Health tells the truth, models come from an engine, unknown paths are plain errors."""

from __future__ import annotations

import asyncio
import signal
import statistics

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, Scene, chat, scene
from tests.fakes import behaviours, client
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.client import RawClient, Reply
from tests.fakes.engine import FakeEngine
from tests.fakes.pinger import pinging
from tests.fakes.proxy import ProxyProcess, assert_quiescent, metric, proxy_here, running_proxy
from tests.fakes.waiting import until, until_answer
from tests.fakes.wire import PeerGone

# --- C76


@pytest.mark.case("C76")
async def test_healthcheck_keeps_the_keys_that_scripts_read() -> None:
    async with scene([None, None], [None]) as stage:
        stage.d1.behaviour = behaviours.hang
        async with await RawClient.connect(stage.port) as peer:
            await peer.send_request("POST", CHAT, client.as_json(chat()), client.JSON_TYPE)
            await stage.d1.wait_for_calls(1)
            busy = await stage.get("/healthcheck")
        await stage.assert_quiescent()
        idle = await stage.get("/healthcheck")

    assert busy.status == idle.status == 200
    counts = {"prefill_instances": 2, "decode_instances": 1}
    assert busy.json == {"status": "ok", **counts, "request_num": 1}
    assert idle.json == {"status": "ok", **counts, "request_num": 0}


@pytest.mark.case("C76")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_not_ready_without_a_usable_instance_of_a_role_but_alive(role: str) -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        p, d = ([], [d1]) if role == "prefill" else ([p1], [])
        async with proxy_here(p, d, wait_ready=False) as proxy:
            await until(lambda: (d1 if role == "prefill" else p1).requests, within_s=5)
            ready = await client.get(proxy.port, "/ready")
            health = await client.get(proxy.port, "/healthcheck")

    assert ready.status == 503
    assert health.status == 200


@pytest.mark.case("C76")
async def test_removing_the_last_decoder_ends_readiness() -> None:
    async with scene() as stage:
        before = (await stage.get("/ready")).status
        await stage.post("/instances/remove", {"type": "decode", "instances": stage.d1.address})
        after = (await stage.get("/ready")).status

    assert (before, after) == (200, 503)


# --- C76: engines that die and come back

DIES = [
    pytest.param("prefill", (), id="prefiller"),
    pytest.param("decode", (), id="decoder"),
    pytest.param("decode", ("--workers", "2"), id="decoder-of-two-workers"),
]


@pytest.mark.case("C76")
@pytest.mark.e2e
@pytest.mark.parametrize(("role", "args"), DIES)
async def test_not_ready_from_the_death_of_a_last_engine_until_it_is_back(
    role: str, args: tuple[str, ...]
) -> None:
    flags = ("--probe-interval", "0.1", "--slow-start", "0", *args)
    async with scene([None], [None], *flags, process=True) as stage:
        before = await availability(stage, role)
        engine = stage.p1 if role == "prefill" else stage.d1
        await engine.stop()
        await until_answer(lambda: has_status(stage, 503), within_s=10)
        during = await availability(stage, role)
        failed = await stage.post(CHAT, chat(max_tokens=2))
        await engine.start()
        await until_answer(lambda: has_status(stage, 200), within_s=10)
        after = await availability(stage, role)
        served = await stage.post(CHAT, chat(max_tokens=2))

    assert (before, during, after) == ((1, 1, 1), (0, 0, 0), (1, 1, 1))
    assert (failed.status, failed.error["code"]) == (502, "upstream_unreachable")
    assert served.status == 200


@pytest.mark.case("C76")
async def test_refused_request_ends_readiness_and_the_next_tries_the_engine_all_the_same() -> None:
    async with scene([None], [None], "--probe-interval", "60", "--retry-delay", "0.01") as stage:
        await stage.d1.stop()
        failed = await stage.post(CHAT, chat(max_tokens=2))
        ready = await stage.get("/ready")
        await stage.d1.start()
        served = await stage.post(CHAT, chat(max_tokens=2))

    assert (failed.status, ready.status, served.status) == (502, 503, 200)
    assert ready.json["available_decode_instances"] == 0


async def availability(stage: Scene, role: str) -> tuple[float, float, float]:
    """Return how many of a role can serve, in each place that tells."""
    return (
        (await stage.get("/ready")).json[f"available_{role}_instances"],
        (await stage.get("/instances")).json[role]["available"],
        await metric(stage.proxy, "pdproxy_instances_available", role=role),
    )


async def has_status(stage: Scene, status: int) -> bool:
    return (await stage.get("/ready")).status == status


@pytest.mark.case("C76")
@pytest.mark.e2e
async def test_not_ready_while_it_drains() -> None:
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode", behaviours.hang) as d1,
        running_proxy([p1], [d1], "--shutdown-grace", "5") as proxy,
        await RawClient.connect(proxy.port) as peer,
    ):
        await peer.send_request("POST", CHAT, client.as_json(chat()), client.JSON_TYPE)
        await d1.wait_for_calls(1)
        proxy.process.send_signal(signal.SIGTERM)
        await until_answer(lambda: is_refused(proxy), within_s=4)
        is_running = proxy.process.returncode is None

    assert is_running, "it left before its request was done"


async def is_refused(proxy: ProxyProcess) -> bool:
    """Tell whether a balancer is told to stay away, by a status or by a closed listener."""
    try:
        return (await client.get(proxy.port, "/ready")).status == 503
    except (OSError, PeerGone):
        return True


@pytest.mark.case("C76")
@pytest.mark.e2e
@pytest.mark.slow
async def test_healthcheck_answers_at_once_while_streams_run() -> None:
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1]) as proxy,
    ):
        d1.token_delay_s = 0.2
        body = client.as_json(chat(stream=True, max_tokens=1000))
        peers = [await RawClient.connect(proxy.port) for _ in range(200)]
        for peer in peers:
            await peer.send_request("POST", CHAT, body, client.JSON_TYPE)
        await until(lambda: d1.open_answers == len(peers), within_s=20)
        async with pinging(proxy.port, proxy.pid) as pings:
            await asyncio.sleep(1)
        for peer in peers:
            peer.leave()
        await assert_quiescent(proxy, p1, d1, within_s=10)

    assert statistics.median(pings.answer_s) < 0.05


@pytest.mark.case("C76")
async def test_health_needs_no_key_and_shows_none() -> None:
    async with scene([None], [None], "--api-key", "KEY-XYZ", "--admin-token", "KEY-XYZ") as stage:
        replies = [await stage.get(path) for path in ("/healthcheck", "/ready", "/metrics")]
        refused = await stage.post(CHAT, chat())

    assert [reply.status for reply in replies] == [200, 200, 200]
    assert not any(b"KEY-XYZ" in reply.body for reply in replies)
    assert refused.status == 401


# --- C77

CARD = {
    "id": "m",
    "object": "model",
    "root": "/models/m",
    "max_model_len": 131072,
    "permission": [{"id": "modelperm-1", "group": None}],
    "next_years_key": 1.0,
}
MODELS = {"object": "list", "data": [CARD]}


@pytest.mark.case("C77")
async def test_models_are_an_engines_own_list() -> None:
    async with scene() as stage:
        for engine in (stage.p1, stage.d1):
            engine.routes["/v1/models"] = behaviours.json_answer(MODELS)
        reply = await stage.get("/v1/models")

    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json == MODELS


@pytest.mark.case("C77")
@pytest.mark.parametrize("how", ["dead", "silent", "broken"])
async def test_models_come_from_the_next_engine_when_one_fails(how: str) -> None:
    async with scene([None, None], [None], "--models-timeout", "0.4") as stage:
        for engine in (stage.p2, stage.d1):
            engine.routes["/v1/models"] = behaviours.json_answer(MODELS)
        if how == "dead":
            await stage.p1.stop()
        elif how == "silent":
            stage.p1.routes["/v1/models"] = behaviours.hang
        else:
            stage.p1.routes["/v1/models"] = behaviours.error(500)
        async with asyncio.timeout(5):
            reply = await stage.get("/v1/models")

    assert reply.status == 200
    assert reply.json == MODELS


@pytest.mark.case("C77")
async def test_wrong_key_for_the_models_is_a_401() -> None:
    refuse = behaviours.error(401, "wrong key")

    async with scene() as stage:
        for engine in (stage.p1, stage.d1):
            engine.routes["/v1/models"] = refuse
        reply = await stage.get("/v1/models", [("Authorization", "Bearer no")])

    assert reply.status == 401
    assert reply.json == behaviours.error_body("wrong key", 401)


@pytest.mark.case("C77")
async def test_models_are_a_503_when_all_engines_are_down_or_none_is_known() -> None:
    async with scene() as stage:
        await stage.p1.stop()
        await stage.d1.stop()
        down = await stage.get("/v1/models")
    async with proxy_here([], [], wait_ready=False) as proxy:
        unknown = await client.get(proxy.port, "/v1/models")

    for reply in (down, unknown):
        assert reply.status == 503
        assert reply.error["message"]


@pytest.mark.case("C77")
async def test_models_are_listed_while_the_instances_drain() -> None:
    async with scene() as stage:
        stage.d1.behaviour = behaviours.hang
        async with await RawClient.connect(stage.port) as peer:
            await peer.send_request("POST", CHAT, client.as_json(chat()), client.JSON_TYPE)
            await stage.d1.wait_for_calls(1)
            for role, engine in (("prefill", stage.p1), ("decode", stage.d1)):
                change = {"type": role, "instances": engine.address}
                await stage.post("/instances/remove", change)
            reply = await stage.get("/v1/models")

    assert reply.status == 200


# --- C78

UNKNOWN = [
    ("GET", "/"),
    ("GET", "/nothing"),
    ("POST", "/nothing"),
    ("GET", "/docs"),
    ("POST", "/start_profile"),
    ("POST", "/sleep"),
    ("GET", "/%2e%2e/etc/passwd"),
    ("DELETE", "/nothing"),
    ("HEAD", "/nothing"),
    ("OPTIONS", "/nothing"),
]
WRONG_METHOD = [
    ("GET", CHAT, "POST"),
    ("PUT", CHAT, "POST"),
    ("DELETE", COMPLETIONS, "POST"),
    ("OPTIONS", CHAT, "POST"),
    ("POST", "/healthcheck", "GET"),
    ("POST", "/v1/models", "GET"),
    ("GET", "/instances/add", "POST"),
    ("PATCH", "/metrics", "GET"),
]


def service_calls_only(stage: Scene) -> bool:
    return not stage.prefill_calls and not stage.decode_calls


@pytest.mark.case("C78")
@pytest.mark.parametrize(("method", "path"), UNKNOWN)
async def test_unknown_path_is_a_404_that_no_engine_hears_of(method: str, path: str) -> None:
    async with scene() as stage:
        reply = await client.ask(stage.port, method, path)

    assert reply.status == 404
    if method != "HEAD":
        assert reply.error["message"]
    assert service_calls_only(stage)


@pytest.mark.case("C78")
@pytest.mark.parametrize(("method", "path", "allowed"), WRONG_METHOD)
async def test_wrong_method_is_a_405_that_names_the_right_one(
    method: str, path: str, allowed: str
) -> None:
    async with scene() as stage:
        reply = await client.ask(stage.port, method, path)

    assert reply.status == 405
    assert allowed in reply.headers["allow"].split(", ")
    assert reply.error["message"]
    assert service_calls_only(stage)


@pytest.mark.case("C78")
@pytest.mark.parametrize("path", ["/healthcheck", "/health", "/ready", "/metrics", "/v1/models"])
async def test_head_is_answered_wherever_get_is(path: str) -> None:
    async with scene() as stage, await RawClient.connect(stage.port) as peer:
        reply = await peer.ask("HEAD", path)
        after = await peer.ask("GET", "/healthcheck")

    assert reply.status == 200
    assert after.status == 200


@pytest.mark.case("C78")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_trailing_slash_is_the_same_path_or_none(path: str) -> None:
    async with scene() as stage:
        reply = await stage.post(f"{path}/", {**chat(max_tokens=1), "prompt": "x"})

    assert reply.status in {200, 404}
    if reply.status == 404:
        assert reply.error["message"]
        assert service_calls_only(stage)
    else:
        assert (stage.prefill_calls, stage.decode_calls) == (1, 1)


@pytest.mark.case("C78")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
async def test_other_paths_of_an_engine_are_passed_to_one(path: str) -> None:
    async def echo(request: EngineRequest, answer: Answer) -> None:
        await answer.json({"path": request.path, "got": request.json})

    async with scene() as stage:
        for engine in (stage.p1, stage.d1):
            engine.routes[path] = echo
        reply: Reply = await stage.post(path, {"model": "toy", "input": "x"})
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.json == {"path": path, "got": {"model": "toy", "input": "x"}}
    assert stage.prefill_calls + stage.decode_calls == 1
