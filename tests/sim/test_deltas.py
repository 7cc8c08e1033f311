import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.sim.deltas import DeltaParser, parse_whole

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}{\\"", "b": [1, {}]}'


def feed_all(parser, pieces):
    """Reasoning, content, names and arguments of all deltas."""
    reasoning, content = "", ""
    names: list[str] = []
    arguments: dict[int, str] = {}
    for position, piece in enumerate(pieces):
        delta = parser.feed(piece, is_last=position == len(pieces) - 1)
        reasoning += delta.get("reasoning", "")
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "name" in function:
                names.append(function["name"])
            arguments.setdefault(call["index"], "")
            arguments[call["index"]] += function.get("arguments", "")
    return reasoning, content, names, arguments


@st.composite
def pieces_of(draw, text):
    cuts = sorted(draw(st.sets(st.integers(1, len(text) - 1))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces_of(f"so I think</think>Well {CALL}{CALL}"))
def test_however_the_text_is_cut_the_parts_are_the_same(pieces):
    parser = DeltaParser(is_thinking=True, parses_tools=True)

    reasoning, content, names, arguments = feed_all(parser, pieces)

    assert (reasoning, content) == ("so I think", "Well ")
    assert names == ["f", "f"]
    assert arguments == {0: ARGUMENTS, 1: ARGUMENTS}
    assert parser.calls == 2


def test_what_looks_like_a_marker_comes_out_at_the_end():
    parser = DeltaParser(is_thinking=False, parses_tools=True)

    assert parser.feed("a <tool", is_last=False) == {"content": "a "}
    assert parser.feed("", is_last=True) == {"content": "<tool"}


def test_without_tools_a_call_is_content():
    parser = DeltaParser(is_thinking=False, parses_tools=False)

    assert parser.feed(CALL, is_last=True) == {"content": CALL}


def test_a_whole_call_is_parsed():
    answer = parse_whole("Well " + CALL, splits_reasoning=False, parses_tools=True)

    assert answer.content == "Well "
    assert answer.calls[0]["function"] == {"name": "f", "arguments": ARGUMENTS}
    assert orjson.loads(ARGUMENTS) == {"a": '}{"', "b": [1, {}]}


@pytest.mark.parametrize("length", [5, 30, len(CALL) - 3])
def test_a_call_cut_off_stays_content(length):
    answer = parse_whole(CALL[:length], splits_reasoning=False, parses_tools=True)

    assert (answer.content, answer.calls) == (CALL[:length], [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("a</think>b", "a", "b"), ("a</think>", "a", None), ("ab", "ab", None)],
    ids=["both", "marker-last", "no-marker"],
)
def test_reasoning_of_a_whole_answer_ends_at_its_marker(text, reasoning, content):
    answer = parse_whole(text, splits_reasoning=True, parses_tools=False)

    assert (answer.reasoning, answer.content) == (reasoning, content)
