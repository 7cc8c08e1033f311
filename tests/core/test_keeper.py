import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core import sse
from pdproxy.core.answer import Answer, Held
from pdproxy.core.keeper import Keeper, without_ids
from tests.core.making import chat_event, chunks_of, event, text_event
from tests.properties import UNHURRIED

ROLE = chat_event({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2])


def keeper(*, shows_ids=False, stops=()):
    kept = Keeper(Answer(), shows_ids=shows_ids, stops=stops)
    kept.note(ROLE)
    return kept


def only(kept):
    return kept.answer.choice(0)


# --- take: the short way


@pytest.mark.parametrize(
    ("block", "content", "reasoning"),
    [
        pytest.param(chat_event({"content": "a"}, token_ids=[5]), "a", "", id="chat"),
        pytest.param(chat_event({"reasoning": "a"}, token_ids=[5]), "", "a", id="reasoning"),
        pytest.param(
            chat_event({"reasoning": "a", "content": "b"}, token_ids=[5]), "b", "a", id="both"
        ),
        pytest.param(text_event("a", token_ids=[5]), "a", "", id="completion"),
    ],
)
def test_text_is_kept_with_its_ids_which_the_client_does_not_see(block, content, reasoning):
    kept = keeper()

    given = kept.take(block)

    assert given == block.replace(b"[5]", b"null")
    choice = only(kept)
    assert (str(choice.content), str(choice.reasoning)) == (content, reasoning)
    assert choice.token_ids.tolist() == [5]
    assert (choice.shown, choice.outputs, choice.has_all_ids) == (1, 1, True)


def test_ids_that_the_client_asked_for_stay():
    block = chat_event({"content": "a"}, token_ids=[5, 6])

    assert keeper(shows_ids=True).take(block) is block


def test_several_events_of_one_read_are_kept_in_order():
    kept = keeper()
    kept.note(chat_event({"role": "assistant"}, index=1))
    block = chat_event({"content": "a"}, token_ids=[5]) + chat_event(
        {"content": "b"}, token_ids=[6, 7], index=1
    )

    given = kept.take(block)

    assert [chunk["choices"][0]["token_ids"] for chunk in chunks_of(given)] == [None, None]
    assert str(only(kept).content) == "a"
    assert kept.answer.choice(1).token_ids.tolist() == [6, 7]


def test_an_engine_without_ids_is_noticed():
    kept = keeper()
    block = chat_event({"content": "a"})

    assert kept.take(block) is block
    assert not only(kept).has_all_ids
    assert only(kept).tokens == 1


@pytest.mark.parametrize("odd", [-1, 2**63, 10**40], ids=["negative", "too large", "huge"])
def test_ids_that_no_token_can_have_are_no_ids(odd):
    kept = keeper()
    block = chat_event({"content": "a"}, token_ids=[5, odd])

    assert kept.take(block) is None
    kept.note(block)

    choice = only(kept)
    assert (str(choice.content), choice.token_ids.tolist()) == ("a", [5])
    assert not choice.has_all_ids


def test_an_empty_list_is_text_that_was_held_back():
    kept = keeper()
    kept.take(chat_event({"content": "a"}, token_ids=[5]))
    kept.take(chat_event({"content": "b"}, token_ids=[]))

    assert only(kept).has_all_ids
    assert only(kept).flushed == 1


LOOKED_AT = [
    pytest.param(ROLE, id="role"),
    pytest.param(chat_event({"content": "a"}, finish_reason="stop"), id="finish"),
    pytest.param(chat_event({"content": "a"}, stop_reason=5), id="stop reason"),
    pytest.param(chat_event({"content": "a"}, logprobs={"content": []}), id="logprobs"),
    pytest.param(chat_event({"content": "a"}, usage={"completion_tokens": 1}), id="usage"),
    pytest.param(chat_event({}, token_ids=[5]), id="no text"),
    pytest.param(chat_event({"reasoning_content": "a"}), id="the older name of reasoning"),
    pytest.param(chat_event({"tool_calls": []}), id="tool calls"),
    pytest.param(chat_event({"content": "a"}, index=3), id="a new choice"),
    pytest.param(event(error={"message": "x"}), id="error"),
    pytest.param(sse.DONE, id="done"),
    pytest.param(b'data: {"choices":[{"index":0,"text":"\\ud800"}]}\n\n', id="half a surrogate"),
    pytest.param(b"data: " + b"[" * 5000 + b"\n\n", id="deep"),
]


@pytest.mark.parametrize("block", LOOKED_AT)
def test_other_events_need_a_look(block):
    kept = keeper()

    assert kept.take(block) is None
    assert kept.take(chat_event({"content": "a"}, token_ids=[5]) + block) is None
    assert str(only(kept).content) == ""
    assert not only(kept).token_ids


# --- note: any event


def test_identity_and_prompt_ids_come_with_the_first_event():
    answer = keeper().answer

    assert {k: json.loads(bytes(v)) for k, v in answer.identity.items()} == {
        "id": "chatcmpl-1",
        "created": 7,
        "model": "m",
    }
    assert answer.prompt_ids is not None
    assert json.loads(bytes(answer.prompt_ids)) == [1, 2]


def test_prompt_ids_of_completions_stand_in_the_choice():
    kept = Keeper(Answer(), shows_ids=False)

    given = kept.note(text_event("a", prompt_token_ids=[1, 2], token_ids=[5]))

    assert chunks_of(given)[0]["choices"][0]["prompt_token_ids"] is None
    assert kept.answer.prompt_ids is not None
    assert json.loads(bytes(kept.answer.prompt_ids)) == [1, 2]


@pytest.mark.case("C28")
def test_reasoning_keeps_the_name_that_it_came_under():
    kept = keeper()
    kept.note(chat_event({"reasoning_content": "a"}, token_ids=[5]))

    assert str(only(kept).reasoning) == "a"
    assert only(kept).reasoning_field == "reasoning_content"


def test_tool_calls_are_kept_piece_by_piece():
    kept = keeper()
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f"}}
    pieces = [first, {"index": 0, "function": {"arguments": "{"}}]
    for piece in (*pieces, {"index": 0, "function": {"arguments": "}"}}, {"index": 1, "id": "c2"}):
        kept.note(chat_event({"tool_calls": [piece]}, token_ids=[5]))

    calls = only(kept).tool_calls
    assert (calls[0].id, calls[0].name, calls[0].arguments) == ("c1", "f", "{}")
    assert calls[1].id == "c2"


def test_the_end_is_kept():
    kept = keeper()
    kept.note(chat_event({"content": "a"}, token_ids=[5], finish_reason="stop", stop_reason=None))

    assert only(kept).finish_reason == "stop"


def test_what_is_no_chunk_passes():
    for block in (sse.DONE, b"", b"data: 5\n\n"):
        assert keeper().note(block) == block


def test_text_with_half_a_surrogate_is_kept():
    kept = keeper()
    kept.note(b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83e"},"token_ids":[5]}]}\n\n')

    assert only(kept).text == "\ud83e"


@pytest.mark.case("C26")
def test_events_without_output_count_for_nothing():
    kept = keeper()
    for block in (ROLE, chat_event({}), chat_event({"content": ""})):
        kept.note(block)

    assert only(kept).tokens == 0
    assert only(kept).has_all_ids


def test_without_ids_the_engines_count_serves():
    kept = keeper()
    kept.note(chat_event({"content": "a"}, usage={"completion_tokens": 3}))
    assert only(kept).tokens == 3

    kept.note(event(choices=[], usage={"completion_tokens": 4}))
    assert only(kept).tokens == 4


# --- what shows nothing waits

HALF = {"token_ids": [6]}


def test_half_a_character_is_not_shown_until_the_other_half_comes():
    kept = keeper()
    kept.take(chat_event({"content": "a"}, token_ids=[5]))
    given = kept.note(chat_event({}, **HALF))

    assert chunks_of(given)[0]["choices"][0]["token_ids"] is None
    assert only(kept).resumable_ids(None) == [5]
    kept.take(chat_event({"content": "🦜"}, token_ids=[7]))
    assert only(kept).resumable_ids(None) == [5, 6, 7]


@pytest.mark.parametrize(
    ("shows_ids", "fields"),
    [
        pytest.param(True, HALF, id="ids"),
        pytest.param(False, {**HALF, "logprobs": {"content": [{}]}}, id="logprobs"),
        pytest.param(False, {**HALF, "usage": {"completion_tokens": 2}}, id="usage"),
    ],
)
def test_an_event_that_tells_of_unshown_tokens_waits_for_the_next_text(shows_ids, fields):
    kept = keeper(shows_ids=shows_ids)
    half, rest = chat_event({}, **fields), chat_event({"content": "🦜"}, token_ids=[7])

    assert kept.note(half) == b""
    assert kept.take(rest) is None
    given = kept.note(rest)

    assert given == (half + rest if shows_ids else without_ids(half + rest))
    assert kept.take(rest) is not None


def test_an_end_lets_nothing_wait():
    kept = keeper(shows_ids=True)
    half, end = chat_event({}, **HALF), chat_event({}, token_ids=[7], finish_reason="length")

    kept.note(half)

    assert kept.note(end) == half + end


# --- a choice that was given back


def cut_event(text, **fields):
    return chat_event({"content": text}, token_ids=[], **fields)


def test_text_that_was_held_back_belongs_to_the_answer():
    kept = keeper()
    kept.take(chat_event({"content": "a"}, token_ids=[5]))
    given = kept.note(cut_event("bc"), {0})

    assert chunks_of(given)[0]["choices"][0]["delta"] == {"content": "bc"}
    assert only(kept).text == "abc"
    assert only(kept).is_flushed


def test_half_a_character_at_the_end_is_neither_delivered_nor_kept():
    kept = keeper()
    kept.take(chat_event({"content": "a"}, token_ids=[5]))
    given = kept.note(cut_event("b\ufffd"), {0})

    assert chunks_of(given)[0]["choices"][0]["delta"] == {"content": "b"}
    assert only(kept).text == "ab"
    assert kept.note(cut_event("\ufffd"), {0}) == b""
    assert only(kept).text == "ab"


def test_the_start_of_a_stop_string_is_held():
    kept = keeper(stops=["END"])
    given = kept.note(cut_event("over EN"), {0})

    assert chunks_of(given)[0]["choices"][0]["delta"] == {"content": "over "}
    assert only(kept).held == Held("EN")
    assert only(kept).text == "over EN"


def test_other_choices_of_the_event_lose_nothing():
    kept = keeper(stops=["END"])
    kept.note(cut_event("over EN", index=1), {0})

    assert kept.answer.choice(1).text == "over EN"
    assert not kept.answer.choice(1).is_flushed


def test_a_choice_that_comes_back_with_nothing_said_is_marked():
    kept = keeper()

    assert kept.note(b"", {0}) == b""
    assert only(kept).is_flushed


# --- hiding ids


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        pytest.param(b'"token_ids":[5]', b'"token_ids":null', id="one"),
        pytest.param(b'"token_ids": [1, 2]', b'"token_ids":null', id="spaces"),
        pytest.param(b'"token_ids" :\n[ ]', b'"token_ids":null', id="empty"),
        pytest.param(b'"prompt_token_ids":[1,2]', b'"prompt_token_ids":null', id="prompt"),
        pytest.param(b'"token_ids":null', b'"token_ids":null', id="null"),
        pytest.param(
            rb'"text":"\"token_ids\":[5]"', rb'"text":"\"token_ids\":[5]"', id="escaped in text"
        ),
        pytest.param(b'"text":"token_ids"', b'"text":"token_ids"', id="a text that is the name"),
    ],
)
def test_lists_of_ids_become_null(given, hidden):
    body = b'{"a":1,%s,"b":[5]}'

    assert without_ids(body % given) == body % hidden
    assert without_ids(b"data: " + body % given + b"\n\n") == b"data: " + body % hidden + b"\n\n"


@UNHURRIED
@given(st.text(), st.lists(st.integers(0, 1 << 31)), st.booleans())
def test_hiding_ids_changes_no_text(text, ids, has_spaces):
    value = {"text": text, "token_ids": ids, "choices": [{"prompt_token_ids": ids, text: "x"}]}
    wanted = {**value, "token_ids": None, "choices": [{"prompt_token_ids": None, text: "x"}]}
    if text in {"token_ids", "prompt_token_ids"}:
        return
    separators = None if has_spaces else (",", ":")

    hidden = without_ids(json.dumps(value, separators=separators).encode())

    assert json.loads(hidden) == wanted


def test_a_whole_reply_is_hidden_from_who_did_not_ask():
    body = b'{"choices":[{"token_ids":[1]}]}'

    assert keeper().hide(body) == b'{"choices":[{"token_ids":null}]}'
    assert keeper(shows_ids=True).hide(body) is body
