"""JSON that goes on without its grammar ends where it ends, and is what was asked for."""

import pytest

from pdproxy.core.json_rest import JsonRest
from pdproxy.errors import RecomputeUnsupported

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def rest(text='{"a": '):
    found = JsonRest.behind(text, SCHEMA)
    assert found is not None
    return found


def event(text, **facts):
    return {"delta": {"content": text}, "token_ids": [1], **facts}


def test_text_of_the_value_passes():
    reader, choice = rest(), event("12")

    assert not reader.apply(choice)
    assert choice == event("12")


@pytest.mark.parametrize("shape", ["chat", "completions"])
def test_text_behind_the_value_is_left_out_and_ends_it(shape):
    reader = rest()
    text = "1}\n\nThis is"
    chat = event(text)
    choice = chat if shape == "chat" else {"text": text, "token_ids": [1, 2]}

    assert reader.apply(choice)
    assert choice["finish_reason"] == "stop"
    assert (chat["delta"]["content"] if shape == "chat" else choice["text"]) == "1}"
    assert choice["token_ids"]


def test_engine_ends_a_whole_value_itself():
    reader = rest()

    assert not reader.apply(event("1}"))
    assert not reader.apply(event("", finish_reason="stop", stop_reason=None))


@pytest.mark.parametrize("text", ["\n", " Well", "}"])
def test_next_text_ends_a_whole_value(text):
    reader = rest()
    reader.apply(event("1}"))
    choice = event(text, logprobs={"content": []})

    assert reader.apply(choice)
    assert choice["delta"]["content"] == ""
    assert choice["token_ids"] == []
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("reason", ["length", None])
def test_value_may_be_cut_again_or_reach_its_limit(reason):
    choice = event("1", finish_reason=reason)

    assert not rest().apply(choice)
    assert choice["finish_reason"] == reason


def test_stop_string_of_the_client_may_end_it_anywhere():
    assert not rest().apply(event("1", finish_reason="stop", stop_reason="2"))


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        pytest.param("one", None, "is no JSON", id="no JSON"),
        pytest.param("1", "stop", "ends before its end", id="half of it"),
        pytest.param("null}", None, "does not fit the schema", id="another type"),
        pytest.param("1.5} and", None, "does not fit the schema", id="with text behind"),
    ],
)
def test_what_is_not_what_was_asked_for_is_an_error(text, reason, said):
    with pytest.raises(RecomputeUnsupported, match=said):
        rest().apply(event(text, finish_reason=reason, stop_reason=None))


def test_client_is_told_what_does_not_fit():
    with pytest.raises(RecomputeUnsupported) as failure:
        rest().apply(event('"x"}'))

    assert failure.value.quote == "$.a is no integer"
    assert "$.a" not in failure.value.message


@pytest.mark.parametrize("text", ["Here is", '{"a": 1} and'])
def test_nothing_goes_on_behind_what_is_no_json(text):
    assert JsonRest.behind(text, SCHEMA) is None


def test_value_may_be_whole_already():
    assert rest('{"a": 1}\n').is_whole
    assert not rest('{"a": 1').is_whole


@pytest.mark.parametrize("schema", [None, {"pattern": "a"}])
def test_nothing_goes_on_under_a_schema_that_cannot_be_checked(schema):
    assert JsonRest.behind("{", schema) is None
