import pytest

from pdproxy.core.answer import Answer, Held, Phase, Text, ToolCall
from tests.core.making import END_ID, answer_of


def test_text_is_all_its_pieces():
    text = Text("a")
    for _ in range(1000):
        text.add("bc")

    assert str(text) == "a" + "bc" * 1000
    assert text
    assert not Text()


@pytest.mark.parametrize(
    ("answer", "phase"),
    [
        pytest.param(answer_of(), Phase.NOTHING, id="nothing"),
        pytest.param(answer_of("once", echoed=4), Phase.NOTHING, id="only the prompt again"),
        pytest.param(answer_of("a", ids=[1]), Phase.CONTENT, id="content"),
        pytest.param(answer_of(held=Held("a")), Phase.CONTENT, id="content that is held"),
        pytest.param(answer_of(reasoning="a", ids=[1]), Phase.REASONING, id="reasoning"),
        pytest.param(
            answer_of(held=Held("a", is_reasoning=True)), Phase.REASONING, id="reasoning held"
        ),
        pytest.param(
            answer_of(reasoning="a", ids=[1, END_ID], shown=1), Phase.CONTENT, id="at the marker"
        ),
        pytest.param(
            answer_of("a", tool_calls={0: ToolCall()}), Phase.TOOL_CALL, id="in a tool call"
        ),
    ],
)
def test_the_phase_is_where_the_choice_was_cut(answer, phase):
    assert answer.choice(0).phase(END_ID) is phase


def test_tokens_are_counted_by_ids_only_if_all_output_came_with_them():
    answer = answer_of("a", ids=[5, 6, 7], shown=2)
    assert answer.tokens_by_ids == 3
    answer.choice(1).token_ids.extend([8])
    assert answer.tokens_by_ids == 4
    answer.choice(1).has_all_ids = False

    assert answer.tokens_by_ids is None
    assert Answer().tokens_by_ids is None


def test_without_a_known_marker_reasoning_goes_on():
    assert answer_of(reasoning="a", ids=[END_ID]).choice(0).phase(None) is Phase.REASONING


def test_ids_without_text_are_made_again():
    choice = answer_of("a", ids=[5, 6, 7], shown=2).choice(0)

    assert choice.resumable_ids(END_ID) == [5, 6]
    assert choice.tokens == 2


def test_the_marker_is_kept_and_nothing_behind_it():
    choice = answer_of(reasoning="a", ids=[5, END_ID, 9], shown=1).choice(0)

    assert choice.resumable_ids(END_ID) == [5, END_ID]
    assert choice.resumable_ids(None) == [5]


def test_ids_of_text_that_came_flushed_behind_the_marker_are_kept():
    choice = answer_of("b", reasoning="a", ids=[5, END_ID, 9], shown=2, flushed=3).choice(0)

    assert choice.resumable_ids(END_ID) == [5, END_ID, 9]


def test_flushed_text_counts_but_its_last_ids_may_be_half_a_character():
    choice = answer_of("ab", ids=[5, 6, 7], shown=2, flushed=3).choice(0)

    assert choice.tokens == 3
    assert choice.resumable_ids(None) == [5, 6]


def test_a_round_whose_text_all_came_flushed_keeps_all_ids():
    choice = answer_of("ab", ids=[5, 6, 7], shown=1, started=1, flushed=3).choice(0)

    assert choice.resumable_ids(None) == [5, 6, 7]


def test_without_ids_outputs_count_and_at_the_end_all_ids():
    assert answer_of("ab", outputs=4).choice(0).tokens == 4
    ended = answer_of("ab", ids=[5, 6], shown=1, finish_reason="stop").choice(0)
    assert ended.tokens == 2


def test_events_wait_until_the_text_of_their_ids_has_come():
    choice = answer_of("a", ids=[5], shown=1).choice(0)
    choice.token_ids.append(6)
    choice.wait(b"half")

    assert choice.released() == []
    choice.token_ids.append(7)
    choice.shown = 3
    assert choice.released() == [b"half"]
    assert choice.released() == []


def test_at_the_end_nothing_waits():
    choice = answer_of("a", ids=[5, 6], shown=1).choice(0)
    choice.wait(b"half")
    choice.finish_reason = "length"

    assert choice.released() == [b"half"]


def test_usage_counts_the_prompt_once_and_every_choice():
    answer = answer_of("a", ids=[5, 6])
    answer.choice(1).token_ids.extend([7])
    answer.choice(1).shown = 1

    assert answer.usage() == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    answer.cached_tokens = 0
    assert answer.usage()["prompt_tokens_details"] == {"cached_tokens": 0}


def test_giving_back_names_choices_that_are_there():
    answer = Answer()
    answer.choice(1)

    answer.give_back([0, 1])

    assert list(answer.choices) == [1]
    assert answer.choice(1).is_flushed
