"""An engine's answer cut at every byte position: all of it or a plain failure, no load left."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import behaviours
from tests.fakes.answer import Answer, EngineRequest, chunk_bytes, event_bytes, head_bytes
from tests.fakes.behaviours import DONE, Behaviour
from tests.fakes.client import Reply, assert_ends_in_error, assert_whole_stream

Leaving = Literal["close", "reset"]

AT_ONCE = 32  # requests in flight
# A busy machine may stand still for longer than a connection may take by default.
PATIENT = ("--connect-timeout", "60", "--continue-lost", "off")
ONE_ATTEMPT = (*PATIENT, "--max-retries", "1")
TWO_ATTEMPTS = (*PATIENT, "--max-retries", "2", "--retry-delay", "0")

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
TEXT = "oui"
CONTENT = {"choices": [{"index": 0, "delta": {"content": TEXT}}]}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
EVENTS = [event_bytes(ROLE), event_bytes(CONTENT), event_bytes(FINISH), DONE]
STREAM = b"".join(EVENTS)
DOCUMENT = json.dumps(
    {
        "choices": [{"index": 0, "message": {"content": TEXT}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
).encode()
PREFILLED = json.dumps(
    {
        "choices": [{"index": 0, "message": {"content": "o"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "e", "n": [1]},
    }
).encode()

STREAM_TYPE = ("content-type", "text/event-stream")
JSON_TYPE = ("content-type", "application/json")
CHUNKED = ("transfer-encoding", "chunked")
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Told:
    """One answer on the wire, and the byte positions that matter.

    Attributes:
        opens_at: from here on the client may have seen output, so no other attempt is made.
        whole_at: from here on nothing is missing that the client needs.
    """

    wire: bytes
    opens_at: int
    whole_at: int


def streamed(framing: Literal["chunked", "until-close"]) -> Told:
    is_chunked = framing == "chunked"
    head = head_bytes(200, [STREAM_TYPE, CHUNKED] if is_chunked else [STREAM_TYPE])
    pieces = [chunk_bytes(event) if is_chunked else event for event in EVENTS]
    # An event is complete with its own last byte, which two bytes of framing follow in a chunk.
    closing = 2 if is_chunked else 0
    upto_content = len(head) + sum(map(len, pieces[:2])) - closing
    upto_done = len(head) + sum(map(len, pieces)) - closing
    end = LAST_CHUNK if is_chunked else b""
    return Told(head + b"".join(pieces) + end, upto_content, upto_done)


def document(body: bytes, framing: Literal["length", "chunked", "until-close"]) -> Told:
    headers = {"length": [("content-length", str(len(body)))], "chunked": [CHUNKED]}
    head = head_bytes(200, [JSON_TYPE, *headers.get(framing, [])])
    wire = head + body
    if framing == "chunked":
        half = len(body) // 2
        wire = head + chunk_bytes(body[:half]) + chunk_bytes(body[half:]) + LAST_CHUNK
    return Told(wire, len(wire), len(wire))


STREAMS = {name: streamed(name) for name in ("chunked", "until-close")}
DOCUMENTS = {name: document(DOCUMENT, name) for name in ("length", "chunked", "until-close")}


def cut(told: Told, how: Leaving) -> Behaviour:
    """Return an engine that cuts the first answer to each request where its seed says."""
    seen: Counter[int] = Counter()

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        at = request.json["seed"]
        is_first = not seen[at]
        seen[at] += 1
        if data := told.wire[:at] if is_first else told.wire:
            await answer.send(data)
        behaviours.leave(answer, how if is_first else "close")

    return behaviour


async def prefill_cheaply(_: EngineRequest, answer: Answer) -> None:
    await answer.whole(200, PREFILLED, [JSON_TYPE])


async def ask_at_every_byte(stage: Scene, told: Told, **fields: Any) -> list[Reply]:
    """Return the answers to one request per position, the first of them cut before any byte."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> Reply:
        async with gate:
            return await stage.post(CHAT, chat(seed=at, **fields))

    replies = await asyncio.gather(*map(one, range(len(told.wire) + 1)))
    await stage.assert_quiescent()
    return replies


def assert_failed_by_status(reply: Reply) -> None:
    assert reply.status == 502
    assert reply.ended
    assert reply.error["code"]
    assert "choices" not in reply.json


def assert_failed_midway(reply: Reply) -> None:
    assert_ends_in_error(reply)
    assert reply.text == TEXT
    assert DONE not in reply.body


def assert_streamed(reply: Reply) -> None:
    assert_whole_stream(reply)
    assert reply.body == STREAM


def assert_told(reply: Reply) -> None:
    assert reply.status == 200
    choice = reply.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")


@pytest.mark.slow
@pytest.mark.case("C15")
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("framing", STREAMS)
async def test_stream_cut_at_any_byte_is_never_a_success_before_it_is_whole(
    framing: str, how: Leaving
) -> None:
    told = STREAMS[framing]

    async with scene([prefill_cheaply], [cut(told, how)], *ONE_ATTEMPT) as stage:
        replies = await ask_at_every_byte(stage, told, stream=True)

    for at, reply in enumerate(replies):
        if at < told.opens_at:
            assert_failed_by_status(reply)
        elif at < whole_at(told, framing, how):
            assert_failed_midway(reply)
        else:
            assert_streamed(reply)


def whole_at(told: Told, framing: str, how: Leaving) -> int:
    """A body that ends with its connection is whole at a FIN after the last finish reason."""
    if framing == "until-close" and how == "close":
        return told.whole_at - len(DONE)
    return told.whole_at


@pytest.mark.slow
@pytest.mark.case("C15")
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("framing", STREAMS)
async def test_stream_cut_before_its_output_is_tried_again_and_one_cut_after_it_is_not(
    framing: str, how: Leaving
) -> None:
    told = STREAMS[framing]

    async with scene([prefill_cheaply], [cut(told, how)], *TWO_ATTEMPTS) as stage:
        replies = await ask_at_every_byte(stage, told, stream=True)
        asked = Counter(call.json["seed"] for call in stage.d1.calls)

    for at, reply in enumerate(replies):
        if told.opens_at <= at < whole_at(told, framing, how):
            assert_failed_midway(reply)
        else:
            assert_streamed(reply)
        assert asked[at] == (2 if at < told.opens_at else 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("framing", DOCUMENTS)
async def test_document_cut_at_any_byte_is_an_error_status(framing: str, how: Leaving) -> None:
    told = DOCUMENTS[framing]

    async with scene([prefill_cheaply], [cut(told, how)], *ONE_ATTEMPT) as stage:
        replies = await ask_at_every_byte(stage, told)

    # A reset never is the end of a body without a length.
    is_told_at_all = not (framing == "until-close" and how == "reset")
    for reply in replies[:-1] if is_told_at_all else replies:
        assert_failed_by_status(reply)
    if is_told_at_all:
        assert_told(replies[-1])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_document_cut_at_any_byte_is_asked_for_again(
    role: Literal["prefill", "decode"], how: Leaving
) -> None:
    told = document(PREFILLED if role == "prefill" else DOCUMENT, "length")
    whole = behaviours.raw([document(DOCUMENT, "length").wire], then="keep")
    engines: Sequence[Behaviour] = (
        (cut(told, how), whole) if role == "prefill" else (prefill_cheaply, cut(told, how))
    )

    async with scene(engines[:1], engines[1:], *TWO_ATTEMPTS) as stage:
        replies = await ask_at_every_byte(stage, told)

    for reply in replies:
        assert_told(reply)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_prefill_cut_at_any_byte_is_an_error_status(how: Leaving) -> None:
    told = document(PREFILLED, "length")

    async with scene([cut(told, how)], [None], *ONE_ATTEMPT) as stage:
        replies = await ask_at_every_byte(stage, told, stream=True)
        decoded = len(stage.d1.calls)

    for reply in replies[:-1]:
        assert_failed_by_status(reply)
    assert_whole_stream(replies[-1])
    assert decoded == 1
