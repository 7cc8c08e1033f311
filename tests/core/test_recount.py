"""Which tokens a cut choice has: what is asked, and what is made of the answers."""

import pytest

from pdproxy.core.answer import ToolCall
from pdproxy.core.recount import DETOKENIZE, TOKENIZE, Question, recount
from pdproxy.sim import tokenizer
from tests.core.making import END_ID, answer_of, body_of, chat, completions
from tests.core.toy_rounds import tokenized

THE, OF = tokenizer.encode(" the of")
HALF, TAIL = next(iter(tokenizer.TAIL_OF.items()))
WHOLE = tokenizer.decode([HALF, TAIL])
STOPS = {"stop": ["END"]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
SEEN = [{"role": "user", "content": [IMAGE]}]


def asked(request, answer, *, say=tokenized, end_id=END_ID):
    """Return the questions; `say` answers them."""
    asking, said = recount(request, answer, 0, end_id), None
    questions: list[Question] = []
    while True:
        try:
            question = asking.send(said)
        except StopIteration:
            return questions
        questions.append(question)
        said = say(question)


def silent(_question):
    return None


# --- ids are known


def packed(text, ids, **facts):
    """What came in one event."""
    return answer_of(text, ids=ids, packed=len(ids), **facts)


@pytest.mark.parametrize(
    ("text", "ids", "kept"),
    [
        pytest.param(" the of", [THE, OF], 2, id="whole"),
        pytest.param(" the of", [THE, OF, HALF], 2, id="half a character"),
        pytest.param(f" the{WHOLE}", [THE, HALF, TAIL, HALF], 3, id="behind a whole one"),
        pytest.param("the of", [THE, OF, HALF], 2, id="the space at the start left out"),
        pytest.param(" the", [tokenizer.CALL_BEGIN, THE, HALF], 2, id="behind what is no text"),
        pytest.param("other", [THE, OF], 2, id="of other text"),
    ],
)
def test_several_tokens_in_an_event_count_up_to_the_last_whole_character(text, ids, kept):
    answer = packed(text, ids)

    asked(chat(model="m"), answer)

    choice = answer.choice(0)
    assert choice.resumable_ids(END_ID) == ids[:kept]
    assert choice.tokens == kept


def test_what_was_told_of_half_a_character_is_known():
    answer = packed(" the", [THE, HALF])

    (first, second) = asked(chat(model="m"), answer)

    assert first.path == DETOKENIZE
    assert body_of(first) == {"model": "m", "tokens": [THE, HALF]}
    assert body_of(second) == {"model": "m", "tokens": [THE]}
    assert answer.choice(0).told == 2
    assert answer.choice(0).token_ids.tolist() == [THE, HALF]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer_of(" the of", ids=[THE, OF]), id="a token an event"),
        pytest.param(answer_of(" the", ids=[THE, OF], packed=1, shown=2), id="several before"),
        pytest.param(answer_of(ids=[HALF], shown=0), id="no text"),
    ],
)
def test_without_doubt_nothing_is_asked(answer):
    assert asked(chat(), answer) == []


def test_without_an_answer_all_stays():
    answer = packed(" the", [THE, HALF])

    assert len(asked(chat(), answer, say=silent)) == 1
    assert answer.choice(0).tokens == 2


def test_reasoning_ends_before_its_marker():
    ids = [THE, END_ID, OF]
    answer = answer_of(reasoning=" t", ids=ids, shown=1, is_flushed=False)

    asked(chat(**STOPS), answer)

    choice = answer.choice(0)
    assert (choice.held.text, choice.held.is_reasoning) == ("he", True)
    assert choice.thoughts == " the"
    assert choice.resumable_ids(END_ID) == [THE, END_ID]


def test_content_begins_behind_the_marker():
    ids = [THE, END_ID, OF, HALF]
    answer = packed(" of", ids, reasoning=" the")

    questions = asked(chat(), answer)

    assert [body_of(question)["tokens"] for question in questions] == [[OF, HALF], [OF]]
    assert answer.choice(0).resumable_ids(END_ID) == [THE, END_ID, OF]


# --- a lost engine held back text


def lost(text, ids, **facts):
    return answer_of(text, ids=ids, is_flushed=False, **facts)


@pytest.mark.parametrize("ids", [[THE, OF], [THE, OF, HALF]], ids=["whole", "half"])
def test_text_that_a_lost_engine_held_back_is_known_by_its_ids(ids):
    answer = lost(" the", ids, shown=1)

    asked(completions(**STOPS), answer)

    choice = answer.choice(0)
    assert choice.held.text == " of"
    assert choice.text == " the of"
    assert choice.is_flushed
    assert choice.resumable_ids(None) == [THE, OF]


@pytest.mark.parametrize(
    ("request_", "end_id", "facts"),
    [
        pytest.param(chat(**STOPS, **TOOLS), END_ID, {}, id="it may begin a tool call"),
        pytest.param(chat(**STOPS), None, {"reasoning": "hm"}, id="it may end the reasoning"),
    ],
)
def test_what_a_parser_may_hold_back_is_no_text(request_, end_id, facts):
    answer = lost(" th", [THE, OF], shown=1, **facts)

    asked(request_, answer, end_id=end_id)

    choice = answer.choice(0)
    assert not choice.held.text
    assert not choice.is_flushed


def test_text_that_ends_with_a_token_has_lost_nothing():
    answer = lost(" the", [THE, tokenizer.CALL_BEGIN], shown=1)

    asked(chat(**STOPS, **TOOLS), answer)

    assert answer.choice(0).is_flushed
    assert answer.choice(0).resumable_ids(END_ID) == [THE]


def test_ids_of_other_text_tell_nothing_of_what_was_lost():
    answer = lost("other", [THE, OF], shown=1)

    asked(completions(**STOPS), answer)

    assert not answer.choice(0).is_flushed
    assert not answer.choice(0).held.text


# --- no ids are known


def uncounted(text, **facts):
    answer = answer_of(text, prompt_ids=None, **facts)
    answer.prompt_tokens = len(tokenizer.encode("once"))
    return answer


@pytest.mark.parametrize(
    ("counted", "outputs", "tokens"),
    [
        pytest.param(3, 1, 2, id="half a character is counted"),
        pytest.param(2, 1, 2, id="as the engine counts"),
        pytest.param(9, 1, 9, id="the engine's tokens are others"),
        pytest.param(1, 0, 1, id="fewer by the engine's count"),
        pytest.param(0, 1, 2, id="events do not count"),
        pytest.param(0, 3, 3, id="more events than tokens"),
    ],
)
def test_tokens_are_those_of_the_text(counted, outputs, tokens):
    answer = uncounted(" the of", counted=counted, outputs=outputs)

    (question,) = asked(completions(model="m", max_tokens=20), answer)

    assert question.path == TOKENIZE
    assert body_of(question) == {"model": "m", "prompt": "once the of"}
    assert answer.choice(0).tokens == tokens


def test_messages_are_counted_as_they_will_be_rendered():
    fields = {"model": "m", "max_tokens": 20, "chat_template_kwargs": {"x": 1}, **TOOLS}
    answer = uncounted(" the of", outputs=1)

    (question,) = asked(chat(**fields), answer, say=silent)

    assert body_of(question) == {
        "model": "m",
        "chat_template_kwargs": {"x": 1},
        **TOOLS,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": " the of"},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert answer.choice(0).tokens == 1


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(completions(), uncounted("a", outputs=2, counted=2), id="one token an event"),
        pytest.param(completions(max_tokens=3), uncounted("a", counted=3), id="at the limit"),
        pytest.param(completions(prompt=[1]), uncounted("a", outputs=1), id="prompt of ids"),
        pytest.param(chat(), uncounted("a", reasoning="hm", outputs=1), id="reasoning"),
        pytest.param(
            chat(messages=[{"role": "user", "content": [IMAGE]}]),
            uncounted("a", outputs=1),
            id="image",
        ),
        pytest.param(
            completions(truncate_prompt_tokens=5), uncounted("a", outputs=1), id="truncated"
        ),
    ],
)
def test_what_has_no_answer_is_not_asked(request_, answer):
    assert asked(request_, answer) == []


def test_text_that_was_held_back_comes_in_an_event_without_a_token():
    held = {"stop": [" zz"]}
    answer = uncounted(" the of", outputs=3)

    asked(completions(max_tokens=20, **held), answer)

    assert answer.choice(0).tokens == 2


# --- a tool call


@pytest.mark.case("C37")
@pytest.mark.parametrize(
    ("ids", "questions", "spelled"),
    [
        pytest.param([THE, OF], [[THE, OF]], " the of", id="whole"),
        pytest.param([THE, HALF], [[THE, HALF], [THE]], " the", id="half a character"),
        pytest.param([THE, END_ID, OF], [[OF]], " of", id="behind the reasoning"),
    ],
)
def test_the_text_of_a_tool_call_is_that_of_all_ids(ids, questions, spelled):
    answer = answer_of(ids=ids, shown=1, tool_calls={0: ToolCall("1", "f")})

    asked_for = asked(chat(**TOOLS), answer)

    assert [body_of(question)["tokens"] for question in asked_for] == questions
    choice = answer.choice(0)
    assert choice.spelled == spelled
    assert choice.token_ids[: choice.spelled_ids].tolist() == ids[: choice.spelled_ids]


def test_a_tool_call_without_ids_or_without_an_answer_has_no_text():
    call = {"tool_calls": {0: ToolCall("1", "f")}, "spelled": "of the last cut"}
    silenced, without_ids = answer_of(ids=[THE], **call), answer_of("x", **call)

    assert len(asked(chat(**TOOLS), silenced, say=silent)) == 1
    assert not asked(chat(**TOOLS), without_ids)

    assert not silenced.choice(0).spelled
    assert not without_ids.choice(0).spelled
