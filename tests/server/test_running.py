"""The list of requests in flight: who may see it and what it says."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from pdproxy.server.app import build_app
from tests.fakes import behaviours, client
from tests.fakes.client import RawClient, get
from tests.fakes.waiting import until
from tests.server.stage import listening, server

PATH = "/debug/requests"
CHAT = "/v1/chat/completions"
BODY = {"model": "toy", "messages": [{"role": "user", "content": "PROMPT-XYZ"}], "stream": True}


@asynccontextmanager
async def application(**options):
    async with server(**options) as made, listening(build_app(made.context)) as port:
        made.port = port
        yield made


@pytest.mark.case("C90")
async def test_request_in_flight_is_shown_with_stage_and_instances_and_without_its_prompt():
    async with application(d=[behaviours.hang]) as made:
        assert (await get(made.port, PATH)).json == {"requests": []}
        async with await RawClient.connect(made.port) as peer:
            headers = [*client.JSON_TYPE, ("X-Request-Id", "mine")]
            await peer.send_request("POST", CHAT, client.as_json(BODY), headers)
            await made.play.d[0].wait_for_calls(1)
            reply = await get(made.port, PATH)
        await until(lambda: not made.context.running)

        (shown,) = reply.json["requests"]
        assert shown.pop("age_s") >= 0
        assert shown == {
            "request_id": "mine",
            "client": "127.0.0.1",
            "endpoint": CHAT,
            "model": "toy",
            "stream": True,
            "stage": "first_token",
            "prefiller": made.play.p[0].address,
            "decoder": made.play.d[0].address,
            "prefill_attempts": 1,
            "decode_attempts": 1,
            "rounds": 1,
        }
        assert b"PROMPT-XYZ" not in reply.body


@pytest.mark.case("C88")
async def test_only_administrators_see_it():
    async with application(rules={"admin_token": "t0ken"}) as made:
        refused = await get(made.port, PATH)
        allowed = await get(made.port, PATH, [("Authorization", "Bearer t0ken")])

    assert (refused.status, allowed.status) == (401, 200)
