import json

import pytest

from pdproxy.core.api import Api
from pdproxy.core.resume import (
    Resume,
    Way,
    again,
    asks_ids,
    by_ids,
    by_text,
    by_thought,
    by_turn,
    output_limit,
    with_ids,
    with_own_seed,
)
from tests.core.making import END_ID, MESSAGES, answer_of, body_of, chat, completions

ROOM = 100


def ids_of(request, answer, room=ROOM):
    kept = answer.choice(0).resumable_ids(END_ID)
    return by_ids(request, answer, kept, end_id=END_ID, room=room)


def thought_of(request, answer, room=ROOM):
    return by_thought(request, answer, 0, end_id=END_ID, room=room)


def turn_of(request, answer):
    resume = by_turn(request, answer.choice(0), end_id=END_ID)
    assert isinstance(resume, Resume)
    return resume


# --- the first round


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        pytest.param(chat(), True, id="chat"),
        pytest.param(chat(echo=True), True, id="chat that repeats its last message"),
        pytest.param(completions(), True, id="completions"),
        pytest.param(completions(return_token_ids=False), True, id="not wanted by the client"),
        pytest.param(completions(echo=True), None, id="an echo, which ids would take away"),
    ],
)
def test_ids_are_asked_for_where_that_changes_nothing(request_, wanted):
    asked = with_ids(request_)

    assert body_of(asked).get("return_token_ids") is wanted
    assert {**body_of(asked), "return_token_ids": 0} == {**body_of(request_), "return_token_ids": 0}


def test_a_client_that_asks_for_ids_is_known():
    assert asks_ids(chat(return_token_ids=True))
    assert not asks_ids(chat(return_token_ids=None))
    assert with_ids(asked := chat(return_token_ids=True)) is asked


# --- limits


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        pytest.param(chat(), None, id="chat without"),
        pytest.param(chat(max_tokens=None), None, id="chat null"),
        pytest.param(chat(max_tokens=5), 5, id="chat max_tokens"),
        pytest.param(chat(max_completion_tokens=6), 6, id="chat max_completion_tokens"),
        pytest.param(chat(max_tokens=5, max_completion_tokens=6), 6, id="the newer name wins"),
        pytest.param(chat(max_tokens=5, max_completion_tokens=None), 5, id="unless it is null"),
        pytest.param(completions(), 16, id="completions without"),
        pytest.param(completions(max_tokens=None), 16, id="completions null"),
        pytest.param(completions(max_tokens=5), 5, id="completions"),
        pytest.param(completions(max_completion_tokens=99), 16, id="no field of completions"),
    ],
)
def test_the_limit_is_the_one_that_the_engine_applies(request_, limit):
    assert output_limit(request_) == limit


@pytest.mark.case("C24", "C26")
@pytest.mark.parametrize(
    ("given", "left"),
    [
        pytest.param({"max_tokens": 12}, {"max_tokens": 9}, id="max_tokens"),
        pytest.param(
            {"max_completion_tokens": 12}, {"max_completion_tokens": 9}, id="max_completion_tokens"
        ),
        pytest.param(
            {"max_tokens": 5, "max_completion_tokens": 12},
            {"max_tokens": 2, "max_completion_tokens": 9},
            id="both",
        ),
        pytest.param({}, {}, id="neither"),
        pytest.param({"max_tokens": None}, {"max_tokens": None}, id="null"),
        pytest.param(
            {"max_tokens": 12, "min_tokens": 9}, {"max_tokens": 9, "min_tokens": 6}, id="min_tokens"
        ),
        pytest.param({"min_tokens": 2}, {"min_tokens": 0}, id="min_tokens reached"),
        pytest.param({"min_tokens": None}, {"min_tokens": None}, id="min_tokens null"),
    ],
)
def test_a_turn_has_the_limits_that_are_left(given, left):
    body = body_of(turn_of(chat(**given), answer_of("abc", ids=[5, 6, 7])).request)

    names = ("max_tokens", "max_completion_tokens", "min_tokens")
    assert {name: body[name] for name in names if name in body} == left


@pytest.mark.case("C35")
@pytest.mark.parametrize(
    ("tokens", "least", "most"),
    [pytest.param(40, 10, 20, id="after 40"), pytest.param(55, 0, 5, id="after 55")],
)
def test_min_tokens_shrinks_with_the_limit(tokens, least, most):
    request = completions(min_tokens=50, max_tokens=60)
    body = body_of(ids_of(request, answer_of("a", ids=[9] * tokens)).request)

    assert (body["min_tokens"], body["max_tokens"]) == (least, most)


def test_the_default_limit_of_completions_counts():
    for request in (completions(), completions(max_tokens=None), completions(max_tokens=16)):
        assert body_of(ids_of(request, answer_of("abc", ids=[5] * 4)).request)["max_tokens"] == 12


def test_without_ids_the_engines_count_is_taken_off():
    answer = answer_of("abc", outputs=4)

    assert body_of(turn_of(chat(max_tokens=10), answer).request)["max_tokens"] == 6
    resume = by_text(completions(max_tokens=10), answer.choice(0), "once")
    assert body_of(resume.request)["max_tokens"] == 6
    assert resume.request.max_output_tokens == 6


@pytest.mark.parametrize(
    ("room", "limit", "is_own"),
    [pytest.param(100, 95, False, id="known"), pytest.param(None, 1024, True, id="unknown")],
)
def test_chat_without_a_limit_ends_where_the_model_ends(room, limit, is_own):
    resume = ids_of(chat(), answer_of("abc", ids=[5, 6, 7]), room)

    assert body_of(resume.request)["max_tokens"] == limit
    assert resume.has_own_limit is is_own


# --- the forms


@pytest.mark.case("C24", "C33")
def test_ids_are_the_prompt_and_the_output():
    resume = ids_of(completions(max_tokens=9), answer_of("abc", ids=[5, 6, 7], shown=2))

    assert resume.way is Way.IDS
    assert resume.kept_ids == 2
    assert body_of(resume.request)["prompt"] == [1, 2, 5, 6]
    assert resume.request.prompt_tokens == 4


def test_chat_by_ids_is_a_completion_without_what_only_chat_knows():
    request = chat(
        max_completion_tokens=9,
        tools=[{}],
        tool_choice="none",
        chat_template_kwargs={"x": 1},
        temperature=0.3,
        custom=1,
        truncate_prompt_tokens=50,
    )
    resume = ids_of(request, answer_of("abc", ids=[5]))

    assert resume.request.api is Api.COMPLETIONS
    assert body_of(resume.request) == {
        "prompt": [1, 2, 5],
        "max_tokens": 8,
        "temperature": 0.3,
        "custom": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        pytest.param({"logprobs": True, "top_logprobs": 3}, 3, id="alternatives"),
        pytest.param({"logprobs": True}, 0, id="chosen tokens only"),
        pytest.param({"logprobs": False, "top_logprobs": None}, None, id="none"),
    ],
)
def test_log_probabilities_of_chat_are_asked_as_completions_ask(given, asked):
    body = body_of(ids_of(chat(**given), answer_of("a", ids=[5])).request)

    assert body.get("logprobs") == asked


def test_log_probabilities_of_completions_stay():
    body = body_of(ids_of(completions(logprobs=2), answer_of("a", ids=[5])).request)

    assert body["logprobs"] == 2


@pytest.mark.case("C28")
def test_reasoning_is_gone_on_with_up_to_its_end():
    request = chat(max_tokens=40, stop_token_ids=[3], thinking_token_budget=30, stop=["x"])
    resume = thought_of(request, answer_of(reasoning="hm", ids=[5, 6]))
    body = body_of(resume.request)

    assert (resume.way, resume.stop_id, resume.kept_ids) == (Way.THINK, END_ID, 2)
    assert body["prompt"] == [1, 2, 5, 6]
    assert body["stop_token_ids"] == [3, END_ID]
    assert body["thinking_token_budget"] == 30
    assert body["max_tokens"] == 38
    assert body["stop"] == ["x"]


def test_a_client_that_stops_at_the_end_of_reasoning_has_its_end_there():
    request = chat(max_tokens=40, stop_token_ids=[END_ID])

    assert thought_of(request, answer_of(reasoning="hm", ids=[5])).stop_id is None


def test_the_end_of_reasoning_may_come_before_min_tokens():
    """An engine lets no stop token come before `min_tokens`, the end of reasoning included."""
    request = chat(max_tokens=40, min_tokens=30, include_stop_str_in_output=True)
    body = body_of(thought_of(request, answer_of(reasoning="hm", ids=[5])).request)

    assert "min_tokens" not in body
    assert "include_stop_str_in_output" not in body


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param({"stop": ["x"]}, id="strings"),
        pytest.param({"stop_token_ids": [3]}, id="token ids"),
    ],
)
def test_no_stop_ends_reasoning_before_min_tokens(stops):
    request = chat(max_tokens=40, min_tokens=30, **stops)
    resume = thought_of(request, answer_of(reasoning="hm", ids=[5]))
    body = body_of(resume.request)

    assert body["max_tokens"] == 29
    assert body["stop_token_ids"] == [END_ID]
    assert "stop" not in body
    assert resume.has_own_limit


def test_a_round_before_min_tokens_brings_at_least_a_character():
    request = chat(max_tokens=40, min_tokens=2, stop=["x"])

    assert (
        body_of(thought_of(request, answer_of(reasoning="hm", ids=[5])).request)["max_tokens"] == 4
    )


def test_a_limit_below_min_tokens_is_still_the_clients():
    request = chat(max_tokens=30, min_tokens=30, stop=["x"])

    assert not thought_of(request, answer_of(reasoning="hm", ids=[5])).has_own_limit


def test_behind_the_end_of_reasoning_its_budget_is_spent():
    request = chat(max_tokens=40, thinking_token_budget=30)
    answer = answer_of("a", reasoning="hm", ids=[5, END_ID, 6])

    assert "thinking_token_budget" not in body_of(ids_of(request, answer).request)
    assert "thinking_token_budget" not in body_of(turn_of(request, answer).request)
    plain = answer_of("a", ids=[5])
    assert body_of(turn_of(request, plain).request)["thinking_token_budget"] == 30


def test_text_is_the_prompt_and_the_output():
    resume = by_text(completions(), answer_of("once upon", echoed=4, outputs=1).choice(0), "once")

    assert resume.way is Way.TEXT
    assert body_of(resume.request)["prompt"] == "once upon"


@pytest.mark.case("C25", "C36")
def test_a_turn_is_the_clients_request_but_for_the_form():
    given = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.3,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "logit_bias": {"5": -1},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "bad_words": ["y"],
        "chat_template_kwargs": {"enable_thinking": True},
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "user": "u",
        "priority": 3,
        "response_format": {"type": "text"},
        "an_unknown_field": {"kept": [1.50]},
    }
    body = body_of(turn_of(chat(**given), answer_of("Hel", ids=[5])).request)

    assert body == {
        **given,
        "messages": [*MESSAGES, {"role": "assistant", "content": "Hel"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "return_token_ids": True,
    }


@pytest.mark.case("C29", "C34")
@pytest.mark.parametrize("way", [Way.AGAIN, Way.REPLAY], ids=lambda way: way.name)
def test_the_same_request_again_is_for_one_choice_and_repeats_no_prompt(way):
    request = completions(n=3, best_of=3, echo=True, prompt_logprobs=1, logprobs=1, custom=1)
    resume = again(request, way)

    assert resume.way is way
    assert body_of(resume.request) == {
        "prompt": "once",
        "logprobs": 1,
        "custom": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert resume.request.choices == 1
    assert resume.request.wants_stream
    assert not resume.request.is_decode_only


def test_a_choice_made_again_has_its_own_seed():
    for request, index, seed in (
        (chat(n=3, seed=40), 2, 42),
        (chat(n=3, seed=40), 0, 40),
        (chat(seed=40), 0, 40),
        (chat(n=3), 2, None),
    ):
        round_ = with_own_seed(again(request, Way.AGAIN), request, index)
        assert body_of(round_.request).get("seed") == seed


def test_a_truncated_prompt_keeps_its_length_before_the_answer():
    answer = answer_of("abc", ids=[5, 6, 7])

    turned = body_of(turn_of(chat(truncate_prompt_tokens=50), answer).request)
    assert turned["truncate_prompt_tokens"] == 53
    assert "truncate_prompt_tokens" not in body_of(
        ids_of(completions(truncate_prompt_tokens=50), answer).request
    )
    whole = body_of(turn_of(chat(truncate_prompt_tokens=-1), answer).request)
    assert whole["truncate_prompt_tokens"] == -1


def test_fields_that_do_not_change_keep_their_bytes():
    request = completions(temperature=0.30)
    request_fields = ids_of(request, answer_of("a", ids=[5])).request.fields

    assert request_fields["temperature"] is request.fields["temperature"]
    assert json.loads(bytes(request_fields["prompt"])) == [1, 2, 5]
