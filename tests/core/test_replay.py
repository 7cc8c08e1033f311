import pytest

from pdproxy.core.answer import ToolCall
from pdproxy.core.replay import Skip, first_tokens
from pdproxy.errors import RecomputeUnsupported
from tests.core.making import answer_of, chunks_of, text_event


def applied(skip, choice):
    skip.apply(choice)
    return choice


def test_known_text_is_taken_out_across_events():
    skip = Skip(answer_of("Hello", reasoning="So", ids=[1, 2, 3]).choice(0))

    assert applied(skip, {"delta": {"reasoning": "So", "content": "Hel"}})["delta"] == {
        "reasoning": "",
        "content": "",
    }
    assert applied(skip, {"delta": {"content": "lo there"}})["delta"] == {"content": " there"}


def test_known_text_of_a_completion_is_taken_out():
    skip = Skip(answer_of("onceHello", ids=[1], echoed=4).choice(0))

    assert applied(skip, {"text": "Hello!"})["text"] == "!"


def test_known_ids_are_taken_out_with_their_log_probabilities():
    skip = Skip(answer_of("ab", ids=[1, 2]).choice(0))
    choice = {"text": "abc", "token_ids": [1, 2, 3], "logprobs": {"tokens": ["a", "b", "c"]}}

    assert applied(skip, choice) == {
        "text": "c",
        "token_ids": [3],
        "logprobs": {"tokens": ["c"]},
    }


def test_log_probabilities_of_known_tokens_only_go_altogether():
    skip = Skip(answer_of("ab", ids=[1, 2]).choice(0))
    choice = {"delta": {"content": "a"}, "token_ids": [1], "logprobs": {"content": [{}]}}

    assert applied(skip, choice)["logprobs"] is None


def test_a_tool_call_goes_on_under_its_id():
    answer = answer_of(ids=[1])
    answer.choice(0).tool_calls[0] = ToolCall("call-1", "f", '{"a"')
    skip = Skip(answer.choice(0))
    first = {"index": 0, "id": "call-2", "type": "function", "function": {"name": "f"}}
    known = {"index": 0, "function": {"arguments": '{"a'}}
    new = {"index": 0, "function": {"arguments": '": 1}'}}
    other = {"index": 1, "id": "call-3", "function": {"name": "g"}}

    assert applied(skip, {"delta": {"tool_calls": [first, known]}})["delta"]["tool_calls"] == []
    assert applied(skip, {"delta": {"tool_calls": [new, other]}})["delta"]["tool_calls"] == [
        {"index": 0, "function": {"arguments": ": 1}"}},
        other,
    ]


@pytest.mark.parametrize(
    "delta",
    [
        pytest.param({"content": "Hullo"}, id="content"),
        pytest.param({"reasoning": "No"}, id="reasoning"),
        pytest.param({"tool_calls": [{"index": 0, "function": {"name": "g"}}]}, id="tool"),
        pytest.param({"tool_calls": [{"function": {"arguments": "[]"}}]}, id="arguments"),
    ],
)
def test_another_answer_is_refused(delta):
    answer = answer_of("Hello", reasoning="So", ids=[1])
    answer.choice(0).tool_calls[0] = ToolCall("call-1", "f", '{"a"')

    with pytest.raises(RecomputeUnsupported, match="replay differs"):
        Skip(answer.choice(0)).apply({"delta": delta})


def test_the_first_tokens_of_an_event_can_be_kept():
    logprobs = {"tokens": ["", "a"], "text_offset": [4, 4]}
    event = text_event("", token_ids=[8, 9], logprobs=logprobs)

    kept, offset = first_tokens(event, 1)

    (choice,) = chunks_of(kept)[0]["choices"]
    assert choice["token_ids"] == [8]
    assert choice["logprobs"] == {"tokens": [""], "text_offset": [4]}
    assert offset == 4
    assert first_tokens(event, 2) == (b"", 4)
    assert first_tokens(text_event("", token_ids=[8]), 1) == (b"", None)
