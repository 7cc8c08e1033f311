"""Each row of the planner's table."""

import pytest

from pdproxy.core.answer import Answer, ToolCall
from pdproxy.core.planner import (
    Abilities,
    Complete,
    GiveUp,
    Resume,
    Way,
    note_echo,
    plan,
)
from tests.core.making import END_ID, MESSAGES, answer_of, body_of, chat, completions

KNOWN = Abilities(reasoning_end_id=END_ID, max_model_len=100)
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
GREEDY = {"temperature": 0}
STOPS = {"stop": ["END"]}
CALL = {"tool_calls": {0: ToolCall("1", "f", "{")}}
SPELLED = CALL | {"spelled": '<tool_call>{"name": "f", "arguments": {"a": 1', "spelled_ids": 3}
LOST = {"is_flushed": False}
IMAGES = {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "hi"}]}]}
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


def way_of(request, answer, *, is_delivered=True, abilities=KNOWN, index=0):
    """Return the way, or what stands in its place."""
    found = plan(request, answer, index, abilities, is_delivered=is_delivered)
    return found.way if isinstance(found, Resume) else type(found)


IDS3 = [5, 6, 7]


def content(**facts):
    return answer_of("abc", ids=IDS3, **facts)


def thoughts(**facts):
    return answer_of(reasoning="hm", ids=IDS3, **facts)


def at_marker():
    return answer_of(reasoning="hm", ids=[5, 6, END_ID], shown=2)


def whole(**facts):
    """What was read from a reply that was not streamed."""
    return content(is_from_whole=True, **facts)


# --- nothing is left


@pytest.mark.case("C39")
@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(completions(max_tokens=3), content(), id="completions"),
        pytest.param(chat(max_completion_tokens=3, max_tokens=9), content(), id="chat"),
        pytest.param(chat(max_tokens=3), thoughts(), id="in reasoning"),
        pytest.param(chat(max_tokens=3), at_marker(), id="at the marker"),
        pytest.param(chat(max_tokens=3, **TOOLS), content(**CALL), id="in a tool call"),
        pytest.param(
            chat(max_tokens=3, **TOOLS),
            content(is_flushed=False, shown=2, **SPELLED),
            id="in a tool call, lost with the last token",
        ),
        pytest.param(chat(max_tokens=3), answer_of("abc", outputs=3), id="without ids"),
        pytest.param(chat(), answer_of("a", ids=[9] * 98), id="at the end of the context"),
    ],
)
def test_at_its_limit_a_choice_is_complete(request_, answer):
    found = plan(request_, answer, 0, KNOWN, is_delivered=True)

    assert found == Complete("length")


def test_beams_are_given_up():
    assert way_of(completions(use_beam_search=True), content()) is GiveUp


# --- nothing was delivered


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(), id="no event"),
        pytest.param(answer_of(), id="only the role"),
        pytest.param(answer_of(ids=[5], shown=0), id="half a character"),
    ],
)
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(chat(**TOOLS, tool_choice="required"), id="grammar"),
        pytest.param(completions(), id="completions"),
    ],
)
def test_without_output_the_request_is_made_again(request_, answer):
    assert way_of(request_, answer) is Way.AGAIN


@pytest.mark.case("C34")
def test_the_prompt_again_is_no_output():
    request, answer = completions(echo=True), answer_of("once", outputs=1)

    note_echo(request, answer)

    assert way_of(request, answer) is Way.AGAIN


# --- a tool call, a grammar

CLOSED = [
    pytest.param(TOOLS, content(**CALL), id="a tool call"),
    pytest.param({**TOOLS, "tool_choice": "required"}, content(), id="tool_choice required"),
    pytest.param({**TOOLS, "tool_choice": {"type": "function"}}, content(), id="a named tool"),
    pytest.param({"response_format": SCHEMA}, content(), id="response_format"),
    pytest.param({"response_format": {"type": "json_object"}}, content(), id="json_object"),
    pytest.param({"structured_outputs": {"regex": "a+"}}, content(), id="structured_outputs"),
    pytest.param({"guided_json": {"type": "object"}}, content(), id="guided_json"),
    pytest.param({"guided_regex": "a+"}, content(), id="guided_regex"),
    pytest.param({"guided_choice": ["abcd"]}, content(), id="guided_choice"),
    pytest.param({"guided_grammar": "root ::= x"}, content(), id="guided_grammar"),
]


@pytest.mark.parametrize(("fields", "answer"), CLOSED)
def test_what_cannot_be_entered_is_made_again_if_nobody_saw_it(fields, answer):
    assert way_of(chat(**fields), answer, is_delivered=False) is Way.AGAIN


@pytest.mark.parametrize(("fields", "answer"), CLOSED)
@pytest.mark.parametrize(
    "sampling", [pytest.param(GREEDY, id="greedy"), pytest.param({"seed": 1}, id="seed")]
)
def test_what_cannot_be_entered_is_replayed_if_it_is_repeatable(fields, answer, sampling):
    assert way_of(chat(**fields, **sampling), answer) is Way.REPLAY


@pytest.mark.parametrize(("fields", "answer"), CLOSED)
@pytest.mark.parametrize(
    "sampling",
    [pytest.param({}, id="no temperature"), pytest.param({"temperature": 0.1}, id="sampled")],
)
def test_what_cannot_be_entered_is_given_up_else(fields, answer, sampling):
    found = plan(chat(**fields, **sampling), answer, 0, KNOWN, is_delivered=True)

    assert isinstance(found, GiveUp)
    assert "sampled" in found.why


# A call whose text is known, and what makes it one that cannot be read on.
@pytest.mark.case("C37")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, GREEDY])
def test_a_tool_call_whose_text_is_known_is_read_on(sampling):
    request = chat(max_tokens=10, **TOOLS, **sampling)

    found = plan(request, content(**SPELLED), 0, KNOWN, is_delivered=True)

    assert isinstance(found, Resume)
    assert found.way is Way.CALL
    assert found.kept_ids == 3
    body = body_of(found.request)
    assert body["prompt"] == [1, 2, *IDS3]
    assert body["max_tokens"] == 7
    assert body["skip_special_tokens"] is False
    assert "tools" not in body


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        pytest.param(STOPS, content(**SPELLED), id="a stop string"),
        pytest.param({"tool_choice": "required"}, content(**SPELLED), id="a grammar"),
        pytest.param(IMAGES, content(**SPELLED), id="media"),
        pytest.param({}, answer_of("abc", **SPELLED), id="no ids"),
        pytest.param({}, answer_of(ids=IDS3, prompt_ids=None, **SPELLED), id="no prompt ids"),
        pytest.param({}, content(**SPELLED | {"spelled": "<f>"}), id="another markup"),
    ],
)
def test_a_tool_call_that_cannot_be_read_on_is_replayed_or_given_up(fields, answer):
    assert way_of(chat(**TOOLS, **fields, **GREEDY), answer) is Way.REPLAY
    assert way_of(chat(**TOOLS, **fields), answer) is GiveUp


def test_a_tool_call_that_nobody_saw_is_made_again():
    assert way_of(chat(**TOOLS), content(**SPELLED), is_delivered=False) is Way.AGAIN


JSON = {"response_format": {"type": "json_object"}}
BEGUN = '{"a": 1, "b'


@pytest.mark.case("C37")
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7}, STOPS])
@pytest.mark.parametrize("text", [BEGUN, '{"a": 1}'])
def test_sampled_json_goes_on_without_its_grammar(fields, text):
    request = chat(max_tokens=10, **JSON, **fields)

    found = plan(request, answer_of(text, ids=IDS3), 0, KNOWN, is_delivered=True)

    assert isinstance(found, Resume)
    assert found.way is Way.JSON
    assert found.kept_ids == 3
    body = body_of(found.request)
    assert body["prompt"] == [1, 2, *IDS3]
    assert body["max_tokens"] == 7
    assert "response_format" not in body


@pytest.mark.parametrize(
    "grammar", [{"structured_outputs": {"json": {}}}, {"guided_json": {}}, JSON]
)
def test_no_grammar_is_sent_behind_json_of_completions(grammar):
    request, answer = completions(max_tokens=10, **grammar), answer_of(BEGUN, ids=IDS3)

    found = plan(request, answer, 0, KNOWN, is_delivered=True)

    assert isinstance(found, Resume)
    assert found.way is Way.JSON
    assert not body_of(found.request).keys() & grammar.keys()


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        pytest.param(TOOLS, answer_of(BEGUN, ids=IDS3), id="tools"),
        pytest.param(IMAGES, answer_of(BEGUN, ids=IDS3), id="media"),
        pytest.param({}, answer_of(BEGUN), id="no ids"),
        pytest.param({}, answer_of("Sure: {", ids=IDS3), id="no JSON so far"),
        pytest.param({"guided_regex": "a"}, answer_of(BEGUN, ids=IDS3), id="another grammar, too"),
        pytest.param(
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            answer_of(BEGUN, ids=IDS3),
            id="a schema that cannot be checked",
        ),
    ],
)
def test_json_that_cannot_be_checked_is_replayed_or_given_up(fields, answer):
    assert way_of(chat(**JSON | fields, **GREEDY), answer) is Way.REPLAY
    assert way_of(chat(**JSON | fields), answer) is GiveUp
    assert way_of(chat(**JSON | fields), answer, is_delivered=False) is Way.AGAIN


def test_a_grammar_of_completions_cannot_be_entered_either():
    request = completions(structured_outputs={"regex": "a+"}, **GREEDY)

    assert way_of(request, content()) is Way.REPLAY


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"response_format": {"type": "text"}}, id="text"),
        pytest.param({"response_format": None}, id="null"),
        pytest.param({"structured_outputs": {}}, id="empty"),
        pytest.param({"guided_json": None}, id="guided null"),
        pytest.param({"tool_choice": "auto"}, id="tool_choice auto"),
        pytest.param({"tool_choice": "none", **TOOLS}, id="tool_choice none"),
    ],
)
def test_no_grammar_no_limit_to_going_on(fields):
    assert way_of(chat(**fields), content()) is Way.IDS


# --- completions


@pytest.mark.case("C24", "C33")
@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(completions(), content(), id="the engine gives all ids"),
        pytest.param(
            completions(prompt=[1, 2]), answer_of("abc", ids=IDS3, prompt_ids=None), id="id prompt"
        ),
        pytest.param(completions(n=3, logprobs=1, **STOPS), content(), id="more wishes"),
    ],
)
def test_a_completion_goes_on_by_ids(request_, answer):
    assert way_of(request_, answer) is Way.IDS


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(completions(), answer_of("abc", outputs=3), id="no ids"),
        pytest.param(
            completions(), answer_of("abc", ids=IDS3, prompt_ids=None), id="no prompt ids"
        ),
    ],
)
def test_a_completion_goes_on_by_text(request_, answer):
    assert way_of(request_, answer) is Way.TEXT


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        pytest.param(STOPS, content(**LOST), id="ids known"),
        pytest.param(STOPS, answer_of("abc", outputs=3, **LOST), id="no ids"),
        pytest.param({}, content(lags=True, **LOST), id="in the last round"),
    ],
)
@pytest.mark.parametrize("make", [completions, chat])
def test_text_that_was_lost_is_made_again_replayed_or_given_up(make, fields, answer):
    assert way_of(make(**fields), answer, is_delivered=False) is Way.AGAIN
    assert way_of(make(**fields, **GREEDY), answer) is Way.REPLAY
    assert way_of(make(**fields), answer) is GiveUp


def test_reasoning_of_unknown_length_is_replayed_where_that_gives_the_same():
    answer = answer_of("abc", reasoning="hm", outputs=3, counted=5)
    counted = answer_of("abc", reasoning="hm", outputs=5, counted=5)

    assert way_of(chat(**GREEDY), answer) is Way.REPLAY
    assert way_of(chat(**GREEDY), counted) is Way.TURN
    assert way_of(chat(), answer, is_delivered=False) is Way.AGAIN
    assert way_of(chat(), answer) is Way.TURN


def test_a_lost_decoder_that_held_nothing_back_leaves_the_ids():
    assert way_of(completions(), content(**LOST)) is Way.IDS
    shown = completions(include_stop_str_in_output=True, **STOPS)
    assert way_of(shown, content(**LOST)) is Way.IDS


@pytest.mark.parametrize(
    ("fields", "is_delivered", "way"),
    [
        pytest.param({}, False, Way.AGAIN, id="nothing delivered"),
        pytest.param(GREEDY, True, Way.REPLAY, id="repeatable"),
        pytest.param({}, True, GiveUp, id="else"),
    ],
)
def test_ids_as_prompt_with_unknown_output_ids(fields, is_delivered, way):
    request = completions(prompt=[1, 2], **fields)

    assert way_of(request, answer_of("abc", outputs=3), is_delivered=is_delivered) is way


# --- chat, in reasoning


@pytest.mark.case("C28")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="plain"),
        pytest.param(TOOLS, id="tools"),
        pytest.param({"response_format": SCHEMA}, id="response_format"),
        pytest.param({"logprobs": True}, id="logprobs"),
        pytest.param(STOPS, id="stops"),
    ],
)
@pytest.mark.parametrize("is_delivered", [True, False], ids=["stream", "whole"])
def test_reasoning_goes_on_by_ids(fields, is_delivered):
    assert way_of(chat(**fields), thoughts(), is_delivered=is_delivered) is Way.THINK


CLOSED_THOUGHTS = [
    pytest.param({}, answer_of(reasoning="hm", outputs=2), KNOWN, id="no ids"),
    pytest.param({}, thoughts(), Abilities(max_model_len=100), id="no known end of reasoning"),
    pytest.param(IMAGES, thoughts(), KNOWN, id="an image, of which ids say nothing"),
    pytest.param(STOPS, thoughts(**LOST), KNOWN, id="text held back was lost"),
]


@pytest.mark.parametrize(("fields", "answer", "abilities"), CLOSED_THOUGHTS)
def test_other_reasoning_is_made_again_replayed_or_given_up(fields, answer, abilities):
    sampled, greedy = chat(**fields), chat(**fields, **GREEDY)

    assert way_of(sampled, answer, abilities=abilities, is_delivered=False) is Way.AGAIN
    assert way_of(greedy, answer, abilities=abilities) is Way.REPLAY
    assert way_of(sampled, answer, abilities=abilities) is GiveUp


# --- chat, in content


@pytest.mark.case("C25")
@pytest.mark.parametrize(
    ("fields", "answer", "abilities"),
    [
        pytest.param({}, content(), KNOWN, id="no limit"),
        pytest.param({"max_tokens": 9}, content(), Abilities(), id="a limit of its own"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, content(), KNOWN, id="logprobs"),
        pytest.param({}, at_marker(), KNOWN, id="at the marker"),
        pytest.param(STOPS, content(), KNOWN, id="stops, all text given back"),
    ],
)
def test_content_goes_on_by_ids(fields, answer, abilities):
    assert way_of(chat(**fields), answer, abilities=abilities) is Way.IDS


@pytest.mark.parametrize(
    ("fields", "answer", "abilities"),
    [
        pytest.param({}, answer_of("abc", outputs=3), KNOWN, id="no ids"),
        pytest.param(TOOLS, content(), KNOWN, id="a tool may be called"),
        pytest.param(IMAGES, content(), KNOWN, id="an image"),
        pytest.param({}, content(), Abilities(), id="no known end of the context"),
        pytest.param({"response_format": SCHEMA}, at_marker(), KNOWN, id="before a grammar"),
        pytest.param({**TOOLS, "tool_choice": "required"}, at_marker(), KNOWN, id="before a call"),
    ],
)
def test_content_goes_on_as_an_open_turn(fields, answer, abilities):
    assert way_of(chat(**fields), answer, abilities=abilities) is Way.TURN


@pytest.mark.parametrize(
    ("fields", "is_delivered", "way"),
    [
        pytest.param({}, False, Way.AGAIN, id="nothing delivered"),
        pytest.param(GREEDY, True, Way.REPLAY, id="repeatable"),
        pytest.param({}, True, GiveUp, id="else"),
    ],
)
def test_an_open_turn_of_the_client_without_text_at_its_end(fields, is_delivered, way):
    messages = [*MESSAGES, {"role": "assistant", "content": [IMAGE]}]
    request = chat(messages=messages, **OPEN, **fields)

    assert way_of(request, content(), is_delivered=is_delivered) is way


def test_an_open_turn_of_the_client_goes_on():
    messages = [*MESSAGES, {"role": "assistant", "content": "So far"}]
    request = chat(messages=messages, **OPEN, **TOOLS)

    assert way_of(request, content()) is Way.TURN


# --- chat, a whole reply


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        pytest.param(TOOLS, whole(), id="a call may stand in content"),
        pytest.param(
            {"response_format": SCHEMA},
            thoughts(is_from_whole=True),
            id="output under a grammar may stand in reasoning",
        ),
        pytest.param(
            {},
            answer_of(reasoning="hm so", ids=[5, END_ID, 6], is_from_whole=True),
            id="content in reasoning",
        ),
    ],
)
def test_a_whole_reply_in_doubt_is_made_again(fields, answer):
    assert way_of(chat(**fields), answer, is_delivered=False) is Way.AGAIN


def test_a_whole_reply_without_doubt_goes_on():
    assert way_of(chat(), whole(), is_delivered=False) is Way.IDS
    thinking = thoughts(is_from_whole=True)
    assert way_of(chat(), thinking, is_delivered=False) is Way.THINK


# --- several choices


@pytest.mark.case("C29")
def test_a_choice_of_several_is_planned_alone():
    answer = content()
    answer.choice(1)
    request = chat(n=2, max_tokens=9)
    found = plan(request, answer, 0, KNOWN, is_delivered=True)

    assert isinstance(found, Resume)
    assert "n" not in body_of(found.request)
    assert way_of(request, answer, index=1) is Way.AGAIN


# --- helpers


@pytest.mark.parametrize(
    ("request_", "text", "echoed"),
    [
        pytest.param(completions(echo=True), "once upon", 4, id="completions"),
        pytest.param(completions(echo=True, prompt=["once"]), "once upon", 4, id="a list of one"),
        pytest.param(completions(echo=False), "once upon", 0, id="not asked for"),
        pytest.param(completions(echo=True), "upon", 0, id="the engine does not repeat"),
        pytest.param(completions(echo=True, prompt=[5]), "once upon", 0, id="a prompt of ids"),
        pytest.param(chat(echo=True), "hi there", 2, id="chat"),
        pytest.param(chat(echo=True, messages=[]), "hi there", 0, id="no message"),
    ],
)
def test_the_echo_is_marked(request_, text, echoed):
    answer = answer_of(text)

    note_echo(request_, answer)

    assert answer.choice(0).echoed == echoed
