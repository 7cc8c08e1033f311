"""Health, readiness, version, metrics and the list of models."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

import pdproxy
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost
from pdproxy.server.app import build_app
from tests.fakes import behaviours
from tests.fakes.client import get
from tests.server.stage import listening, server

MODELS = "/v1/models"


@asynccontextmanager
async def application(**options):
    async with server(**options) as made, listening(build_app(made.context)) as port:
        made.port = port
        yield made


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_proxy_is_alive_whatever_its_engines_do(path):
    async with application(p=[], d=[]) as made:
        reply = await get(made.port, path)

    assert (reply.status, reply.json) == (200, {"status": "ok"})


async def test_version_is_the_packages():
    async with application() as made:
        assert (await get(made.port, "/version")).json == {"version": pdproxy.__version__}


async def test_metrics_have_their_type():
    async with application() as made:
        reply = await get(made.port, "/metrics")

    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.body == b"# metrics\n"


@pytest.mark.case("C76")
@pytest.mark.parametrize(
    ("p", "d", "is_stopping", "status"),
    [
        pytest.param([None], [None], False, 200, id="ready"),
        pytest.param([], [None], False, 503, id="no-prefiller"),
        pytest.param([None], [], False, 503, id="no-decoder"),
        pytest.param([None], [None], True, 503, id="stopping"),
    ],
)
async def test_readiness_needs_both_roles_and_no_end_in_sight(p, d, is_stopping, status):
    async with application(p=p, d=d) as made:
        if is_stopping:
            made.context.shutdown.begin()
        reply = await get(made.port, "/ready")

    assert reply.status == status
    assert reply.json == {
        "status": "ready" if status == 200 else "not ready",
        "stopping": is_stopping,
        "available_prefill_instances": len(p),
        "available_decode_instances": len(d),
    }


@pytest.mark.case("C76")
@pytest.mark.parametrize("role", Role)
async def test_not_ready_while_all_of_a_role_are_known_to_be_dead(role):
    async with application() as made:
        fleet = made.context.tools.fleet
        fleet.report_failure(fleet.instances(role)[0], certain=True)
        reply = await get(made.port, "/ready")

    assert reply.status == 503
    assert reply.json[f"available_{role.value}_instances"] == 0


@pytest.mark.case("C76")
async def test_decoders_alone_are_ready_if_they_may_serve_alone():
    async with application(decode_alone=True) as made:
        fleet = made.context.tools.fleet
        fleet.report_failure(fleet.instances(Role.PREFILL)[0], certain=True)
        reply = await get(made.port, "/ready")

    assert reply.status == 200


@pytest.mark.case("C76")
async def test_healthcheck_has_the_examples_form():
    async with application(p=[None, None]) as made:
        made.roster.is_slow = True
        await made.roster.add(Role.DECODE, Endpoint("h", 1))
        made.requests.started.append("x")
        reply = await get(made.port, "/healthcheck")

    assert reply.json == {
        "status": "ok",
        "prefill_instances": 2,
        "decode_instances": 1,
        "request_num": 1,
    }


# --- models


@pytest.mark.case("C77")
async def test_list_of_an_engine_passes_unchanged():
    async with application() as made:
        reply = await get(made.port, MODELS, [("Authorization", "Bearer user")])

        assert reply.json["data"][0]["max_model_len"] == 4096
        (asked,) = made.play.p[0].requests
        assert asked.headers["authorization"] == "Bearer user"
        assert made.play.d[0].requests == []


@pytest.mark.case("C77")
async def test_list_is_kept_briefly_for_each_key():
    async with application() as made:
        for key in ("a", "a", "b", "a"):
            await get(made.port, MODELS, [("Authorization", f"Bearer {key}")])

        assert len(made.play.p[0].requests) == 2


async def test_list_is_asked_for_each_time_if_it_shall_not_be_kept():
    async with application(rules={"models_cache_s": 0}) as made:
        for _ in range(2):
            await get(made.port, MODELS)

        assert len(made.play.p[0].requests) == 2


@pytest.mark.case("C77")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(behaviours.close, id="closed"),
        pytest.param(behaviours.hang, id="silent"),
        pytest.param(behaviours.error(500), id="500"),
        pytest.param(behaviours.error(404), id="404"),
    ],
)
async def test_next_engine_is_asked_when_one_fails(wrong):
    async with application(rules={"models_s": 1.0}) as made:
        made.play.p[0].routes[MODELS] = wrong
        reply = await get(made.port, MODELS)

        assert reply.status == 200
        assert len(made.play.d[0].requests) == 1


@pytest.mark.case("C77")
async def test_engines_answer_to_a_wrong_key_passes_and_is_not_kept():
    async with application() as made:
        made.play.p[0].routes[MODELS] = behaviours.error(401, "no key")
        replies = [await get(made.port, MODELS) for _ in range(2)]

        assert [reply.status for reply in replies] == [401, 401]
        assert replies[0].error["message"] == "no key"
        assert len(made.play.p[0].requests) == 2
        assert made.play.d[0].requests == []


@pytest.mark.case("C77")
async def test_nobody_answering_is_a_503():
    async with application() as made:
        for engine in (made.play.p[0], made.play.d[0]):
            await engine.stop()
        down = await get(made.port, MODELS)

    async with application(p=[], d=[]) as made:
        none = await get(made.port, MODELS)

    assert [reply.status for reply in (down, none)] == [503, 503]
    assert {reply.error["code"] for reply in (down, none)} == {"no_instance"}


@pytest.mark.case("C77")
async def test_draining_engines_still_tell_their_models():
    async with application(p=[], d=[None]) as made:
        fleet = made.play.fleet
        with fleet.lease(Role.DECODE, Cost()):
            fleet.set_state(made.play.instance(made.play.d[0]), State.DRAINING)

            assert (await get(made.port, MODELS)).status == 200


async def test_keys_of_strangers_do_not_fill_the_memory():
    async with application() as made:
        for number in range(70):
            await get(made.port, MODELS, [("Authorization", f"Bearer {number}")])
        before = len(made.play.p[0].requests)
        await get(made.port, MODELS, [("Authorization", "Bearer 69")])

        assert before == 70
        assert len(made.play.p[0].requests) == before
