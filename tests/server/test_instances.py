"""What operators are told of instances, and what drain and undrain say they did."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from pdproxy.core.instance import Role, State
from pdproxy.core.load import Cost
from tests.fakes.client import get, post
from tests.server.test_admin import GOOD, TOKEN, admin

DRAIN, UNDRAIN = "/instances/drain", "/instances/undrain"


@pytest.mark.case("C88")
async def test_only_the_holder_of_the_token_may():
    async with admin(rules=TOKEN) as made:
        body = {"type": "decode", "instances": made.play.d[0].address}
        refused = [await post(made.port, path, body) for path in (DRAIN, UNDRAIN)]
        refused.append(await get(made.port, "/instances"))

        assert [reply.status for reply in refused] == [401] * 3
        assert made.play.fleet.state(made.play.instance(made.play.d[0])) is State.ACTIVE
        assert (await get(made.port, "/instances", [GOOD])).status == 200


async def test_an_instance_is_told_whole():
    async with admin() as made:
        instance = made.play.instance(made.play.d[0])
        made.play.fleet.report_failure(instance, certain=True, why="Connection refused")
        with made.play.fleet.lease(Role.DECODE, Cost(kv_tokens=7)):
            told = (await get(made.port, "/instances")).json

    (one,) = told["decode"]["instances"]
    assert (told["decode"]["available"], told["decode"]["panic"]) == (0, True)
    assert (told["prefill"]["available"], told["prefill"]["panic"]) == (1, False)
    assert one["instance"] == instance.label
    assert (one["state"], one["requests"], one["kv_tokens"]) == ("ejected", 1, 7)
    assert (one["ejections"], one["last_error"]) == (1, "Connection refused")
    assert one["since"].endswith("+00:00")
    # The failure and the ejection read the clock one after the other.
    moments = [datetime.fromisoformat(one[name]) for name in ("last_error_at", "since")]
    assert abs(moments[0] - moments[1]) < timedelta(seconds=1)


@pytest.mark.parametrize("path", [DRAIN, UNDRAIN])
async def test_a_key_that_is_not_known_changes_nothing(path):
    async with admin() as made:
        body = {"type": "decode", "instances": made.play.d[0].address, "deadline": 5}
        reply = await post(made.port, path, body)

        assert reply.status == 400
        assert "deadline: not known" in reply.error["message"]
        assert made.play.fleet.state(made.play.instance(made.play.d[0])) is State.ACTIVE


@pytest.mark.parametrize(
    "deadline", [-1, True, "5", [1], 1e300, 10**400, {"s": 1}], ids=lambda value: str(value)[:9]
)
async def test_bad_deadline_changes_nothing(deadline):
    async with admin() as made:
        address = made.play.d[0].address
        body = {"type": "decode", "instances": address, "deadline_s": deadline}
        reply = await post(made.port, DRAIN, body)

        assert reply.status == 400
        assert "deadline_s" in reply.error["message"]
        assert made.play.fleet.state(made.play.instance(made.play.d[0])) is State.ACTIVE


async def test_drain_says_what_it_did_for_each_and_can_be_repeated():
    async with admin(d=[None, None]) as made:
        busy, idle = (engine.address for engine in made.play.d)
        body = {"type": "decode", "instances": [busy, idle, busy, "h:1"], "deadline_s": 60}
        other = [made.play.instance(made.play.d[1])]
        with made.play.fleet.lease(Role.DECODE, Cost(), avoid=other):
            reply = await post(made.port, DRAIN, body)
            again = await post(made.port, DRAIN, {**body, "instances": busy})
            listed = reply.json["current_decode_instances"]

    assert reply.json["results"] == {busy: "draining", idle: "gone", "h:1": "unknown"}
    assert f"{busy} gets no new request and finishes its own" in reply.json["message"]
    assert again.json["results"] == {busy: "draining"}
    assert listed == [busy]
