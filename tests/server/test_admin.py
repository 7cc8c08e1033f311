"""Administration: who may, what is refused whole, and what each call changes."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import orjson
import pytest

from pdproxy.core.instance import Role, State
from pdproxy.core.load import Cost
from pdproxy.server.app import build_app
from tests.fakes import behaviours
from tests.fakes.client import ask, post
from tests.fakes.ports import refusing_port
from tests.server.stage import listening, server

ADD, REMOVE, RESET = "/instances/add", "/instances/remove", "/reset_prefix_cache"
TOKEN = {"admin_token": "t0ken"}
GOOD = ("Authorization", "Bearer t0ken")


@asynccontextmanager
async def admin(**options):
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(server(**options))
        made.port = await stack.enter_async_context(listening(build_app(made.context)))
        yield made


def listed(made):
    return {
        role: [i.label for i in made.play.fleet.instances(role)]
        for role in (Role.PREFILL, Role.DECODE)
    }


# --- who may


@pytest.mark.case("C88")
@pytest.mark.parametrize("path", [ADD, REMOVE, RESET])
async def test_with_a_token_only_its_holder_may(path):
    async with admin(rules=TOKEN) as made:
        before = listed(made)
        body = {"type": "decode", "instances": "h:1"}
        refused = [
            await post(made.port, path, body, headers)
            for headers in ([], [("Authorization", "Bearer wrong")], [("Authorization", "t0ken")])
        ]

        assert [reply.status for reply in refused] == [401] * 3
        assert {reply.error["code"] for reply in refused} == {"invalid_api_key"}
        assert listed(made) == before
        assert (await post(made.port, path, body, [GOOD])).status in {200, 500}


@pytest.mark.case("C88")
async def test_without_a_token_this_machine_may():
    async with admin() as made:
        reply = await post(made.port, ADD, {"type": "decode", "instances": "h:1"})

    assert reply.status == 200


@pytest.mark.case("C88")
async def test_admin_token_is_not_for_engines():
    async with admin(rules=TOKEN) as made:
        for engine in (made.play.p[0], made.play.d[0]):
            engine.routes[RESET] = behaviours.json_answer({})
        reply = await ask(made.port, "POST", RESET, headers=[GOOD])

        assert reply.status == 200
        for engine in (made.play.p[0], made.play.d[0]):
            assert "authorization" not in engine.only_call.headers


@pytest.mark.parametrize(
    ("rules", "sent"),
    [
        pytest.param({"engine_key": "e", **TOKEN}, "Bearer e", id="configured"),
        pytest.param({"engine_key": "e"}, "Bearer e", id="configured-without-token"),
        pytest.param({}, "Bearer t0ken", id="clients-own"),
    ],
)
async def test_engines_get_the_key_meant_for_them(rules, sent):
    async with admin(rules=rules) as made:
        for engine in (made.play.p[0], made.play.d[0]):
            engine.routes[RESET] = behaviours.json_answer({})
        await ask(made.port, "POST", RESET, headers=[GOOD])

        assert made.play.d[0].only_call.headers["authorization"] == sent


# --- add and remove


async def test_added_instances_are_told_in_the_examples_form():
    async with admin(p=[], d=[]) as made:
        made.roster.is_slow = True
        body = {"type": "decode", "instances": ["h:1", " http://H:1 ", "h:2"]}
        reply = await post(made.port, ADD, body)

        assert reply.json == {
            "message": "Instances ['h:1', 'h:2'] are waiting to be added.",
            "current_prefill_instances": [],
            "current_decode_instances": [],
        }
        assert (await post(made.port, ADD, body)).json["message"] == (
            "add decode instances: ['h:1', 'h:2']."
        )


async def test_removed_instance_that_is_idle_is_gone():
    async with admin() as made:
        address = made.play.d[0].address
        reply = await post(made.port, REMOVE, {"type": "decode", "instances": address})

        assert reply.json["message"] == f"remove decode instances: ['{address}']."
        assert reply.json["current_decode_instances"] == []
        assert listed(made)[Role.DECODE] == []


async def test_removed_instance_that_is_busy_drains():
    async with admin() as made:
        instance = made.play.instance(made.play.d[0])
        with made.play.fleet.lease(Role.DECODE, Cost()):
            reply = await post(made.port, REMOVE, {"type": "decode", "instances": [instance.label]})
            assert made.play.fleet.state(instance) is State.DRAINING

        assert "isolated and waiting to be removed" in reply.json["message"]
        assert made.play.fleet.state(instance) is State.GONE


async def test_removing_a_stranger_changes_nothing_and_says_so():
    async with admin() as made:
        before = listed(made)
        reply = await post(made.port, REMOVE, {"type": "decode", "instances": "h:1"})

        assert reply.json == {
            "message": "There are no decode instances ['h:1'].",
            "current_prefill_instances": [made.play.p[0].address],
            "current_decode_instances": [made.play.d[0].address],
        }
        assert reply.status == 200
        assert listed(made) == before


async def test_removal_says_of_each_instance_what_became_of_it():
    async with admin(d=[None, None]) as made:
        busy, idle = (engine.address for engine in made.play.d)
        other = [made.play.instance(made.play.d[1])]
        with made.play.fleet.lease(Role.DECODE, Cost(), avoid=other):
            body = {"type": "decode", "instances": ["h:1", busy, idle]}
            reply = await post(made.port, REMOVE, body)

    assert reply.json["message"] == (
        f"Instances ['{busy}'] are isolated and waiting to be removed. "
        f"remove decode instances: ['{idle}']. There are no decode instances ['h:1']."
    )


# --- what is refused


@pytest.mark.case("C56")
@pytest.mark.parametrize("path", [ADD, REMOVE])
@pytest.mark.parametrize(
    ("body", "named"),
    [
        pytest.param({"type": "decoder", "instances": "h:1"}, "'decoder'", id="type"),
        pytest.param({"instances": "h:1"}, "None", id="no-type"),
        pytest.param({"type": ["decode"], "instances": "h:1"}, "decode", id="list-type"),
        pytest.param({"type": "decode"}, "instances: the key is missing", id="no-instances"),
        pytest.param({"type": "decode", "instances": None}, "None", id="null"),
        pytest.param({"type": "decode", "instances": []}, "no instance", id="empty"),
        pytest.param({"type": "decode", "instances": [7]}, "7", id="number"),
        pytest.param({"type": "decode", "instances": ["ok:1", "h"]}, "'h'", id="no-port"),
        pytest.param({"type": "decode", "instances": "h:99999"}, "99999", id="port"),
        pytest.param({"type": "decode", "instances": "h:1/v1/"}, "/v1/", id="path"),
        pytest.param({"type": "decode", "instances": {"a": "h:1"}}, "{", id="object"),
        pytest.param([], "object", id="list-body"),
    ],
)
async def test_bad_call_changes_nothing_and_names_the_entry(path, body, named):
    async with admin() as made:
        before = listed(made)
        reply = await post(made.port, path, body)

        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert named in reply.error["message"]
        assert listed(made) == before


async def test_every_bad_entry_is_named():
    async with admin() as made:
        reply = await post(made.port, ADD, {"type": "decode", "instances": ["a", "b:0", "c:1"]})

    assert "'a'" in reply.error["message"]
    assert "'b:0'" in reply.error["message"]
    assert "c:1" not in reply.error["message"]


@pytest.mark.parametrize("field", ["type", "instances"])
async def test_deep_nesting_is_no_crash(field):
    deep = b"[" * 900 + b"]" * 900
    body = b'{"%b": %b}' % (field.encode(), deep)
    async with admin() as made:
        reply = await post(made.port, ADD, body)

    assert reply.status == 400


async def test_body_needs_no_content_type():
    async with admin(p=[], d=[]) as made:
        body = orjson.dumps({"type": "prefill", "instances": "h:1"})
        reply = await ask(made.port, "POST", ADD, body)

    assert reply.json["current_prefill_instances"] == ["h:1"]


# --- reset


async def test_reset_reaches_every_instance_with_its_query():
    async with admin(p=[None, None], d=[None]) as made:
        engines = [*made.play.p, *made.play.d]
        for engine in engines:
            engine.routes[RESET] = behaviours.json_answer({})
        reply = await ask(made.port, "POST", f"{RESET}?reset_running_requests=true")

        assert (reply.status, reply.body) == (200, b"")
        for engine in engines:
            assert engine.only_call.query == "reset_running_requests=true"


async def test_failed_resets_are_listed():
    async with admin(d=[None, None]) as made:
        made.play.p[0].routes[RESET] = behaviours.json_answer({})
        made.play.d[0].routes[RESET] = behaviours.error(500)
        await made.play.d[1].stop()
        reply = await ask(made.port, "POST", RESET)

        assert reply.status == 500
        assert reply.json == {"failed": [f"http://{engine.address}" for engine in made.play.d]}


async def test_engine_that_is_not_there_does_not_hide_the_others():
    with refusing_port() as port:
        async with admin(p=[], d=[None]) as made:
            made.play.d[0].routes[RESET] = behaviours.json_answer({})
            await post(made.port, ADD, {"type": "prefill", "instances": f"127.0.0.1:{port}"})
            reply = await ask(made.port, "POST", RESET)

            assert reply.json == {"failed": [f"http://127.0.0.1:{port}"]}
            assert len(made.play.d[0].calls) == 1
