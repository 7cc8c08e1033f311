"""Of several choices only what was cut goes on; only `stop_reason` tells that it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.cuts import (
    Edit,
    Event,
    decodes,
    ends,
    limit_of,
    prefills,
    prefix_of,
    scripted,
    spoken,
    text_of,
)
from tests.cases.scene import CHAT, COMPLETIONS, chat, completion, scene
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import Reply, assert_whole_stream
from tests.fakes.client import text_of as text_in

ALL, CUT = 20, 5  # tokens of a choice, and of one that is dropped
IDS = pytest.mark.parametrize("ids", ["auto", "always"])
DROPPED = pytest.mark.parametrize(
    "dropped", [{0}, {1}, {0, 1}], ids=["the-first", "the-second", "both"]
)
MARKER = {"finish_reason": "stop", "stop_reason": "recomputed"}


def dropping(dropped: set[int], *, pairs: bool) -> Edit:
    """The engine drops some choices after a few tokens; in pairs, an event carries both choices."""

    def edit(events: list[Event]) -> list[Event]:
        said = dict.fromkeys(dropped, 0)
        kept: list[Event] = []
        for event in events:
            choice = event["choices"][0]
            index = choice["index"]
            is_word = not choice.get("delta", {}).get("role")
            if index in said and is_word:
                said[index] += 1
                if said[index] > CUT + 1:
                    continue
                if said[index] == CUT + 1:
                    choice = {**_silent(choice), **MARKER}
            kept.append({**event, "choices": [choice]})
        return _paired(kept) if pairs else kept

    return edit


def _silent(choice: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"delta": {}} if "delta" in choice else {"text": ""}
    return {**choice, **empty, **({"token_ids": []} if "token_ids" in choice else {})}


def _paired(events: list[Event]) -> list[Event]:
    """Join neighbours of different choices into one event."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1]["choices"] if joined else []
        if len(last) == 1 and last[0]["index"] != event["choices"][0]["index"]:
            joined[-1] = {**joined[-1], **event, "choices": [*last, *event["choices"]]}
        else:
            joined.append(event)
    return joined


def expected(body: dict[str, Any], index: int, dropped: set[int]) -> str:
    """The text of a choice; one that goes on alone is sampled as an engine's only choice."""
    if index not in dropped:
        return text_of(spoken(body, ALL, index))
    begun = spoken(body, CUT, index)
    return text_of([*begun, *toy.speak([*toy.prompts(body)[0], *begun], ALL - CUT)])


def text_at(reply: Reply, index: int) -> str:
    return "".join(text_in(chunk, index) for chunk in reply.chunks_of_json)


@pytest.mark.case("C29")
@IDS
@DROPPED
@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "in-one-event"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_dropped_choice_of_a_stream_goes_on_alone(ids, dropped, pairs, path):
    make = chat if path == CHAT else completion
    body = make(stream=True, n=2, max_tokens=ALL)
    first = scripted(ALL, dropping(dropped, pairs=pairs), "length", None)
    d = behaviours.one_after_another(first, behaviours.decode)

    async with scene([None], [d, d], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert b"recomputed" not in reply.body
    for index in (0, 1):
        assert text_at(reply, index) == expected(body, index, dropped)
        assert ends(reply, index) == ["length"]
    assert len(decodes(stage)) == 1 + len(dropped)
    for index, call in zip(sorted(dropped), decodes(stage)[1:], strict=True):
        assert call.json.get("n", 1) == 1
        assert prefix_of(call) == toy.prompts(body)[0] + spoken(body, CUT, index)
        assert limit_of(call) == ALL - CUT


def dropping_of_whole(dropped: set[int]) -> Behaviour:
    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        reply = behaviours.whole_body(request, ALL, finish_reason="length")
        short = behaviours.whole_body(request, CUT, finish_reason="stop")
        for index in dropped:
            reply["choices"][index] = {**short["choices"][index], **MARKER}
        left = CUT * len(dropped) + ALL * (2 - len(dropped))
        reply["usage"] = behaviours.usage_of(request, left)
        await answer.json(reply)

    return behaviour


@pytest.mark.case("C29")
@IDS
@DROPPED
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_dropped_choice_of_a_whole_answer_goes_on_alone_or_anew(ids, dropped, path):
    make = chat if path == CHAT else completion
    body = make(n=2, max_tokens=ALL)
    d = behaviours.one_after_another(dropping_of_whole(dropped), behaviours.decode)

    async with scene([None], [d, d], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)

    assert reply.status == 200
    assert b"recomputed" not in reply.body
    for index in (0, 1):
        wanted = expected(body, index, dropped)
        if ids == "auto" and index in dropped:  # the usage does not tell how long each is
            wanted = text_of(spoken(body, ALL))
        assert text_in(reply.json, index) == wanted
        assert ends(reply, index) == ["length"]
    if ids == "always":
        assert reply.json["usage"]["completion_tokens"] == 2 * ALL


def last_choice(**changes: Any) -> Edit:
    def edit(events: list[Event]) -> list[Event]:
        (choice,) = events[-1]["choices"]
        return [*events[:-1], {**events[-1], "choices": [{**choice, **changes}]}]

    return edit


@pytest.mark.case("C40")
@pytest.mark.parametrize("finish_reason", ["stop", "tool_calls", "length"])
async def test_marker_counts_beside_any_finish_reason(finish_reason):
    body = chat(stream=True, max_tokens=9)
    first = scripted(4, last_choice(finish_reason=finish_reason))

    async with scene([None], [behaviours.one_after_another(first, behaviours.decode)]) as stage:
        reply = await stage.post(CHAT, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 9)
    assert ends(reply) == ["length"]


@pytest.mark.case("C40")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"stop_reason": 154829}, id="token-id"),
        pytest.param({"stop_reason": None, "delta": {"content": "recomputed"}}, id="in-text"),
        pytest.param({"stop_reason": None, "extra": {"stop_reason": "recomputed"}}, id="nested"),
        pytest.param({"stop_reason": None, "reason": "recomputed"}, id="other-key"),
    ],
)
async def test_nothing_but_the_marker_is_taken_for_it(changes):
    body = chat(stream=True, max_tokens=9)

    async with scene([None], [scripted(4, last_choice(**changes))]) as stage:
        reply = await stage.post(CHAT, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 4) + changes.get("delta", {}).get("content", "")
    assert ends(reply) == ["stop"]
    (last,) = reply.chunks_of_json[-1]["choices"]
    assert changes.items() <= last.items()
    assert (len(prefills(stage)), len(decodes(stage))) == (1, 1)


@pytest.mark.case("C40")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_clients_own_stop_string_is_no_marker(stream):
    body = chat(stream=stream, max_tokens=9, stop=["recomputed"])

    async with scene([None], [behaviours.recompute(4)]) as stage:
        reply = await stage.post(CHAT, body)

    assert reply.text == toy.answer(body, 4)
    assert ends(reply) == ["stop"]
    document = reply.chunks_of_json[-1] if stream else reply.json
    assert document["choices"][0]["stop_reason"] == "recomputed"
    assert len(decodes(stage)) == 1
