import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.core.answer import Answer, Held
from pdproxy.core.api import Api
from pdproxy.core.jsonfields import split_object
from pdproxy.core.planner import Abilities, Resume, note_echo, plan
from pdproxy.core.reply import Reply
from pdproxy.core.resume import Way
from pdproxy.core.seam import Seam, ending
from tests.core.making import END_ID, chat, chunks_of, completions, text_event
from tests.core.test_seam import APIS, CUTS, STEPS, bodies
from tests.core.toy_rounds import CONFIG, THINKER, Engine, Proxy, whole_by_client
from tests.properties import UNHURRIED

KNOWN = Abilities(reasoning_end_id=END_ID, max_model_len=100)


def fields_of(*choices, **extra):
    """Return the raw fields of a reply with these choices."""
    usage: dict[str, object] = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    usage["completion_tokens_details"] = {"reasoning_tokens": 1}
    reply = {"id": "r-1", "created": 7, "model": "m", "choices": list(choices), "usage": usage}
    reply |= {"prompt_token_ids": [1, 2], "kv_transfer_params": {"x": 1}, "extra": 1.50}
    return split_object(json.dumps({**reply, **extra}).encode())


def message(index=0, *, ids=(5, 6, 7), logprobs=None, **parts):
    """Return a choice of chat that was given back."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": None, "refusal": None, **parts},
        "logprobs": logprobs,
        "finish_reason": "stop",
        "stop_reason": "recomputed",
        "token_ids": None if ids is None else list(ids),
    }


def completion(text, *, ids=(5, 6, 7), logprobs=None):
    ends = {"finish_reason": "stop", "stop_reason": "recomputed", "logprobs": logprobs}
    return {"index": 0, "text": text, "token_ids": list(ids), "prompt_token_ids": [1, 2], **ends}


def reply_of(request, *choices, cut=(0,), **extra):
    answer = Answer(prompt_tokens=2)
    return answer, Reply(request, answer, fields_of(*choices, **extra), set(cut))


def go_on(request, answer, reply, *events, index=0):
    """Run one more round, which brings these events."""
    resume = plan(request, answer, index, KNOWN, is_delivered=False)
    assert isinstance(resume, Resume)
    if resume.way is Way.AGAIN:
        reply.restart(index)
    seam = Seam(request, answer, index, resume)
    for event in events:
        for chunk in chunks_of(seam.rewrite(event)):
            reply.add(chunk)
    return resume.way


def composed(reply):
    document = json.loads(reply.composed())
    return document, document["choices"]


END = {"finish_reason": "length", "stop_reason": None}


@pytest.mark.case("C37")
def test_one_document_holds_all_rounds():
    request = chat(max_tokens=9)
    answer, reply = reply_of(request, message(content="abc"))

    assert go_on(request, answer, reply, text_event("d", token_ids=[8])) is Way.IDS
    answer.give_back([0])
    go_on(request, answer, reply, text_event("ef", token_ids=[9, 10], **END))
    document, (choice,) = composed(reply)

    assert (document["id"], document["created"], document["model"]) == ("r-1", 7, "m")
    assert document["extra"] == 1.50
    assert "kv_transfer_params" not in document
    assert document["prompt_token_ids"] is None
    assert choice["message"] == {"role": "assistant", "content": "abcdef", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert choice["token_ids"] is None
    assert document["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "completion_tokens_details": None,
    }


def test_ids_are_joined_for_a_client_that_asked():
    request = completions(max_tokens=9, return_token_ids=True)
    answer, reply = reply_of(request, completion("abc"))

    go_on(request, answer, reply, text_event("d", token_ids=[8], **END))
    document, (choice,) = composed(reply)

    assert choice["token_ids"] == [5, 6, 7, 8]
    assert choice["prompt_token_ids"] == [1, 2]
    assert document["prompt_token_ids"] == [1, 2]


@pytest.mark.case("C28")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["reasoning"], id="reasoning"),
        pytest.param(["reasoning_content"], id="reasoning_content"),
        pytest.param(["reasoning", "reasoning_content"], id="both"),
    ],
)
def test_reasoning_stays_under_its_names(names):
    request = chat(max_tokens=20)
    answer, reply = reply_of(request, message(**dict.fromkeys(names, "hm"), ids=[5, 6]))
    at_end = {"finish_reason": "stop", "stop_reason": END_ID}

    thought = text_event(" so", token_ids=[8, END_ID], **at_end)
    assert go_on(request, answer, reply, thought) is Way.THINK
    assert go_on(request, answer, reply, text_event("Yes", token_ids=[9], **END)) is Way.IDS
    _, (choice,) = composed(reply)

    parts = {"role": "assistant", "content": "Yes", "refusal": None}
    assert choice["message"] == {**parts, **dict.fromkeys(names, "hm so")}


def test_without_content_the_message_has_none():
    request = chat(max_tokens=2)
    answer, reply = reply_of(request, message(reasoning="hm", ids=[5, 6]))

    for chunk in chunks_of(ending(request, answer, 0, "length")):
        reply.add(chunk)
    _, (choice,) = composed(reply)

    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"


@pytest.mark.case("C29")
def test_other_choices_stay_as_they_came():
    other = message(1, content="other", ids=[7, 8, 9]) | {"finish_reason": "stop"}
    other["stop_reason"] = None
    request = chat(n=2, max_tokens=9)
    answer, reply = reply_of(request, message(content="abc"), other)

    go_on(request, answer, reply, text_event("d", token_ids=[8], **END))
    document, choices = composed(reply)

    assert choices[0]["message"]["content"] == "abcd"
    assert choices[1] == {**other, "token_ids": None}
    assert document["usage"]["completion_tokens"] == 7


def test_usage_is_the_engines_where_it_gives_no_ids():
    request = completions(max_tokens=9)
    answer, reply = reply_of(request, completion("abc") | {"token_ids": None})
    usage = {"prompt_tokens": 9, "completion_tokens": 2}

    events = (text_event("d"), text_event("e", **END, usage=usage))
    assert go_on(request, answer, reply, *events) is Way.TEXT
    document, _ = composed(reply)

    assert document["usage"]["completion_tokens"] == 8


def test_a_reply_without_usage_gets_none():
    request = completions(max_tokens=9)
    answer, reply = reply_of(request, completion("abc"), usage=None)

    go_on(request, answer, reply, text_event("d", token_ids=[8], **END))

    assert composed(reply)[0]["usage"] is None


def test_log_probabilities_are_joined():
    request = completions(max_tokens=9, logprobs=1)
    first = {"tokens": ["ab", "c"], "text_offset": [0, 2], "token_logprobs": [-1, -2]}
    then = {"tokens": ["d"], "text_offset": [0], "token_logprobs": [-3]}
    answer, reply = reply_of(request, completion("abc", ids=[5, 6], logprobs=first))

    go_on(request, answer, reply, text_event("d", token_ids=[8], logprobs=then, **END))
    _, (choice,) = composed(reply)

    assert choice["logprobs"] == {
        "tokens": ["ab", "c", "d"],
        "text_offset": [0, 2, 3],
        "token_logprobs": [-1, -2, -3],
    }


@pytest.mark.case("C34")
def test_an_answer_made_again_keeps_the_echo_of_the_prompt():
    request = completions(echo=True, logprobs=1, max_tokens=9, structured_outputs={"regex": "x+"})
    first = {"tokens": ["on", "ce", "x"], "text_offset": [0, 2, 4], "token_logprobs": [None, 0, -1]}
    then = {"tokens": ["xx"], "text_offset": [0], "token_logprobs": [-2]}
    answer, reply = reply_of(request, completion("oncex", logprobs=first))
    note_echo(request, answer)

    event = text_event("xx", token_ids=[8], logprobs=then, **END)
    assert go_on(request, answer, reply, event) is Way.AGAIN
    _, (choice,) = composed(reply)

    assert choice["text"] == "oncexx"
    assert choice["logprobs"]["tokens"] == ["on", "ce", "xx"]
    assert choice["logprobs"]["text_offset"] == [0, 2, 4]


def test_tool_calls_are_composed():
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = chat(max_tokens=30, tools=tools)
    answer, reply = reply_of(request, message(content='<tool_call>{"na'))
    first = {"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}
    pieces = [first, {"index": 0, "function": {"arguments": "{}"}}]
    events = [
        text_event("", delta={"tool_calls": [piece]}, token_ids=[8], **end)
        for piece, end in zip(pieces, ({}, {"finish_reason": "tool_calls"}), strict=True)
    ]

    assert go_on(request, answer, reply, *events) is Way.AGAIN
    _, (choice,) = composed(reply)

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert choice["message"]["tool_calls"] == [call]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_whole_tool_calls_of_a_cut_reply_are_known():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer, _ = reply_of(chat(), message(tool_calls=[call, {**call, "id": "d"}]))

    calls = answer.choice(0).tool_calls
    assert [(place, each.id, each.name) for place, each in calls.items()] == [
        (0, "c", "f"),
        (1, "d", "f"),
    ]


def test_the_start_of_a_stop_string_is_taken_back_if_it_becomes_one():
    request = completions(max_tokens=9, stop=["END"])
    answer, reply = reply_of(request, completion("over EN"))
    assert answer.choice(0).held == Held("EN")

    go_on(request, answer, reply, text_event("D more", token_ids=[8]))
    _, (choice,) = composed(reply)

    assert choice["text"] == "over "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


# --- whole replies, cut anywhere


def check(proxy, api, body):
    """The client gets of the rounds what it gets of an answer that was not cut."""
    uncut = whole_by_client(Engine(proxy.engine.config).whole(api, body))

    got = whole_by_client(proxy.whole(api, body))

    assert got["choices"] == uncut["choices"]
    assert {**got["usage"], **uncut["usage"]} == got["usage"]


@pytest.mark.case("C37")
@settings(UNHURRIED, max_examples=80)
@given(st.data(), APIS, st.sampled_from([CONFIG, THINKER]), CUTS, STEPS)
def test_a_whole_reply_cut_anywhere_is_the_uncut_reply(data, api, config, cuts, steps):
    body = data.draw(bodies(api))

    check(Proxy(Engine(config, cuts=cuts, steps=steps)), api, body)


@settings(UNHURRIED, max_examples=60)
@given(st.data(), APIS, CUTS, st.booleans())
def test_a_whole_reply_ends_at_the_same_stop_string(data, api, cuts, shows_stops):
    body = data.draw(bodies(api, stop=[" a", " w", "s"], include_stop_str_in_output=shows_stops))

    check(Proxy(Engine(CONFIG, cuts=cuts)), api, body)


@pytest.mark.case("C29")
@settings(UNHURRIED, max_examples=40)
@given(st.data(), APIS, st.lists(st.integers(2, 14), max_size=5))
def test_each_choice_of_several_is_whole(data, api, cuts):
    body = data.draw(bodies(api, n=3))
    body["temperature"] = 1

    check(Proxy(Engine(CONFIG, cuts=cuts)), api, body)


@pytest.mark.case("C34")
@settings(UNHURRIED, max_examples=40)
@given(st.data(), CUTS)
def test_an_echo_is_there_once(data, cuts):
    body = data.draw(bodies(Api.COMPLETIONS, echo=True))
    body["prompt"] = "once upon a time"
    uncut = json.loads(Engine(CONFIG).whole(Api.COMPLETIONS, body))

    reply = json.loads(Proxy(Engine(CONFIG, cuts=cuts)).whole(Api.COMPLETIONS, body))

    text, wanted = reply["choices"][0]["text"], uncut["choices"][0]["text"]
    # Without ids tokens are counted by the engine, and half a character is counted twice.
    assert wanted.startswith(text)
    assert len(text) > len("once upon a time")
