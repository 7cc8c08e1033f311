import pytest

from pdproxy.core.answer import Held
from pdproxy.core.resume import Resume, Way
from pdproxy.core.withheld import Withheld, has_text, hold_back, put_in_front
from tests.core.making import answer_of, chat, completions


def withheld(kept, way=Way.IDS, **fields):
    request = chat(**fields)
    return Withheld(request, kept, Resume(way, request))


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        pytest.param({"text": "a"}, True, id="completion"),
        pytest.param({"delta": {"reasoning": "a"}}, True, id="reasoning"),
        pytest.param({"delta": {"content": "\ufffd"}}, False, id="half a character"),
        pytest.param({"delta": {"content": "a\ufffd"}}, True, id="text and half a character"),
        pytest.param({"delta": {"tool_calls": []}}, False, id="no text"),
        pytest.param({"delta": None}, False, id="nothing"),
    ],
)
def test_half_a_character_is_no_text(choice, wanted):
    assert has_text(choice) is wanted


def test_the_start_of_a_stop_string_and_half_a_character_are_held_back():
    held = Held()
    choice: dict[str, object] = {"delta": {"reasoning": "x", "content": "over EN\ufffd"}}

    assert hold_back(held, choice, ["END"]) == "\ufffd"
    assert choice == {"delta": {"reasoning": "x", "content": "over "}}
    assert held == Held("EN", is_reasoning=False)


def test_held_text_goes_back_to_its_field():
    chat_choice: dict[str, object] = {"delta": {}}
    completion: dict[str, object] = {"text": "D"}

    put_in_front(Held("EN", is_reasoning=True), chat_choice, "reasoning_content")
    put_in_front(Held("EN"), completion, "reasoning")

    assert chat_choice == {"delta": {"reasoning_content": "EN"}}
    assert completion == {"text": "END"}


def test_text_waits_while_it_may_be_a_stop_string():
    kept = answer_of("so", ids=[1]).choice(0)
    waits = withheld(kept, stop="END")
    first, second = {"delta": {"content": " E"}}, {"delta": {"content": "ast"}}

    assert not waits.apply(first)
    assert first == {"delta": {"content": " "}}
    assert kept.text == "soE"
    assert not waits.apply(second)
    assert second == {"delta": {"content": "East"}}
    assert kept.held == Held()


def test_text_that_waits_comes_at_the_end():
    waits = withheld(answer_of("so", ids=[1]).choice(0), stop="END")
    last = {"delta": {}, "finish_reason": "length"}

    waits.apply({"delta": {"content": " E"}})
    waits.apply(last)

    assert last["delta"] == {"content": "E"}


def test_a_half_character_waits_for_its_other_half():
    waits = withheld(answer_of("so", ids=[1]).choice(0))
    half, rest = {"delta": {"content": "a\ufffd"}}, {"delta": {"content": "b"}}

    waits.apply(half)
    waits.apply(rest)

    assert half["delta"] == {"content": "a"}
    assert rest["delta"] == {"content": "\ufffdb"}


def test_a_stop_string_begun_before_the_seam_ends_the_choice():
    kept = answer_of("over", ids=[1], held=Held(" EN")).choice(0)
    waits = withheld(kept, stop=[" END"])
    choice = {"delta": {"content": "D!"}, "finish_reason": None}

    assert waits.apply(choice)
    assert choice == {
        "delta": {"content": ""},
        "finish_reason": "stop",
        "stop_reason": " END",
    }


def test_delivered_text_is_not_taken_back_by_a_stop_string():
    waits = withheld(answer_of("over EN", ids=[1]).choice(0), stop=["END"])
    choice = {"delta": {"content": "D!"}}

    assert waits.apply(choice)
    assert choice["delta"] == {"content": ""}


def test_a_stop_string_that_is_shown_is_delivered_whole():
    waits = withheld(
        answer_of("over EN", ids=[1]).choice(0), stop=["END"], include_stop_str_in_output=True
    )
    choice = {"delta": {"content": "D!"}}

    assert waits.apply(choice)
    assert choice["delta"] == {"content": "D"}


def test_a_stop_string_across_the_seam_is_found_in_reasoning():
    kept = answer_of(reasoning="hmm EN", ids=[1]).choice(0)
    waits = withheld(kept, Way.THINK, stop=["END"])

    assert waits.apply({"delta": {"reasoning": "D"}})


def test_nothing_stops_before_min_tokens():
    kept = answer_of("over EN", ids=[1]).choice(0)

    assert not withheld(kept, stop=["END"], min_tokens=2).apply({"delta": {"content": "D"}})
    assert withheld(kept, stop=["END"], min_tokens=1).apply({"delta": {"content": "D"}})


def test_a_replayed_answer_is_stopped_by_its_engine():
    kept = answer_of("over EN", ids=[1]).choice(0)

    assert not withheld(kept, Way.REPLAY, stop=["END"]).apply({"delta": {"content": "D"}})


def test_the_stop_string_that_ends_a_thought_is_shown_if_asked_for():
    kept = answer_of(reasoning="hmm", ids=[1]).choice(0)
    waits = withheld(kept, Way.THINK, stop=["END"], include_stop_str_in_output=True)
    choice = {"delta": {"reasoning": " so "}, "finish_reason": "stop", "stop_reason": "END"}

    waits.apply(choice)

    assert choice["delta"] == {"reasoning": " so END"}


def test_held_text_of_a_completion_stays_in_its_text():
    request = completions(stop="END")
    kept = answer_of("so", ids=[1]).choice(0)
    waits = Withheld(request, kept, Resume(Way.IDS, request))
    first: dict[str, object] = {"text": " E"}
    second: dict[str, object] = {"text": "ast"}

    waits.apply(first)
    waits.apply(second)

    assert (first, second) == ({"text": " "}, {"text": "East"})
