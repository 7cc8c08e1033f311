"""Logs and error texts hold no prompt, output or key, and no address of an engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, chat
from tests.fakes import behaviours, client
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import RawClient, Reply
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import ProxyProcess, assert_quiescent, running_proxy

PROMPT, OUTPUT, KEY = "PROMPT-XYZ", "OUT-XYZ", "KEY-XYZ"
BODY = chat(messages=[{"role": "user", "content": PROMPT}], max_tokens=3)
MINE = [("Authorization", f"Bearer {KEY}")]
SHORT = ("--first-token-timeout", "0.3", "--prefill-timeout", "0.3", "--idle-timeout", "0.3")
SPOKEN = {"choices": [{"index": 0, "delta": {"content": OUTPUT}, "finish_reason": None}]}
QUOTING = behaviours.error_body(f"cannot parse {PROMPT}", 500)


async def says_output(request: EngineRequest, answer: Answer) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    if request.is_stream:
        await behaviours.stream(behaviours.stream_bytes([SPOKEN, end]))(request, answer)
    else:
        await answer.json({"choices": [{"index": 0, "message": {"content": OUTPUT}}]})


async def no_json(_: EngineRequest, answer: Answer) -> None:
    await answer.whole(200, f"<html>{OUTPUT}".encode(), [("content-type", "application/json")])


async def no_http(_: EngineRequest, answer: Answer) -> None:
    await answer.send(f"{OUTPUT} is no HTTP\r\n\r\n".encode())
    answer.close()


async def no_handle(request: EngineRequest, answer: Answer) -> None:
    await answer.json(behaviours.prefill_body(request, None))


# Failures before the answer begins, on either leg.
EARLY: list[Behaviour] = [
    behaviours.error(400, body=QUOTING),
    behaviours.error(500, body=QUOTING),
    behaviours.error(503, body=QUOTING, headers=[("Retry-After", "1")]),
    behaviours.close,
    behaviours.reset,
    behaviours.hang,
    no_json,
    no_http,
]
# Failures of a decoder that has begun to answer.
LATE: list[Behaviour] = [
    behaviours.stream([event_bytes(SPOKEN)], then="close"),
    behaviours.stream([event_bytes(SPOKEN)], then="reset"),
    behaviours.stream([event_bytes(SPOKEN)], then="hang"),
    behaviours.stream([event_bytes(SPOKEN), event_bytes(QUOTING)]),
    behaviours.stream([event_bytes(SPOKEN), f"data: {OUTPUT} no json\n\n".encode()]),
    behaviours.recompute(2),
]
NO_REQUESTS: list[Any] = [b'{"prompt": "PROMPT-XYZ', b'["PROMPT-XYZ"]', b"\xffPROMPT-XYZ"]


async def fail_in_every_way(proxy: ProxyProcess, p1: FakeEngine, d1: FakeEngine) -> list[Reply]:
    """Send requests through every failure; return the answers that the proxy itself worded."""
    worded: list[Reply] = []
    for engine, healthy in ((p1, behaviours.prefill), (d1, says_output)):
        for behaviour in EARLY:
            engine.behaviour = behaviour
            reply = await client.post(proxy.port, CHAT, {**BODY, "stream": True}, MINE)
            if PROMPT.encode() not in reply.body:
                worded.append(reply)
        engine.behaviour = healthy
    for behaviour in LATE:
        d1.behaviour = behaviour
        await client.post(proxy.port, CHAT, {**BODY, "stream": True}, MINE)
    d1.behaviour = says_output
    p1.behaviour = no_handle
    await client.post(proxy.port, COMPLETIONS, {"model": "toy", "prompt": PROMPT}, MINE)
    p1.behaviour = behaviours.prefill
    worded += [await client.post(proxy.port, CHAT, body, MINE) for body in NO_REQUESTS]
    worded.append(await client.get(proxy.port, f"/{PROMPT}?key={KEY}", MINE))
    await leave_early(proxy, d1)
    await p1.stop()
    await d1.stop()
    worded.append(await client.post(proxy.port, CHAT, BODY, MINE))
    worded.append(await client.get(proxy.port, "/v1/models", MINE))
    return worded


async def leave_early(proxy: ProxyProcess, d1: FakeEngine) -> None:
    d1.behaviour = behaviours.hang
    known = len(d1.calls)
    async with await RawClient.connect(proxy.port) as peer:
        headers = [*client.JSON_TYPE, *MINE]
        await peer.send_request("POST", CHAT, client.as_json(BODY), headers)
        await d1.wait_for_calls(known + 1)
    d1.behaviour = says_output


@pytest.mark.case("C90")
@pytest.mark.e2e
@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING"])
async def test_no_prompt_output_or_key_is_logged_whatever_fails(level: str) -> None:
    args = ("--log-level", level, "--max-retries", "1", *SHORT)

    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode", says_output) as d1,
        running_proxy([p1], [d1], *args, env={"OPENAI_API_KEY": f"{KEY}-2"}) as proxy,
    ):
        fine = await client.post(proxy.port, CHAT, {**BODY, "stream": True}, MINE)
        worded = await fail_in_every_way(proxy, p1, d1)
        await assert_quiescent(proxy)

    assert OUTPUT in fine.text
    log = proxy.log_text()
    assert KEY not in log
    assert "remote_block_ids" not in log
    if level != "DEBUG":
        assert PROMPT not in log
        assert OUTPUT not in log
    assert log.strip(), "nothing was logged at all"
    for reply in worded:
        assert_tells_nothing_inside(reply, (p1, d1))


def assert_tells_nothing_inside(reply: Reply, engines: tuple[FakeEngine, ...]) -> None:
    text = reply.body.decode("utf-8", "replace")
    assert reply.status >= 400
    assert reply.error["message"]
    assert KEY not in text
    assert "Traceback" not in text
    assert not re.search(r"/\w+/[\w/]+\.py", text)
    for engine in engines:
        assert engine.address not in text
        assert str(engine.port) not in text
