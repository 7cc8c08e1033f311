import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.core.answer import Held, ToolCall
from pdproxy.core.api import Api
from pdproxy.core.planner import Abilities, Resume, plan
from pdproxy.core.resume import Way
from pdproxy.core.seam import Seam, ending
from pdproxy.errors import RecomputeUnsupported
from pdproxy.sim import tokenizer
from tests.core.making import (
    END_ID,
    answer_of,
    chat,
    chat_event,
    chunks_of,
    completions,
    event,
    text_event,
)
from tests.core.toy_rounds import CONFIG, THINKER, Engine, Proxy, seen_by_client
from tests.properties import UNHURRIED

KNOWN = Abilities(reasoning_end_id=END_ID, max_model_len=100)
DONE = b"data: [DONE]\n\n"
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


def seam_of(request, answer, way):
    """Return the seam of the next round, which must be of that way."""
    for name in ("id", "created", "model"):
        answer.identity[name] = b'"first"' if name != "created" else b"1"
    resume = plan(request, answer, 0, KNOWN, is_delivered=True)
    assert isinstance(resume, Resume)
    assert resume.way is way
    return Seam(request, answer, 0, resume)


def content(**facts):
    return answer_of("abc", ids=[5, 6, 7], **facts)


def thoughts(**facts):
    return answer_of(reasoning="hm", ids=[5, 6], **facts)


def one(block):
    """Return the only chunk of a block and its choice."""
    (chunk,) = chunks_of(block)
    (choice,) = chunk["choices"]
    return chunk, choice


# --- what all events share


@pytest.mark.case("C27")
def test_events_keep_the_identity_of_the_first_round():
    seam = seam_of(chat(**TOOLS), content(), Way.TURN)

    chunk, choice = one(seam.rewrite(chat_event({"content": "d"}, id="chatcmpl-9", token_ids=[8])))

    assert (chunk["id"], chunk["created"], chunk["model"]) == ("first", 1, "first")
    assert chunk["object"] == "chat.completion.chunk"
    assert choice["delta"] == {"content": "d"}
    assert choice["token_ids"] is None


@pytest.mark.case("C27")
def test_a_second_role_is_not_delivered():
    seam = seam_of(chat(**TOOLS), content(), Way.TURN)

    assert seam.rewrite(chat_event({"role": "assistant", "content": ""})) == b""
    _, choice = one(seam.rewrite(chat_event({"role": "assistant", "content": "d"})))
    assert choice["delta"] == {"content": "d"}


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(DONE, id="done"),
        pytest.param(event(choices=[], usage={"completion_tokens": 4}), id="usage of the round"),
        pytest.param(chat_event({}), id="nothing"),
        pytest.param(chat_event({}, prompt_token_ids=[1]), id="prompt ids"),
        pytest.param(b"data: 5\n\n", id="no chunk"),
    ],
)
def test_what_is_of_the_round_only_is_left_out(block):
    assert seam_of(chat(**TOOLS), content(), Way.TURN).rewrite(block) == b""


def test_an_error_passes_as_it_came():
    error = event(error={"message": "x", "code": 500})

    assert seam_of(chat(**TOOLS), content(), Way.TURN).rewrite(error) == error


def test_handles_are_not_delivered():
    block = text_event("d", token_ids=[8]).replace(
        b'"choices"', b'"kv_transfer_params":{},"choices"'
    )

    chunk, _ = one(seam_of(completions(), content(), Way.IDS).rewrite(block))

    assert "kv_transfer_params" not in chunk


@pytest.mark.case("C29")
def test_the_index_is_that_of_the_choice():
    answer = content()
    answer.choices[2] = answer.choices.pop(0)
    resume = plan(completions(n=3), answer, 2, KNOWN, is_delivered=True)
    assert isinstance(resume, Resume)

    seam = Seam(completions(n=3), answer, 2, resume)
    _, choice = one(seam.rewrite(text_event("d", token_ids=[8])))

    assert choice["index"] == 2
    assert answer.choice(2).text == "abcd"


def test_ids_that_the_client_asked_for_come_on():
    seam = seam_of(completions(return_token_ids=True), content(), Way.IDS)

    _, choice = one(seam.rewrite(text_event("d", token_ids=[8], prompt_token_ids=[1, 2])))

    assert choice["token_ids"] == [8]
    assert "prompt_token_ids" not in choice


# --- ends


def test_the_end_of_the_round_is_the_end_of_the_choice():
    seam = seam_of(completions(), content(), Way.IDS)
    block = text_event("d", token_ids=[8], finish_reason="stop", stop_reason="x")

    _, choice = one(seam.rewrite(block))

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "x")
    assert seam.end.is_final
    assert not seam.end.is_stopped


@pytest.mark.case("C40")
def test_a_round_that_is_given_back_is_no_end():
    answer = content()
    seam = seam_of(completions(), answer, Way.IDS)
    block = text_event("d", token_ids=[], finish_reason="stop", stop_reason="recomputed")

    _, choice = one(seam.rewrite(block))

    assert choice["finish_reason"] is None
    assert not seam.end.is_final
    assert answer.choice(0).finish_reason is None


def test_a_limit_that_is_not_the_clients_is_no_end():
    answer = thoughts()
    resume = plan(chat(), answer, 0, Abilities(END_ID), is_delivered=True)
    assert isinstance(resume, Resume)
    assert resume.has_own_limit

    seam = Seam(chat(), answer, 0, resume)
    seam.rewrite(text_event("so", token_ids=[8], finish_reason="length"))

    assert not seam.end.is_final
    assert not seam.end.is_at_marker


def test_a_round_that_could_go_on_for_ever_is_given_up():
    """Half a character, made again and again."""
    answer = thoughts()
    resume = plan(chat(), answer, 0, Abilities(END_ID), is_delivered=True)
    assert isinstance(resume, Resume)

    with pytest.raises(RecomputeUnsupported, match="brought nothing"):
        Seam(chat(), answer, 0, resume).rewrite(
            text_event("", token_ids=[8], finish_reason="length")
        )


def test_the_rounds_own_usage_is_told():
    answer = answer_of("abc", outputs=3)
    seam = seam_of(completions(), answer, Way.TEXT)

    seam.rewrite(
        text_event("d") + text_event("e") + event(choices=[], usage={"completion_tokens": 4})
    )

    assert seam.end.completion_tokens == 4
    assert answer.choice(0).tokens == 7


# --- reasoning


@pytest.mark.case("C28")
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_goes_on_in_its_own_field(name):
    answer = thoughts(reasoning_field=name)
    seam = seam_of(chat(), answer, Way.THINK)

    _, choice = one(seam.rewrite(text_event(" so", token_ids=[8])))

    assert choice["delta"] == {name: " so"}
    assert "text" not in choice
    assert str(answer.choice(0).reasoning) == "hm so"


def test_the_end_of_reasoning_ends_the_round_but_not_the_choice():
    answer = thoughts()
    seam = seam_of(chat(), answer, Way.THINK)
    block = text_event(" so", token_ids=[8, END_ID], finish_reason="stop", stop_reason=END_ID)

    _, choice = one(seam.rewrite(block))

    assert choice["delta"] == {"reasoning": " so"}
    assert choice["finish_reason"] is None
    assert "stop_reason" not in choice
    assert seam.end.is_at_marker
    assert not seam.end.is_final
    assert answer.choice(0).has_reasoned(END_ID)


def test_log_probabilities_of_a_completion_are_told_as_chat_tells_them():
    request = chat(logprobs=True, top_logprobs=1)
    logprobs = {
        "tokens": [" so"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{" so": -0.5, "é": -0.7}],
        "text_offset": [0],
    }
    block = text_event(" so", token_ids=[8], logprobs=logprobs)

    _, choice = one(seam_of(request, thoughts(), Way.THINK).rewrite(block))

    so = {"token": " so", "logprob": -0.5, "bytes": [32, 115, 111]}
    assert choice["logprobs"] == {"content": [{**so, "top_logprobs": [so]}]}


# --- usage, offsets, waiting


@pytest.mark.case("C30")
def test_running_usage_goes_on_from_what_was_told():
    answer = content()
    seam = seam_of(completions(max_tokens=20), answer, Way.IDS)
    usages = []
    for ids in ([8], [9, 10]):
        block = text_event("d", token_ids=ids, usage={"prompt_tokens": 5, "completion_tokens": 1})
        usages.append(one(seam.rewrite(block))[0]["usage"])

    assert usages == [
        {"prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4},
        {"prompt_tokens": 2, "total_tokens": 8, "completion_tokens": 6},
    ]


@pytest.mark.case("C34")
def test_text_offsets_count_from_the_start_of_the_whole_text():
    answer = content(next_offset=7)
    seam = seam_of(completions(logprobs=1), answer, Way.IDS)
    logprobs = {"tokens": ["d", "ef"], "text_offset": [0, 1]}

    _, choice = one(seam.rewrite(text_event("def", token_ids=[8, 9], logprobs=logprobs)))

    assert choice["logprobs"]["text_offset"] == [7, 8]
    assert answer.choice(0).next_offset == 10


def test_half_a_character_waits_across_events():
    answer = content()
    seam = seam_of(completions(return_token_ids=True), answer, Way.IDS)

    assert seam.rewrite(text_event("", token_ids=[8])) == b""
    waited, shown = chunks_of(seam.rewrite(text_event("🦜", token_ids=[9])))

    assert waited["choices"][0]["token_ids"] == [8]
    assert shown["choices"][0]["token_ids"] == [9]
    assert answer.choice(0).resumable_ids(None) == [5, 6, 7, 8, 9]


def test_events_that_wait_from_before_the_seam_come_if_their_ids_are_kept():
    answer = thoughts(shown=1)
    kept = answer.choice(0)
    kept.token_ids[1:] = kept.token_ids[:0]
    kept.token_ids.append(END_ID)
    kept.wait(chat_event({}, token_ids=[END_ID]))
    kept.token_ids.append(9)
    kept.wait(chat_event({}, token_ids=[9]))
    seam = seam_of(chat(return_token_ids=True), answer, Way.IDS)

    marker, shown = chunks_of(seam.rewrite(text_event("Yes", token_ids=[9])))

    assert marker["choices"][0]["token_ids"] == [END_ID]
    assert shown["choices"][0]["token_ids"] == [9]
    assert kept.token_ids.tolist() == [5, END_ID, 9]


def test_an_event_that_waits_is_cut_where_the_round_goes_on():
    answer = thoughts(shown=1)
    kept = answer.choice(0)
    kept.token_ids[1:] = kept.token_ids[:0]
    kept.token_ids.extend([END_ID, 9])
    kept.wait(chat_event({}, token_ids=[END_ID, 9]))
    seam = seam_of(chat(return_token_ids=True), answer, Way.IDS)

    marker, _ = chunks_of(seam.rewrite(text_event("Yes", token_ids=[9])))

    assert marker["choices"][0]["token_ids"] == [END_ID]


def test_the_prompts_text_is_not_delivered_again():
    """Ids that end inside a character make an engine give the text of all of them."""
    answer = answer_of("The bird ", ids=[5, 6, 7], prompt_ids=range(12))
    seam = seam_of(chat(), answer, Way.IDS)
    block = text_event("<s><user>\nTell me.<assistant>\nThe bird 🦜", token_ids=[8])

    _, choice = one(seam.rewrite(block))

    assert choice["delta"] == {"content": "🦜"}


# --- stop strings


def test_a_stop_string_across_the_seam_ends_the_choice():
    answer = answer_of("over", ids=[5, 6], held=Held(" EN"))
    seam = seam_of(completions(stop=[" END"]), answer, Way.IDS)
    more = text_event(" more", token_ids=[9], finish_reason="length")

    _, choice = one(seam.rewrite(text_event("D and", token_ids=[8]) + more))

    assert choice["text"] == ""
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " END")
    assert seam.end.is_final
    assert seam.end.is_stopped
    assert seam.rewrite(more + DONE) == b""
    assert answer.choice(0).text == "over"


def test_held_text_that_is_no_stop_string_is_delivered():
    answer = answer_of("over", ids=[5, 6], held=Held(" EN"))
    seam = seam_of(completions(stop=[" END"]), answer, Way.IDS)

    _, choice = one(seam.rewrite(text_event("TER", token_ids=[8])))

    assert choice["text"] == " ENTER"


def test_held_text_waits_for_the_next_round_too():
    answer = content(prompt_ids=range(40))
    seam = seam_of(completions(stop=["END"]), answer, Way.IDS)

    _, choice = one(seam.rewrite(text_event("d EN", token_ids=[8])))

    assert choice["text"] == "d "
    assert answer.choice(0).text == "abcd EN"
    assert answer.choice(0).resumable_ids(None) == [5, 6, 7, 8]


# --- a replay


def replay(answer, **fields):
    return seam_of(chat(temperature=0, **TOOLS, **fields), answer, Way.REPLAY)


def test_a_replay_says_only_what_is_new():
    answer = answer_of(reasoning="hm", ids=[5, END_ID, 6], tool_calls={0: ToolCall("c", "f", "{")})
    seam = replay(answer, return_token_ids=True)
    known = {"index": 0, "id": "d", "type": "function", "function": {"name": "f"}}
    new = {"index": 0, "function": {"arguments": "{}"}}

    assert seam.rewrite(chat_event({"reasoning": "hm"}, token_ids=[5])) == b""
    assert seam.rewrite(chat_event({}, token_ids=[END_ID])) == b""
    assert seam.rewrite(chat_event({"tool_calls": [known]}, token_ids=[6])) == b""
    _, choice = one(seam.rewrite(chat_event({"tool_calls": [new]}, token_ids=[7])))

    assert choice["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert choice["token_ids"] == [7]
    assert answer.choice(0).tool_calls[0] == ToolCall("c", "f", "{}")
    assert answer.choice(0).token_ids.tolist() == [5, END_ID, 6, 7]


def test_tokens_told_with_the_end_of_reasoning_are_not_told_again():
    """An event of several tokens may end the reasoning and begin a tool call that shows nothing."""
    answer = answer_of(reasoning="hm", ids=[5, END_ID, 8])
    seam = seam_of(chat(return_token_ids=True, max_tokens=9, **TOOLS), answer, Way.TURN)
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}

    assert seam.rewrite(chat_event({}, token_ids=[8])) == b""
    _, choice = one(seam.rewrite(chat_event({"tool_calls": [call]}, token_ids=[9])))

    assert choice["token_ids"] == [9]
    assert answer.choice(0).token_ids.tolist() == [5, END_ID, 8, 9]


def test_a_replay_that_differs_is_refused():
    answer = answer_of("ab", ids=[5], tool_calls={0: ToolCall()})

    with pytest.raises(RecomputeUnsupported):
        replay(answer).rewrite(chat_event({"content": "b"}, token_ids=[9]))


@pytest.mark.parametrize("is_said_before", [False, True], ids=["in the rest", "before the cut"])
def test_a_client_that_wants_one_call_at_a_time_gets_the_first(is_said_before):
    """An engine that reads the calls itself leaves out the others."""
    begun, rest = '<tool_call>{"name": "f", "arguments": {"a": ', "1}}</tool_call>"
    other = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    told = {0: ToolCall("c", "f", '{"a": 1}' if is_said_before else "")}
    spelled = begun + rest + other if is_said_before else begun
    answer = answer_of(ids=[5, 6], spelled=spelled, spelled_ids=2, tool_calls=told)
    request = chat(max_tokens=9, parallel_tool_calls=False, **TOOLS)
    seam = seam_of(request, answer, Way.CALL)

    seam.rewrite(text_event("" if is_said_before else rest + other, token_ids=[7]))
    _, choice = one(seam.rewrite(text_event("", token_ids=[8], finish_reason="stop")))

    assert answer.choice(0).tool_calls == {0: ToolCall("c", "f", '{"a": 1}')}
    assert choice["finish_reason"] == "tool_calls"


def test_the_same_request_again_may_tell_the_prompt_ids():
    answer = answer_of(prompt_ids=None)
    seam = seam_of(chat(), answer, Way.AGAIN)

    seam.rewrite(chat_event({"content": "a"}, prompt_token_ids=[1, 2], token_ids=[5]))

    assert answer.prompt_ids is not None
    assert json.loads(bytes(answer.prompt_ids)) == [1, 2]


# --- the end without a round


@pytest.mark.case("C39")
@pytest.mark.parametrize(
    ("request_", "key", "wanted"),
    [
        pytest.param(chat(max_tokens=3, stop="END"), "delta", {"content": " EN"}, id="chat"),
        pytest.param(completions(max_tokens=3, stop="END"), "text", " EN", id="completions"),
    ],
)
def test_a_complete_choice_ends_with_what_was_held(request_, key, wanted):
    answer = content(held=Held(" EN"))
    answer.identity["id"] = b'"first"'

    chunk, choice = one(ending(request_, answer, 0, "length"))

    assert chunk["id"] == "first"
    assert choice[key] == wanted
    assert choice["finish_reason"] == "length"
    assert answer.choice(0).finish_reason == "length"
    assert answer.choice(0).text == "abc EN"
    assert answer.choice(0).tokens == 3


def test_a_complete_choice_ends_with_the_events_that_waited():
    answer = thoughts(shown=1)
    answer.choice(0).wait(chat_event({}, token_ids=[6]))

    waited, end = chunks_of(ending(chat(return_token_ids=True), answer, 0, "length"))

    assert waited["choices"][0]["token_ids"] == [6]
    assert end["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("ids", [[8], None], ids=["given", "not given"])
def test_a_round_tells_whether_its_engine_gives_ids(ids):
    seam = seam_of(chat(**TOOLS), content(), Way.TURN)
    assert seam.end.has_ids is None

    seam.rewrite(chat_event({"content": "d"}, token_ids=ids))

    assert seam.end.has_ids is (ids is not None)


# --- whole streams, cut anywhere

APIS = st.sampled_from(list(Api))
CUTS = st.lists(st.integers(0, 14), max_size=5)
STEPS = st.sampled_from([[1], [2, 1], [3], [1, 1, 4]])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOY_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@st.composite
def bodies(draw, /, api, **fields):
    """A request in one API, with what a client may want to be told beside the text."""
    body = {"model": "sim", "max_tokens": draw(st.integers(1, 40)), **fields}
    number = draw(st.integers(0, 1 << 16))
    if api is Api.CHAT:
        body["messages"] = [{"role": "user", "content": f"word {number}"}]
    else:
        body["prompt"] = draw(st.sampled_from([f"word {number}", [300, 301, 302 + number % 50]]))
    body["temperature"] = draw(st.sampled_from([0, 0.7]))
    if draw(st.booleans()):
        body["return_token_ids"] = True
    if draw(st.booleans()):
        body["logprobs"] = True if api is Api.CHAT else 2
    return body


def check(proxy, api, body):
    """The client sees of the rounds what it sees of an answer that was not cut."""
    engine = proxy.engine
    uncut = Engine(engine.config, steps=engine.steps).stream(api, body)
    wanted = seen_by_client(b"".join(uncut))

    got = seen_by_client(proxy.stream(api, body))

    assert got["choices"] == wanted["choices"]
    assert got["usage"] == wanted["usage"]
    assert got["roles"] == wanted["roles"]
    assert len(got["heads"]) == 1


@pytest.mark.case("C24", "C25", "C26", "C27", "C28", "C33", "C39")
@settings(UNHURRIED, max_examples=80)
@given(st.data(), APIS, st.sampled_from([CONFIG, THINKER]), CUTS, STEPS, st.booleans())
def test_a_stream_cut_anywhere_is_the_uncut_stream(data, api, config, cuts, steps, is_lost):
    usage = data.draw(st.sampled_from([{}, {"include_usage": True}]))
    body = data.draw(bodies(api, stream=True, stream_options=usage))

    check(Proxy(Engine(config, cuts=cuts, steps=steps, is_lost=is_lost)), api, body)


@pytest.mark.case("C35")
@settings(UNHURRIED, max_examples=80)
@given(st.data(), APIS, CUTS, st.booleans(), st.booleans())
def test_stop_strings_end_the_same_answer_wherever_it_is_cut(data, api, cuts, is_lost, shows_stops):
    stop = data.draw(st.sampled_from([["wh", "e o"], [" a", " w", "s"], ["ing", "ed "]]))
    body = data.draw(bodies(api, stream=True, stop=stop))
    body["include_stop_str_in_output"] = shows_stops
    config = data.draw(st.sampled_from([CONFIG, THINKER]))
    if config is CONFIG:
        body["min_tokens"] = data.draw(st.integers(0, body["max_tokens"]))
    steps = data.draw(STEPS)

    check(Proxy(Engine(config, cuts=cuts, steps=steps, is_lost=is_lost)), api, body)


@settings(UNHURRIED, max_examples=80)
@given(st.data(), APIS, CUTS, STEPS)
def test_a_stream_without_ids_is_the_uncut_stream(data, api, cuts, steps):
    usage = data.draw(st.sampled_from([{}, {"include_usage": True}]))
    body = data.draw(bodies(api, stream=True, stream_options=usage))
    body |= {"temperature": 0, "prompt": "word 1"} if api is Api.COMPLETIONS else {"temperature": 0}

    check(Proxy(Engine(cuts=cuts, steps=steps), asks_ids=False), api, body)


@pytest.mark.parametrize("is_lost", [False, True], ids=["given back", "lost"])
@pytest.mark.parametrize("cuts", [[7], [0, 7, 12, 12, 12], [5, 6, 7]])
def test_text_of_an_answer_that_may_call_tools_is_whole(cuts, is_lost):
    """An open turn says no more than the text, which may end before the ids."""
    messages = [{"role": "user", "content": "Say something"}]
    body = {"model": "sim", "messages": messages, "tools": TOY_TOOLS, "max_tokens": 60}
    proxy = Proxy(Engine(cuts=list(cuts), steps=[3], is_lost=is_lost))

    check(proxy, Api.CHAT, {**body, "stream": True})

    assert Way.TURN in proxy.ways


@settings(UNHURRIED, max_examples=80)
@given(st.data(), CUTS, STEPS, st.sampled_from(["auto", "required", "none"]))
def test_tool_calls_are_whole_wherever_they_are_cut(data, cuts, steps, choice):
    body = data.draw(bodies(Api.CHAT, stream=True, tools=TOY_TOOLS, tool_choice=choice))
    body |= {"temperature": 0, "max_tokens": 120}
    body["messages"] = [{"role": "user", "content": "now use the tool"}]
    config = data.draw(st.sampled_from([CONFIG, THINKER]))

    check(Proxy(Engine(config, cuts=[cut * 4 for cut in cuts], steps=steps)), Api.CHAT, body)


@pytest.mark.case("C37")
@settings(UNHURRIED, max_examples=80)
@given(st.data(), CUTS, STEPS, st.booleans())
def test_sampled_tool_calls_are_whole_wherever_they_are_cut(data, cuts, steps, is_lost):
    body = data.draw(bodies(Api.CHAT, stream=True, tools=TOY_TOOLS))
    body |= {"temperature": 0.7, "max_tokens": 120}
    body["messages"] = [{"role": "user", "content": "now use the tool"}]
    config = data.draw(st.sampled_from([CONFIG, THINKER]))
    engine = Engine(config, cuts=[cut * 4 for cut in cuts], steps=steps, is_lost=is_lost)

    check(Proxy(engine), Api.CHAT, body)


@pytest.mark.parametrize("cut", range(60))
def test_a_tool_call_behind_reasoning_is_whole_for_every_cut(cut):
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": "use the tool"}],
        "tools": TOY_TOOLS,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }

    check(Proxy(Engine(THINKER, cuts=[cut])), Api.CHAT, body)


@settings(UNHURRIED, max_examples=40)
@given(st.data(), APIS, CUTS, STEPS)
def test_output_under_a_grammar_is_whole_wherever_it_is_cut(data, api, cuts, steps):
    body = data.draw(bodies(api, stream=True, structured_outputs={"json": SCHEMA}))
    body |= {"temperature": 0, "max_tokens": 120}

    check(Proxy(Engine(CONFIG, cuts=cuts, steps=steps)), api, body)


@pytest.mark.case("C29")
@settings(UNHURRIED, max_examples=40)
@given(st.data(), APIS, st.lists(st.integers(2, 14), max_size=5))
def test_each_choice_of_several_is_whole(data, api, cuts):
    body = data.draw(bodies(api, stream=True, n=3, stream_options={"include_usage": True}))
    body["temperature"] = 1
    proxy = Proxy(Engine(CONFIG, cuts=cuts))

    check(proxy, api, body)


@pytest.mark.case("C30")
@settings(UNHURRIED, max_examples=40)
@given(st.data(), APIS, st.sampled_from([CONFIG, THINKER]), CUTS, STEPS)
def test_running_usage_never_goes_backwards(data, api, config, cuts, steps):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = data.draw(bodies(api, stream=True, stream_options=options))

    stream = Proxy(Engine(config, cuts=cuts, steps=steps)).stream(api, body)

    usages = [chunk["usage"] for chunk in chunks_of(stream.removesuffix(DONE)) if "usage" in chunk]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for usage in usages
    )


def test_the_toy_model_writes_half_characters_and_the_end_of_reasoning():
    """Else the properties above would show less than they say."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2000}
    reply = json.loads(Engine(THINKER).whole(Api.CHAT, {**body, "return_token_ids": True}))

    ids = set(reply["choices"][0]["token_ids"])
    assert tokenizer.THINK_END == END_ID
    assert END_ID in ids
    assert ids & tokenizer.TAIL_OF.keys()
