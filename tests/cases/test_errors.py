"""Errors keep their status and their words, cost no needless call, and leave nothing behind."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, Scene, chat, completion, scene
from tests.fakes import behaviours
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.behaviours import DONE
from tests.fakes.client import Reply, assert_whole_stream
from tests.fakes.proxy import loads, metric

STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 4096 tokens.",
        "type": "BadRequestError",
        "param": "messages",
        "code": 400,
    }
}


def assert_relayed(reply: Reply, status: int, body: object) -> None:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json == body


# --- C01


@pytest.mark.case("C01")
@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())], ids=["chat", "completions"]
)
async def test_prefillers_rejection_reaches_the_client_as_it_is(
    path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reject = behaviours.error(400, body=TOO_LONG)

    async with scene(p=[reject, reject]) as stage:
        reply = await stage.post(path, {**body, "stream": stream})
        await stage.assert_quiescent()

    assert_relayed(reply, 400, TOO_LONG)
    assert (stage.prefill_calls, stage.decode_calls) == (1, 0)
    assert not [r for r in caplog.records if r.levelno > logging.WARNING and r.exc_info]


# --- C03


async def post_saturated(stage: Scene) -> Reply:
    reply = await stage.post(CHAT, chat(stream=True))
    await stage.assert_quiescent()
    return reply


@pytest.mark.case("C03")
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_retry_after_of_a_saturated_engine_reaches_the_client(role: str, status: int) -> None:
    body = behaviours.error_body("queue is full", status)
    busy = behaviours.error(status, headers=[("Retry-After", "7")], body=body)
    p, d = ([busy], [None]) if role == "prefill" else ([None], [busy])

    async with scene(p, d) as stage:
        reply = await post_saturated(stage)

    assert_relayed(reply, status, body)
    assert reply.headers["retry-after"] == "7"
    saturated = stage.p1 if role == "prefill" else stage.d1
    assert len(saturated.calls) == 1, "it was asked again sooner than it said"


@pytest.mark.case("C03")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_saturated_engine_is_left_for_a_free_one(role: str) -> None:
    busy = behaviours.error(429, headers=[("Retry-After", "7")])
    both = [busy, None]
    p, d = (both, [None]) if role == "prefill" else ([None], both)

    async with scene(p, d) as stage:
        replies = [await post_saturated(stage) for _ in range(2)]

    for reply in replies:
        assert_whole_stream(reply)
    saturated = stage.p1 if role == "prefill" else stage.d1
    assert len(saturated.calls) <= 2, "one request asked the busy engine twice"


# --- C04

NOT_OBJECTS = [
    pytest.param(b"{", id="cut"),
    pytest.param(b"", id="empty"),
    pytest.param(b"[]", id="list"),
    pytest.param(b'"hi"', id="string"),
    pytest.param(b'{"model": "\xff\xfe"}', id="no-utf8"),
    pytest.param(b"null", id="null"),
    pytest.param(b"{" * 100_000, id="deep"),
]


@pytest.mark.case("C04")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
@pytest.mark.parametrize("body", NOT_OBJECTS)
async def test_body_that_is_no_json_object_is_a_400_and_no_engine_hears_of_it(
    path: str, body: bytes
) -> None:
    async with scene() as stage:
        before = await loads(stage.proxy)
        reply = await stage.post(path, body)
        after = await loads(stage.proxy)

    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert (stage.prefill_calls, stage.decode_calls) == (0, 0)
    assert after == before


@pytest.mark.case("C04")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
async def test_byte_order_mark_is_no_reason_to_fail(path: str) -> None:
    whole = {**chat(), **completion()}

    async with scene() as stage:
        reply = await stage.post(path, b"\xef\xbb\xbf" + json.dumps(whole).encode())
        await stage.assert_quiescent()

    assert reply.status in {200, 400}
    if reply.status == 400:
        assert reply.error["type"] == "invalid_request_error"


@pytest.mark.case("C04")
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param(CHAT, chat(messages=[]), 400, id="no-messages"),
        pytest.param(CHAT, chat(messages=None), 400, id="null-messages"),
        pytest.param(CHAT, chat(messages="hi"), 400, id="text-messages"),
        pytest.param(CHAT, chat(messages=[None, 3, {"content": 5}]), None, id="odd-messages"),
        pytest.param(COMPLETIONS, completion(prompt=None), 400, id="null-prompt"),
        pytest.param(COMPLETIONS, completion(prompt=[]), None, id="empty-prompt"),
        pytest.param(COMPLETIONS, {"prompt": "x"}, None, id="no-model"),
        pytest.param(COMPLETIONS, completion(model=7), None, id="model-no-text"),
    ],
)
@STREAM_OR_NOT
async def test_odd_request_is_the_engines_to_judge(
    path: str, body: dict[str, Any], status: int | None, stream: bool
) -> None:
    async def judge(request: EngineRequest, answer: Answer) -> None:
        # What these requests mean is not the point here, so no toy model reads them.
        if status is not None:
            await answer.json(behaviours.error_body("odd", status), status)
        elif request.engine.role == "prefill":
            await answer.json({"choices": [], "kv_transfer_params": request.engine.new_handle()})
        elif request.is_stream:
            end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
            await behaviours.stream([event_bytes(end), DONE])(request, answer)
        else:
            await answer.json({"choices": []})

    async with scene([judge], [judge]) as stage:
        reply = await stage.post(path, {**body, "stream": stream})
        await stage.assert_quiescent()

    assert reply.status == (status or 200), reply.body


# --- C05

FAILED_WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "toy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant"},
            "finish_reason": "error",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4},
}


async def failed_requests(stage: Scene) -> float:
    total = await metric(stage.proxy, "pdproxy_requests_total")
    return total - await metric(stage.proxy, "pdproxy_requests_total", outcome="success")


@pytest.mark.case("C05")
@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_failed_generation_in_a_200_is_relayed_and_counted_as_failed(reason: str) -> None:
    said = json.loads(json.dumps(FAILED_WHOLE).replace('"error"', f'"{reason}"'))

    async with scene(d=[behaviours.json_answer(said)]) as stage:
        reply = await stage.post(CHAT, chat())
        failed = await failed_requests(stage)
        await stage.assert_quiescent()

    assert reply.status == 200
    # The figure for cached tokens is the prefiller's; nothing else may differ.
    received = reply.json
    received["usage"].pop("prompt_tokens_details", None)
    assert received == said
    assert (stage.prefill_calls, stage.decode_calls) == (1, 1)
    assert failed == 1


@pytest.mark.case("C05")
@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_failed_generation_in_a_stream_is_relayed_and_counted_as_failed(reason: str) -> None:
    choice = {"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": None}
    event = event_bytes({"id": "x", "choices": [choice]})

    async with scene(d=[behaviours.stream([event, DONE])]) as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        failed = await failed_requests(stage)
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.body == event + DONE
    assert (stage.prefill_calls, stage.decode_calls) == (1, 1)
    assert failed == 1


# --- C06

CLIENT_ERRORS = [401, 403, 404, 405, 409, 413, 415, 422]


@pytest.mark.case("C06")
@STREAM_OR_NOT
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_client_error_costs_one_call_and_keeps_status_and_body(
    role: str, stream: bool
) -> None:
    status = 0

    async def reject(_: EngineRequest, answer: Answer) -> None:
        await answer.json(behaviours.error_body("not so", status), status)

    both = [reject, reject]
    p, d = (both, [None]) if role == "prefill" else ([None], both)

    async with scene(p, d) as stage:
        for number, status in enumerate(CLIENT_ERRORS, start=1):
            reply = await stage.post(CHAT, chat(stream=stream))

            assert_relayed(reply, status, behaviours.error_body("not so", status))
            assert stage.prefill_calls == number
            assert stage.decode_calls == (0 if role == "prefill" else number)
        await stage.assert_quiescent()


# --- C07


@pytest.mark.case("C07")
@STREAM_OR_NOT
@pytest.mark.parametrize("status", [500, 503])
async def test_cause_of_a_prefillers_failure_reaches_client_and_log(
    status: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cause = behaviours.error_body("KV cache allocation failed: no free blocks", status)
    fail = behaviours.error(status, body=cause)
    body = chat(stream=stream, messages=[{"role": "user", "content": "SECRET PROMPT"}])

    async with scene(p=[fail]) as stage:
        reply = await stage.post(CHAT, body, [("X-Request-Id", "call-7")])
        await stage.assert_quiescent()

    assert_relayed(reply, status, cause)
    assert 1 <= stage.prefill_calls <= 3
    assert stage.decode_calls == 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    telling = [w for w in warnings if "prefill" in w and stage.p1.address in w and str(status) in w]
    assert telling, warnings
    assert any("call-7" in line for line in telling), telling
    assert "SECRET PROMPT" not in caplog.text
