"""A tool call that was cut is read on from its text, whatever of it was delivered."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.answer import ToolCall
from pdproxy.core.call_markup import HERMES, KIMI, CallReader, read_on
from pdproxy.core.plain import Object
from pdproxy.errors import RecomputeUnsupported

TEXT = st.sampled_from(["", "a b", "}", "}} ", '"', "</tool", "<|tool_call", "line\nline", "é→🙂"])
VALUES = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    json.dumps,
    st.dictionaries(st.sampled_from(["city", "n", "x y"]), VALUES, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
SPACE = st.sampled_from(["", " ", "\n"])


Part = tuple[str, int, str]  # what it is: "markup", "name" or "arguments"; of which call; the text


@st.composite
def hermes(draw, arguments):
    parts = [("markup", 0, draw(st.sampled_from(["", "Sure. "])))]
    for index, each in enumerate(arguments):
        head = f'<tool_call>{draw(SPACE)}{{"name": "f{index}"'
        parts += [("name", index, head), ("markup", index, ', "arguments": ')]
        parts += [("arguments", index, each), ("markup", index, f"}}{draw(SPACE)}</tool_call>")]
    return parts


@st.composite
def kimi(draw, arguments):
    parts = [("markup", 0, "<|tool_calls_section_begin|>")]
    for index, each in enumerate(arguments):
        head = f"<|tool_call_begin|>{draw(SPACE)}functions.f{index}:{index}{draw(SPACE)}"
        parts += [("name", index, f"{head}<|tool_call_argument_begin|>")]
        parts += [("arguments", index, each), ("markup", index, "<|tool_call_end|>")]
    return [*parts, ("markup", 0, "<|tool_calls_section_end|>")]


def delivered_of(parts: list[Part], size: int) -> dict[int, ToolCall]:
    """What a parser has delivered once so many characters are there."""
    calls: dict[int, ToolCall] = {}
    for what, index, text in parts:
        if what == "name" and size >= len(text):
            calls[index] = ToolCall(f"id{index}", f"f{index}")
        if what == "arguments" and index in calls:
            calls[index].arguments = text[: max(0, size)]
        size -= len(text)
    return calls


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def reading(text: str, told: dict[int, ToolCall]) -> tuple[CallReader, list[Object]]:
    found = read_on(text, told)
    assert found is not None
    return found


def calls_in(reader: CallReader, text: str, size: int) -> list[ToolCall]:
    """Feed pieces of a size, as a stream of tokens does."""
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
    return reader.calls


def add(calls: dict[int, ToolCall], pieces: list[Any]) -> None:
    for piece in pieces:
        call = calls.setdefault(piece["index"], ToolCall(piece.get("id", "")))
        call.name += piece["function"].get("name", "")
        call.arguments += piece["function"]["arguments"]


@pytest.mark.case("C37")
@given(
    st.data(),
    st.lists(ARGUMENTS, min_size=1, max_size=3),
    st.sampled_from([hermes, kimi]),
    st.lists(st.integers(0, 400), max_size=9),
)
def test_calls_that_were_cut_anywhere_are_the_whole_calls(data, arguments, write, cuts):
    parts = data.draw(write(arguments))
    text = "".join(part for _, _, part in parts)
    cut = data.draw(st.integers(len(parts[0][2] + parts[1][2]), len(text)))
    told = delivered_of(parts, cut)
    last = told[max(told)]  # parsers lag behind the text by as much as they like
    last.arguments = last.arguments[: data.draw(st.integers(0, len(last.arguments)))]

    reader, missing = reading(text[:cut], told)
    add(told, missing)
    for piece in pieces_of(text[cut:], cuts):
        add(told, reader.feed(piece))
    add(told, reader.end())

    assert [call.arguments.rstrip() for call in told.values()] == arguments
    assert [call.name for call in told.values()] == [f"f{i}" for i in range(len(arguments))]
    assert all(call.id for call in told.values())


@pytest.mark.parametrize("inner", ['{"a": {"b": 1}}', "{}", '{"a": "}"}'])
def test_the_brace_around_name_and_arguments_is_none_of_the_arguments(inner):
    text = f'<tool_call>{{"name": "f", "arguments": {inner}}}</tool_call>'
    for cut in range(text.index("arguments") + 13, len(text)):
        told = {0: ToolCall("id0", "f")}
        reader, missing = reading(text[:cut], told)
        add(told, missing)
        for character in text[cut:]:
            add(told, reader.feed(character))

        assert told[0].arguments == inner


@pytest.mark.parametrize(
    "told",
    [
        {0: ToolCall("id0", "g")},
        {0: ToolCall("id0", "f", '{"b')},
        {0: ToolCall("id0", "f", '{"a": 1}  ')},
        {0: ToolCall("id0", "f"), 1: ToolCall("id1", "f")},
    ],
    ids=["another name", "other arguments", "more", "one call more"],
)
def test_text_that_says_something_else_is_not_read_on(told):
    assert read_on('<tool_call>{"name": "f", "arguments": {"a": 1', told) is None


@pytest.mark.parametrize(
    "text", ["", "just text", "<function=f><parameter=a>1", '<tool_call><function=f>{"a": 1}']
)
def test_markup_that_is_not_known_is_not_read_on(text):
    assert read_on(text, {0: ToolCall("id0", "f", "")}) is None


def test_a_call_without_an_end_of_its_head_is_refused():
    reader = CallReader(HERMES)
    with pytest.raises(RecomputeUnsupported, match="tool call"):
        reader.feed("<tool_call>" + "x" * 5000)


def test_a_new_call_keeps_its_own_id_or_gets_a_unique_one():
    for markup, text, expected in (
        (KIMI, "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}", "functions.f:3"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "chatcmpl-tool-x-0"),
    ):
        reader = CallReader(markup, "x")
        assert reader.feed(text)[0]["id"] == expected


@pytest.mark.parametrize(
    ("rest", "arguments"),
    [("1}}", '{"a": 1}'), ("1}", '{"a": 1}'), ("1", '{"a": 1'), ("1}}</tool", '{"a": 1}')],
)
def test_what_waits_is_said_when_the_answer_ends(rest, arguments):
    told = {0: ToolCall("id0", "f")}
    reader, missing = reading('<tool_call>{"name": "f", "arguments": {"a": ', told)
    add(told, missing + reader.feed(rest) + reader.end())

    assert told[0].arguments == arguments


def test_arguments_without_the_white_space_that_a_parser_took_off_stay_so():
    begun = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>\n "
    told = {0: ToolCall("functions.f:0", "f", '{"a"')}

    reader, missing = reading(begun + '{"a"', told)
    add(told, missing + reader.feed(": 1}<|tool_call_end|>"))

    assert told[0].arguments == '{"a": 1}'


@pytest.mark.parametrize("brace", ["", "}"])
def test_a_call_without_arguments_does_not_hide_the_next_one(brace):
    reader = CallReader(HERMES)
    calls: dict[int, ToolCall] = {}

    for character in f'<tool_call>{{"name": "f"{brace} </tool_call><tool_call>{{"name": "g", "arg':
        add(calls, reader.feed(character))
    add(calls, reader.feed('uments": {}}</tool_call>'))

    assert [(call.name, call.arguments) for call in calls.values()] == [("f", ""), ("g", "{}")]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (HERMES, '<tool_call>{"arguments": {}, "name": "f"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "parameters": {}}</tool_call>'),
        (KIMI, "<|tool_call_begin|>f<|tool_call_end|>"),
    ],
    ids=["arguments first", "another name for them", "no number"],
)
def test_a_call_that_ends_before_its_head_is_read_is_refused_and_not_left_out(markup, text):
    with pytest.raises(RecomputeUnsupported, match="tool call"):
        CallReader(markup).feed(text)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}%s}</tool_call>',
        '<tool_call>{"name": "f"%s}</tool_call>',
        "<|tool_call_begin|>%sfunctions.f:0%s<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ],
    ids=["in the arguments", "behind them", "in place of them", "around a name"],
)
def test_a_long_run_of_white_space_takes_no_longer_than_text(text):
    """Steps that go with its cube would take years here."""
    size = 2000 if "arguments" not in text else 30_000
    text = text.replace("%s", " " * size)
    markup = KIMI if text.startswith("<|") else HERMES
    begun_s = time.process_time()

    (call,) = calls_in(CallReader(markup), text, 16)

    assert call.name == "f"
    assert time.process_time() - begun_s < 5
