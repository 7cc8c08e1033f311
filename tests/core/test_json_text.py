"""JSON is told from what is none, and its end is found, however its text is divided."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.core.json_text import JsonText
from tests.properties import UNHURRIED

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
CLOSED = VALUES.filter(lambda value: isinstance(value, str | list | dict))
DIALECTS = st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])


def fed(text: str, step: int = 1) -> tuple[JsonText, int]:
    """Return what read the text piece by piece, and how many characters it took."""
    reader, size = JsonText(), 0
    for at in range(0, len(text), step):
        size += reader.feed(text[at : at + step])
    return reader, size


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=pytest.fail)
    except ValueError:
        return False
    return True


@settings(UNHURRIED, max_examples=300)
@given(CLOSED, DIALECTS, st.integers(1, 9))
def test_value_ends_where_it_ends(value, dialect, step):
    text = json.dumps(value, **dialect)
    before, _ = fed(text[:-1], step)
    reader, size = fed(text + " and so on", step)

    assert not before.is_whole
    assert reader.is_whole
    assert size == len(text)
    assert reader.text == text


@settings(UNHURRIED, max_examples=300)
@given(VALUES, st.integers(1, 9))
def test_value_may_end_with_the_text(value, step):
    reader, _ = fed(json.dumps(value), step)

    assert reader.may_end


@settings(UNHURRIED, max_examples=500)
@given(VALUES, st.data())
def test_what_is_taken_for_whole_is_json(value, data):
    """One character is another, or lacks, or is there twice."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(["", text[at] * 2, *'{}[]",:0.eE-+ntu\\ \n\x00']))
    spoilt = text[:at] + other + text[at + 1 :]

    try:
        reader, size = fed(spoilt)
    except ValueError:
        assert not is_json(spoilt)
        return
    is_all = size == len(spoilt) or not spoilt[size:].strip(" \n")
    assert (reader.may_end and is_all) == is_json(spoilt)


@pytest.mark.parametrize(
    "text",
    [
        "}",
        "x",
        '{"a" 1',
        '{"a": 1,}',
        "{1",
        "[,",
        "[1,]",
        "[1 2",
        '["a": 1',
        '"\\x',
        '"\\u12g',
        '"\n',
        "[01,",
        "[1.,",
        "[nul,",
        "[-,",
        "+1",
        "1" * 500,
        "[" * 300,
    ],
)
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match="this"):
        fed(text)


@pytest.mark.parametrize("text", ["", " ", '{"a": 1', '"abc', "[1", "tru", "-", '"\\u12'])
def test_start_of_json_may_not_end(text):
    reader, size = fed(text)

    assert size == len(text)
    assert not reader.may_end
