"""What each leg is sent: the prefiller one token of the prompt, the decoder the client's body."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, Scene, chat, completion, scene
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import Reply, assert_whole_stream
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import metric

HANDLE = "kv_transfer_params"
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def without_handle(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != HANDLE}


def handing(handle: Any) -> Behaviour:
    """Return a prefiller that gives out just this handle."""

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        await answer.json(behaviours.prefill_body(request, handle))

    return behaviour


def handle_given_by(engine: FakeEngine, request: EngineRequest) -> bool:
    return bool(request.json[HANDLE]["remote_engine_id"] == engine.engine_id)


# --- C08


@pytest.mark.case("C08")
@pytest.mark.parametrize("min_tokens", [100, None, 0], ids=str)
async def test_min_tokens_is_for_the_decoder_alone(min_tokens: int | None) -> None:
    body = chat(max_tokens=500, min_tokens=min_tokens)

    async with scene(d=[behaviours.json_answer({"choices": []})]) as stage:
        reply = await stage.post(CHAT, body)

    assert reply.status == 200
    asked = stage.p1.only_call.json
    assert asked["max_tokens"] == 1
    assert asked.get("min_tokens") in {None, 0, 1}
    assert without_handle(stage.d1.only_call.json) == body


# --- C09


@pytest.mark.case("C09")
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_completion_tokens": 4096}, id="completion-only"),
        pytest.param({"max_completion_tokens": 4096, "max_tokens": 9}, id="both"),
        pytest.param({"max_completion_tokens": None, "max_tokens": 9}, id="completion-null"),
        pytest.param({"max_completion_tokens": 4096, "max_tokens": None}, id="max-null"),
        pytest.param({"max_completion_tokens": None, "max_tokens": None}, id="both-null"),
        pytest.param({}, id="none"),
    ],
)
async def test_every_output_limit_is_one_on_the_prefiller(limits: dict[str, Any]) -> None:
    body = chat(**limits)

    async with scene(d=[behaviours.json_answer({"choices": []})]) as stage:
        reply = await stage.post(CHAT, body)

    assert reply.status == 200
    asked = stage.p1.only_call.json
    named = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & asked.keys()
    assert named
    assert {asked[name] for name in named} == {1}
    assert without_handle(stage.d1.only_call.json) == body


# --- C10


@pytest.mark.case("C10")
async def test_stream_options_stay_with_the_decoder() -> None:
    options = {"include_usage": True, "continuous_usage_stats": False, "x_new": [1, None]}
    body = chat(stream=True, stream_options=options, max_tokens=3)

    async with scene() as stage:
        reply = await stage.post(CHAT, body)
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 3)
    asked = stage.p1.only_call.json
    assert not asked.get("stream")
    assert "stream_options" not in asked
    assert without_handle(stage.d1.only_call.json) == body
    assert handle_given_by(stage.p1, stage.d1.only_call)


# --- C11


@pytest.mark.case("C11")
async def test_completion_without_a_limit_works_and_stays_without_one() -> None:
    body = completion()

    async with scene() as stage:
        reply = await stage.post(COMPLETIONS, body)
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.text == toy.answer(body, 16)
    assert stage.p1.only_call.json["max_tokens"] == 1
    assert "max_tokens" not in stage.d1.only_call.json


# --- C12


@pytest.mark.case("C12")
async def test_nothing_ends_the_prefill_before_its_one_token() -> None:
    body = chat(stop=["a", "b"], stop_token_ids=[7, 8], ignore_eos=False, max_tokens=3)

    async with scene() as stage:
        await stage.post(CHAT, body)

    asked = stage.p1.only_call.json
    assert not {"stop", "stop_token_ids"} & asked.keys()
    assert asked.get("ignore_eos") is True or asked.get("min_tokens") == 1
    assert without_handle(stage.d1.only_call.json) == body


@pytest.mark.case("C12")
@STREAM_OR_NOT
async def test_missing_handle_is_counted_warned_of_and_never_made_up(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    of_client = {"do_remote_prefill": True, "remote_engine_id": "of-the-client"}
    body = chat(stream=stream, max_tokens=3)

    async with scene() as stage:
        await stage.post(CHAT, body)
        stage.p1.behaviour = handing(None)
        reply = await stage.post(CHAT, {**body, HANDLE: of_client, "ec_transfer_params": {"a": 1}})
        missing = await metric(stage.proxy, "pdproxy_kv_handoff_missing_total")
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.text == toy.answer(body, 3)
    assert stage.d1.calls[1].json == body
    assert missing == 1
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings


@pytest.mark.case("C12")
async def test_handle_sent_by_a_client_reaches_no_engine() -> None:
    of_client = {"do_remote_prefill": True, "remote_engine_id": "of-the-client"}

    async with scene() as stage:
        reply = await stage.post(CHAT, chat(max_tokens=3, kv_transfer_params=of_client))

    assert reply.text == toy.answer(chat(), 3)
    assert stage.p1.only_call.json[HANDLE].get("remote_engine_id") is None
    assert handle_given_by(stage.p1, stage.d1.only_call)


# --- C13

STRANGE_REQUEST = rb"""{
  "model": "toy",
  "messages": [{"role": "user", "content": "h\u00e9 \ud83d\ude00 \ud800 \u0000 \u2028"}],
  "chat_template_kwargs": {"enable_thinking": false, "x": {"y": [1, 2.50, null]}},
  "mm_processor_kwargs": {"fps": 2}, "cache_salt": "pepper", "priority": -3,
  "logit_bias": {"50256": -100, "7": 1e-9}, "seed": 9223372036854775807,
  "big": 123456789012345678901234567890, "small": 1e-9, "one": 1.0, "exp": 1E5, "neg": -0.0,
  "temperature": 0.30000000000000004, "\u00fcml\u00e4ut": "\ud83e\udd80", "empty": {}, "user": "",
  "max_tokens": 2, "unknown": [[], [{}], null, true]
}"""
STRANGE_HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3], [], [[4]]],
    "remote_engine_id": None,
    "big": 2**63,
    "beyond_float": 2**53 + 1,
    "next_years_key": {"deep": [None, {"": [0.1, -1e-7]}], "text": "ünï\u2028"},
    "per_child": {"cmpl-0-0": {"port": 1}, "cmpl-0-1": {"port": 2}},
}


@pytest.mark.case("C13")
async def test_decoder_gets_the_clients_body_and_the_handle_and_nothing_else() -> None:
    async with scene([handing(STRANGE_HANDLE)], [behaviours.json_answer({"choices": []})]) as stage:
        reply = await stage.post(CHAT, STRANGE_REQUEST)

    assert reply.status == 200
    sent = json.loads(STRANGE_REQUEST)
    received = stage.d1.only_call.json
    assert without_handle(received) == sent
    assert list(without_handle(received)) == list(sent)
    assert types_of(without_handle(received)) == types_of(sent)
    assert received[HANDLE] == STRANGE_HANDLE
    assert types_of(received[HANDLE]) == types_of(STRANGE_HANDLE)


def types_of(value: Any) -> Any:
    """Return the shape of a value: `1 == 1.0 == True`, but they are not the same."""
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [types_of(item) for item in value]
    return type(value).__name__


# --- C14

CACHED = [
    pytest.param(3072, 3072, id="hit"),
    pytest.param(0, 0, id="zero"),
    pytest.param(None, 0, id="details-null"),
    pytest.param(..., 0, id="details-missing"),
]
DECODER_CACHED = pytest.mark.parametrize(
    "decoder_says", [4608, None, ...], ids=["4608", "null", "missing"]
)


def with_figures(stage: Scene, prefiller_says: Any, decoder_says: Any) -> None:
    stage.p1.cached_tokens = prefiller_says
    stage.d1.cached_tokens = decoder_says


def plain_usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


@pytest.mark.case("C14")
@DECODER_CACHED
@pytest.mark.parametrize(("prefiller_says", "client_sees"), CACHED)
async def test_cached_tokens_of_an_answer_are_the_prefillers(
    prefiller_says: Any, decoder_says: Any, client_sees: int
) -> None:
    async with scene() as stage:
        with_figures(stage, prefiller_says, decoder_says)
        reply = await stage.post(CHAT, chat(max_tokens=3))

    usage = reply.json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == client_sees
    assert plain_usage(usage) == plain_usage(behaviours.usage_of(stage.d1.only_call, 3))


@pytest.mark.case("C14")
@DECODER_CACHED
@pytest.mark.parametrize(("prefiller_says", "client_sees"), CACHED)
async def test_cached_tokens_of_a_streams_usage_are_the_prefillers(
    prefiller_says: Any, decoder_says: Any, client_sees: int
) -> None:
    body = chat(stream=True, stream_options={"include_usage": True}, max_tokens=3)

    async with scene() as stage:
        with_figures(stage, prefiller_says, decoder_says)
        reply = await stage.post(CHAT, body)

    assert_whole_stream(reply)
    request = stage.d1.only_call
    usage = reply.chunks_of_json[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == client_sees
    assert plain_usage(usage) == plain_usage(behaviours.usage_of(request, 3))
    said = behaviours.stream_events(request, 3, "length")
    untouched = b"".join(event_bytes(event) for event in said[:-1])
    assert reply.body.startswith(untouched)


@pytest.mark.case("C14")
async def test_usage_nobody_asked_for_is_not_invented() -> None:
    async with scene() as stage:
        with_figures(stage, 3072, 4608)
        reply = await stage.post(CHAT, chat(stream=True, max_tokens=3))

    said = behaviours.stream_events(stage.d1.only_call, 3, "length")
    assert reply.body == b"".join(behaviours.stream_bytes(said))


@pytest.mark.case("C14")
async def test_right_figure_is_left_byte_for_byte() -> None:
    spaced = b'{"choices" : [],  "usage":{"prompt_tokens":9,"completion_tokens":1,'
    spaced += b'"total_tokens":10, "prompt_tokens_details" : {"cached_tokens": 5}} }'

    async def answer_spaced(_: EngineRequest, answer: Answer) -> None:
        await answer.whole(200, spaced, [("content-type", "application/json")])

    async with scene(d=[answer_spaced]) as stage:
        stage.p1.cached_tokens = 5
        reply: Reply = await stage.post(CHAT, chat())

    assert reply.body == spaced
