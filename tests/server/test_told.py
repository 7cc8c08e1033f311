"""What answers tell of their own way, and to whom."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager

import pytest

from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.server.app import build_app
from pdproxy.server.told import server_timing
from tests.fakes import behaviours
from tests.fakes.client import post
from tests.server.stage import listening, server

PATH = "/v1/chat/completions"
BODY = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ASKING = [("X-PDProxy-Debug", "1")]
TIMING = re.compile(r"[a-z_]+;dur=\d+\.\d(, [a-z_]+;dur=\d+\.\d)*")


@asynccontextmanager
async def application(*, debug_headers=True, **options):
    rules = {"debug_headers": debug_headers}
    async with server(rules=rules, **options) as made, listening(build_app(made.context)) as port:
        made.port = port
        yield made


def own(reply):
    """Return the headers that tell of the way."""
    return {name: value for name, value in reply.headers.items() if name.startswith("x-pdproxy-")}


@pytest.mark.parametrize("is_stream", [True, False])
async def test_answer_names_instances_rounds_and_reasons_to_who_asks(is_stream):
    async with application() as made:
        reply = await post(made.port, PATH, {**BODY, "stream": is_stream}, ASKING)

        assert own(reply) == {
            "x-pdproxy-prefiller": made.play.p[0].address,
            "x-pdproxy-prefiller-reason": "only_one",
            "x-pdproxy-prefill-attempts": "1",
            "x-pdproxy-decoder": made.play.d[0].address,
            "x-pdproxy-decoder-reason": "only_one",
            "x-pdproxy-decode-attempts": "1",
            "x-pdproxy-rounds": "1",
        }
        assert TIMING.fullmatch(reply.headers["server-timing"])


async def test_failure_names_the_instances_too():
    async with application(p=[behaviours.error(400)]) as made:
        reply = await post(made.port, PATH, BODY, ASKING)

        assert reply.status == 400
        assert own(reply)["x-pdproxy-prefiller"] == made.play.p[0].address
        assert "x-pdproxy-decoder" not in own(reply)


@pytest.mark.case("C90")
@pytest.mark.parametrize(
    ("is_on", "headers"),
    [
        pytest.param(False, ASKING, id="switched-off"),
        pytest.param(True, [], id="not-asked"),
        pytest.param(True, [("X-PDProxy-Debug", "0")], id="not-one"),
    ],
)
async def test_nothing_inside_is_told_otherwise(is_on, headers):
    async with application(debug_headers=is_on) as made:
        whole = await post(made.port, PATH, BODY, headers)
        streamed = await post(made.port, PATH, {**BODY, "stream": True}, headers)

        assert own(whole) == own(streamed) == {}
        assert "server-timing" not in streamed.headers


async def test_whole_answer_always_tells_where_its_time_went():
    async with application(debug_headers=False) as made:
        reply = await post(made.port, PATH, BODY)

    names = [entry.partition(";")[0] for entry in reply.headers["server-timing"].split(", ")]
    assert names == ["queue", "prefill", "handoff", "decode", "total"]


def test_timings_are_in_milliseconds_and_add_up():
    timeline = Timeline(0.0)
    timeline.mark_received(1.0)
    timeline.mark_prefill_started(1.25)
    timeline.mark_prefill_done(2.0)
    account = Account("id", PATH, "peer", timeline)

    ((name, value),) = server_timing(account, 2.5)

    assert name == "server-timing"
    assert value == "queue;dur=250.0, prefill;dur=750.0, handoff;dur=500.0, total;dur=1500.0"
