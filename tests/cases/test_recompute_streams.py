"""A stream that a decoder gives back reaches the client as one answer."""

from __future__ import annotations

import itertools

import pytest

from tests.cases.cuts import (
    HASTE,
    Event,
    cut_after,
    decodes,
    ends,
    handle_of,
    in_order,
    limit_of,
    prefills,
    prefix_of,
    scripted,
    spoken,
    text_of,
    usages,
)
from tests.cases.scene import CHAT, COMPLETIONS, chat, completion, scene
from tests.fakes import behaviours, toy
from tests.fakes.client import Reply, assert_whole_stream

IDS = pytest.mark.parametrize("ids", ["auto", "always", "never"])
USAGE = {"stream_options": {"include_usage": True}}


def assert_one_answer(reply: Reply, text: str, finish_reason: str = "length") -> None:
    assert_whole_stream(reply)
    assert reply.text == text
    assert ends(reply) == [finish_reason]
    assert b"recomputed" not in reply.body


@pytest.mark.case("C24")
@IDS
async def test_completion_goes_on_in_a_second_round(ids):
    body = completion(stream=True, max_tokens=12, **USAGE)
    answer, cut = spoken(body, 12), cut_after(5)

    async with scene([None], [cut, cut], "--token-ids", ids) as stage:
        reply = await stage.post(COMPLETIONS, body)
        await stage.assert_quiescent()

    assert_one_answer(reply, text_of(answer))
    (_, p), (d1, d2) = prefills(stage), decodes(stage)
    assert prefix_of(p) == prefix_of(d2) == toy.prompts(body)[0] + answer[:5]
    assert (limit_of(p), limit_of(d2)) == (1, 7)
    assert handle_of(d1) != handle_of(d2)
    assert not d2.stale
    assert [usage["completion_tokens"] for usage in usages(reply)] == [12]
    assert usages(reply)[0]["prompt_tokens"] == len(toy.prompts(body)[0])


@pytest.mark.case("C24")
async def test_only_decoder_goes_on_with_what_it_gave_back():
    body = completion(stream=True, max_tokens=12)

    async with scene([None], [cut_after(5, 4)], *HASTE) as stage:
        reply = await stage.post(COMPLETIONS, body)

    assert_one_answer(reply, toy.answer(body, 12))
    assert [limit_of(call) for call in decodes(stage)] == [12, 7, 3]


@pytest.mark.case("C24")
async def test_other_decoder_goes_on_while_there_is_one():
    body = completion(stream=True, max_tokens=12)
    cut = cut_after(5)

    async with scene([None], [cut, cut]) as stage:
        reply = await stage.post(COMPLETIONS, body)

    assert_one_answer(reply, toy.answer(body, 12))
    assert [len(in_order([engine])) for engine in stage.decoders] == [1, 1]


@pytest.mark.case("C25")
@IDS
async def test_answer_so_far_is_no_part_of_the_question(ids):
    body = chat(stream=True, max_tokens=16)
    answer, cut = spoken(body, 16), cut_after(10)

    async with scene([None], [cut, cut], "--token-ids", ids) as stage:
        reply = await stage.post(CHAT, body)

    assert_one_answer(reply, text_of(answer))
    (_, p), (_, d2) = prefills(stage), decodes(stage)
    assert prefix_of(p) == prefix_of(d2) == toy.prompts(body)[0] + answer[:10]
    for call in (p, d2):
        assert "messages" not in call.json or call.json["messages"][:1] == body["messages"]


def with_empty_deltas(events: list[Event]) -> list[Event]:
    """Two events without output behind the role."""
    empty = {"index": 0, "delta": {"content": ""}, "finish_reason": None}
    return [events[0], *[{**events[0], "choices": [empty]}] * 2, *events[1:]]


@pytest.mark.case("C26")
@IDS
@pytest.mark.parametrize(
    ("cuts", "limits"), [((5,), [12, 7]), ((3, 3, 3), [12, 9, 6, 3])], ids=["one-cut", "three-cuts"]
)
async def test_events_without_output_are_no_tokens(ids, cuts, limits):
    body = chat(stream=True, max_tokens=12, **USAGE)
    cut = [scripted(count, with_empty_deltas) for count in cuts]
    d = behaviours.one_after_another(*cut, behaviours.decode)

    async with scene([None], [d, d], "--token-ids", ids, *HASTE) as stage:
        reply = await stage.post(CHAT, body)

    assert_one_answer(reply, toy.answer(body, 12))
    assert [limit_of(call) for call in decodes(stage)] == limits
    assert [usage["completion_tokens"] for usage in usages(reply)] == [12]


@pytest.mark.case("C27")
@IDS
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_whole_stream_has_one_identity_and_one_role(ids, path):
    make = chat if path == CHAT else completion
    body = make(stream=True, max_tokens=9, **USAGE)
    times = itertools.count(1_700_000_000)

    def renamed(events: list[Event]) -> list[Event]:
        created = next(times)
        return [{**event, "created": created, "model": f"toy-{created}"} for event in events]

    last = scripted(3, renamed, "length", None)
    d = behaviours.one_after_another(scripted(3, renamed), scripted(3, renamed), last)

    async with scene([None], [d], "--token-ids", ids, *HASTE) as stage:
        reply = await stage.post(path, body)

    assert_one_answer(reply, toy.answer(body, 9))
    chunks = reply.chunks_of_json
    heads = {(each["id"], each["created"], each["model"], each["object"]) for each in chunks}
    assert len(heads) == 1
    deltas = [choice.get("delta", {}) for each in chunks for choice in each["choices"]]
    assert sum("role" in delta for delta in deltas) == (path == CHAT)
    # The role, nine words, the end, the usage: no event of a later round is there for nothing.
    assert len(chunks) == (12 if path == CHAT else 11)


@pytest.mark.case("C33")
@pytest.mark.parametrize(
    ("ids", "size"),
    [("auto", 1), ("always", 1), ("never", 1), ("auto", 100_000)],
    ids=["auto", "always", "never", "100k-ids"],
)
async def test_token_ids_are_added_to_a_prompt_of_token_ids(ids, size):
    prompt = [token % 900 for token in range(1, size + 1)]
    body = completion(prompt=prompt, stream=True, max_tokens=7)
    answer, cut = spoken(body, 7), cut_after(4)

    async with scene([None], [cut, cut], "--token-ids", ids) as stage:
        reply = await stage.post(COMPLETIONS, body)

    if ids == "never":  # nothing tells which ids the words were
        assert reply.text == text_of(answer[:4])
        assert "cannot be continued" in reply.chunks_of_json[-1]["error"]["message"]
        return
    assert_one_answer(reply, text_of(answer))
    assert b'token_ids":[' not in reply.body
    (_, p), (_, d2) = prefills(stage), decodes(stage)
    assert p.json["prompt"] == d2.json["prompt"] == prompt + answer[:4]


@pytest.mark.case("C39")
@IDS
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answer_cut_at_its_limit_is_complete(ids, path):
    make = chat if path == CHAT else completion
    body = make(stream=True, max_tokens=8, **USAGE)

    async with scene([None], [cut_after(8)], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)
        await stage.assert_quiescent()

    assert_one_answer(reply, toy.answer(body, 8))
    assert [usage["completion_tokens"] for usage in usages(reply)] == [8]
    assert (len(prefills(stage)), len(decodes(stage))) == (1, 1)
