"""Streams survive every cut, line end, comment and oddity; tokens are never held back."""

from __future__ import annotations

import asyncio
import json
import statistics
from typing import Any

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, Scene, chat, completion, scene
from tests.fakes import behaviours
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.behaviours import DONE
from tests.fakes.client import Reply, assert_ends_in_error, assert_whole_stream
from tests.fakes.proxy import metrics

AT_ONCE = 24  # streams in flight in the tests that try every byte position


def chunk(text: str | None = None, **choice: Any) -> dict[str, Any]:
    """Return one chat chunk; without text it has an empty delta."""
    delta = {} if text is None else {"content": text}
    entry = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "toy",
        "choices": [entry],
    }


ROLE = chunk(delta={"role": "assistant", "content": ""})
STOP = chunk(finish_reason="stop", stop_reason=None)
# What is detected shows by its error where it is not continued.
NOT_CONTINUED = ("--recompute", "off")

RECOMPUTED = chunk(finish_reason="stop", stop_reason="recomputed")
USAGE = {
    "id": "chatcmpl-1",
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
}
GOOD = [ROLE, chunk(" un"), chunk(" deux"), chunk(" trois"), STOP, USAGE]
GIVEN_BACK = [ROLE, chunk(" un"), chunk(" deux"), chunk(" trois"), RECOMPUTED, USAGE]
TEXT = " un deux trois"


def joined(events: list[dict[str, Any]]) -> bytes:
    return b"".join(behaviours.stream_bytes(events))


def meaning(reply: Reply) -> list[Any]:
    """Return the payloads of a stream, parsed, the prefiller's figure taken out again."""
    payloads = reply.chunks_of_json
    for payload in payloads:
        if payload.get("usage"):
            payload["usage"].pop("prompt_tokens_details", None)
    return payloads


def assert_given_back_is_honoured(reply: Reply) -> None:
    """Until answers are continued: the text so far, then an error event, the word nowhere."""
    error = assert_ends_in_error(reply)
    assert reply.text == TEXT
    assert b"recomputed" not in reply.body
    assert not any(
        choice.get("finish_reason") for c in reply.chunks_of_json for choice in c.get("choices", [])
    )
    assert error["message"]


async def cut_at(request: EngineRequest, answer: Answer) -> None:
    """Stream `GOOD` or `GIVEN_BACK` in two pieces, cut at the byte that the seed names."""
    data = joined(GIVEN_BACK if request.json.get("user") == "given back" else GOOD)
    at = request.json["seed"]
    await answer.start_stream()
    if at:
        await answer.chunk(data[:at])
    await asyncio.sleep(0.005)
    await answer.chunk(data[at:])
    await answer.end()


async def post_all(stage: Scene, bodies: list[dict[str, Any]]) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(body: dict[str, Any]) -> Reply:
        async with gate:
            return await stage.post(CHAT, body)

    return await asyncio.gather(*(one(body) for body in bodies))


# --- C15


@pytest.mark.case("C15")
async def test_stream_cut_at_any_byte_reads_the_same() -> None:
    size = len(joined(GOOD))

    async with scene(d=[cut_at]) as stage:
        replies = await post_all(stage, [chat(stream=True, seed=at) for at in range(size)])
        await stage.assert_quiescent()

    for reply in replies:
        assert_whole_stream(reply)
        assert meaning(reply) == GOOD
        assert reply.body == replies[0].body


@pytest.mark.case("C15")
async def test_recompute_is_noticed_wherever_the_stream_is_cut() -> None:
    size = len(joined(GIVEN_BACK))
    bodies = [chat(stream=True, user="given back", seed=at) for at in range(size)]

    async with scene((None,), [cut_at], *NOT_CONTINUED) as stage:
        replies = await post_all(stage, bodies)
        await stage.assert_quiescent()

    for reply in replies:
        assert_given_back_is_honoured(reply)


@pytest.mark.case("C15")
async def test_every_write_to_the_client_holds_whole_events() -> None:
    sizes = range(0, len(joined(GOOD)), 7)

    async with scene(d=[cut_at]) as stage:
        replies = await post_all(stage, [chat(stream=True, seed=at) for at in sizes])

    for reply in replies:
        assert all(data.endswith(b"\n\n") for _, data in reply.chunks)


@pytest.mark.case("C15")
async def test_recomputed_answer_that_is_no_stream_is_an_error() -> None:
    async with scene((None,), [behaviours.recompute(3)], *NOT_CONTINUED) as stage:
        reply = await stage.post(CHAT, chat(max_tokens=9))
        await stage.assert_quiescent()

    assert reply.status == 503
    assert reply.error["type"]
    assert "choices" not in reply.json
    assert b"recomputed" not in reply.body


# --- C16

FOREIGN = ["é", "ß→", "你好", "世界", "😀", "🦀é你"]


def raw_event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def foreign_stream(end: dict[str, Any]) -> bytes:
    events = [ROLE, *(chunk(text) for text in FOREIGN), end]
    return b"".join(raw_event(event) for event in events) + DONE


async def single_bytes(request: EngineRequest, answer: Answer) -> None:
    """Stream text in raw UTF-8 with each byte of a multi-byte character in a piece of its own."""
    end = RECOMPUTED if request.json.get("user") == "given back" else STOP
    await answer.start_stream()
    piece = b""
    for byte in foreign_stream(end):
        piece += bytes([byte])
        if byte >= 0x80:
            await answer.chunk(piece)
            await asyncio.sleep(0.001)
            piece = b""
    await answer.chunk(piece)
    await answer.end()


@pytest.mark.case("C16")
async def test_characters_split_between_reads_arrive_whole() -> None:
    async with scene((None,), [single_bytes], *NOT_CONTINUED) as stage:
        good = await stage.post(CHAT, chat(stream=True))
        given_back = await stage.post(CHAT, chat(stream=True, user="given back"))
        await stage.assert_quiescent()

    assert_whole_stream(good)
    assert good.text == "".join(FOREIGN)
    assert good.body == foreign_stream(STOP)
    assert_ends_in_error(given_back)
    assert given_back.text == "".join(FOREIGN)
    assert "\ufffd" not in given_back.body.decode()


# --- C17


@pytest.mark.case("C17")
@pytest.mark.parametrize("gap", [b"", b"  ", b"\t"], ids=["none", "two-spaces", "tab"])
async def test_space_after_data_is_optional(gap: bytes) -> None:
    def spaced(events: list[dict[str, Any]]) -> list[bytes]:
        return [e.replace(b"data: ", b"data:" + gap) for e in behaviours.stream_bytes(events)]

    async with scene((None,), [behaviours.stream(spaced(GOOD))], *NOT_CONTINUED) as stage:
        stage.p1.cached_tokens = 5
        good = await stage.post(CHAT, chat(stream=True))
        stage.d1.behaviour = behaviours.stream(spaced(GIVEN_BACK))
        given_back = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert good.chunks_of_json[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert_whole_stream(good)
    assert meaning(good) == GOOD
    assert_given_back_is_honoured(given_back)


# --- C18

LINE_ENDS = {
    "lf": [joined(GOOD)],
    "crlf": [joined(GOOD).replace(b"\n", b"\r\n")],
    "cr": [joined(GOOD).replace(b"\n", b"\r")],
    "cr-lf-apart": [
        piece for line in joined(GOOD).split(b"\n")[:-1] for piece in (line + b"\r", 0.002, b"\n")
    ],
}


@pytest.mark.case("C18")
@pytest.mark.parametrize("pieces", LINE_ENDS.values(), ids=LINE_ENDS.keys())
async def test_any_line_end_gives_the_same_events(pieces: list[bytes | float]) -> None:
    async with scene(d=[behaviours.stream(pieces)]) as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert meaning(reply) == GOOD
    assert len(reply.events) == len(GOOD) + 1
    assert b"\r" not in reply.body


# --- C19


def with_comments(events: list[dict[str, Any]]) -> list[bytes | float]:
    """Return a stream with pings before, between and glued to its events, and other fields."""
    pieces: list[bytes | float] = [b":\n\n", b": ping\n\n", 0.01]
    for data in behaviours.stream_bytes(events):
        pieces += [b": ping\n" + data, b":\n\n" + b": ping\n\n", 0.001]
    pieces[3:3] = [b"event: ping\nid: 7\nretry: 10\n\n"]
    return pieces


@pytest.mark.case("C19")
async def test_comments_never_become_data() -> None:
    async with scene((None,), [behaviours.stream(with_comments(GOOD))], *NOT_CONTINUED) as stage:
        good = await stage.post(CHAT, chat(stream=True))
        stage.d1.behaviour = behaviours.stream(with_comments(GIVEN_BACK))
        given_back = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert_whole_stream(good)
    assert meaning(good) == GOOD
    assert b"ping" not in good.body
    assert_given_back_is_honoured(given_back)


@pytest.mark.case("C19")
async def test_event_names_and_ids_do_not_disturb() -> None:
    named = b"".join(b"event: message\nid: 3\nretry: 9\n" + event_bytes(e) for e in GOOD) + DONE

    async with scene(d=[behaviours.stream([named])]) as stage:
        reply = await stage.post(CHAT, chat(stream=True))

    assert_whole_stream(reply)
    assert meaning(reply) == GOOD


@pytest.mark.case("C19")
async def test_comment_does_not_release_the_prefillers_load() -> None:
    go_on = asyncio.Event()

    async def ping_then_talk(_: EngineRequest, answer: Answer) -> None:
        await answer.start_stream()
        await answer.chunk(b": ping\n\n")
        await go_on.wait()
        for event in behaviours.stream_bytes(GOOD):
            await answer.chunk(event)
        await answer.end()

    async with scene(d=[ping_then_talk]) as stage:
        asking = asyncio.get_running_loop().create_task(stage.post(CHAT, chat(stream=True)))
        await stage.d1.wait_for_calls(1)
        held = [await prefiller_load(stage) for _ in range(5)]
        go_on.set()
        assert_whole_stream(await asking)
        await stage.assert_quiescent()

    assert all(held), held


async def prefiller_load(stage: Scene) -> float:
    return sum(
        sample.value
        for sample in await metrics(stage.proxy)
        if sample.name == "pdproxy_instance_kv_tokens" and sample.labels["role"] == "prefill"
    )


# --- C20


@pytest.mark.case("C20")
async def test_two_mebibyte_event_between_small_ones_arrives_intact() -> None:
    long = chunk("x" * (2 << 20))
    events = [ROLE, chunk(" a"), long, chunk(" z"), STOP]

    async with scene(d=[behaviours.stream(behaviours.stream_bytes(events))]) as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert reply.body == joined(events)


@pytest.mark.case("C20")
async def test_twenty_mebibyte_answer_arrives_intact() -> None:
    said = {"choices": [{"index": 0, "message": {"content": "y" * (20 << 20)}}]}

    async with scene(d=[behaviours.json_answer(said)]) as stage:
        reply = await stage.post(CHAT, chat())
        await stage.assert_quiescent()

    assert reply.status == 200
    assert reply.json == said


# --- C21


@pytest.mark.case("C21")
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())], ids=["chat", "completions"]
)
async def test_streams_are_event_streams_and_documents_are_json(
    path: str, body: dict[str, Any]
) -> None:
    async with scene() as stage:
        streamed = await stage.post(path, {**body, "stream": True})
        documents = [
            await stage.post(path, {**body, **choice})
            for choice in ({"stream": False}, {}, {"stream": None})
        ]

    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    for document in documents:
        assert document.headers["content-type"].startswith("application/json")
        framing = {"content-length", "transfer-encoding"} & document.headers.keys()
        assert len(framing) == 1
        assert document.json["choices"]


@pytest.mark.case("C21")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_error_before_the_first_event_is_json_although_a_stream_was_asked_for(
    role: str,
) -> None:
    fail = behaviours.error(422)
    p, d = ([fail], [None]) if role == "prefill" else ([None], [fail])

    async with scene(p, d) as stage:
        reply = await stage.post(CHAT, chat(stream=True))

    assert reply.status == 422
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.error["message"]


# --- C22


@pytest.mark.case("C22")
async def test_each_token_reaches_the_client_before_the_next_one_is_made() -> None:
    received = asyncio.Queue[float]()
    sent: list[float] = []
    tokens = 30

    async def one_by_one(_: EngineRequest, answer: Answer) -> None:
        await answer.start_stream()
        await answer.event(ROLE)
        for number in range(tokens):
            await asyncio.sleep(0.01)
            sent.append(asyncio.get_running_loop().time())
            await answer.event(chunk(f" {number}"))
            async with asyncio.timeout(5):
                await received.get()
        for event in (event_bytes(STOP), DONE):
            await answer.chunk(event)
        await answer.end()

    async with scene(d=[one_by_one]) as stage, stage.streaming(chat(stream=True)) as (peer, reply):
        delays: list[float] = []
        while await peer.read_event(reply) is not None:
            if 0 < len(reply.events) - 1 <= tokens:
                delays.append(asyncio.get_running_loop().time() - sent[-1])
                received.put_nowait(0)

    assert_whole_stream(reply)
    assert reply.text == "".join(f" {number}" for number in range(tokens))
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    # Nagle's algorithm or a writer's buffer would hold back every token, not a few.
    assert statistics.median(delays) < 0.02


# --- C23

ODD_EVENTS: list[dict[str, Any]] = [
    {"id": "x", "choices": []},
    {"id": "x", "choices": None},
    {"id": "x", "object": "heartbeat"},
    {"id": "x", "choices": None, "usage": None},
]


@pytest.mark.case("C23")
@pytest.mark.parametrize("odd", ODD_EVENTS, ids=["empty", "null", "missing", "null-usage"])
@pytest.mark.parametrize("place", [1, 3], ids=["early", "late"])
async def test_event_without_choices_is_relayed_once_in_its_place(
    odd: dict[str, Any], place: int
) -> None:
    events = [*GOOD[:place], odd, *GOOD[place:5]]

    async with scene(d=[behaviours.stream(behaviours.stream_bytes(events))]) as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert reply.body == joined(events)


@pytest.mark.case("C23")
async def test_usage_that_the_engine_is_forced_to_send_stays_between_finish_and_done() -> None:
    async with scene(d=[behaviours.stream(behaviours.stream_bytes(GOOD))]) as stage:
        reply = await stage.post(CHAT, chat(stream=True))

    assert_whole_stream(reply)
    assert meaning(reply) == GOOD
    assert reply.chunks_of_json[-1]["choices"] == []
