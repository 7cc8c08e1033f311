import pytest

from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Counts, Outcome


def account():
    return Account("id", "/v1/completions", "peer", Timeline(0.0))


def test_tokens_of_all_prompts_are_added_and_unknown_ones_are_not_zero():
    counted = account()
    counted.count(Counts(3, 0, None, ("stop",)))
    counted.count(Counts(4, None, None, ("length",)))

    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (7, 0, None)

    counted.count(Counts(None, 2, 5, ()))
    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (7, 2, 5)
    assert counted.finish_reasons == ["stop", "length"]


def test_counts_of_a_whole_answer_stand_in_the_place_of_those_of_its_rounds():
    counted = account()
    rounds = [Counts(3, 1, None, ("stop",)), Counts(5, 4, 2, ("stop",))]
    for each in (*rounds, Counts(10, 0, 20, ("length",))):  # the last one is of another prompt
        counted.count(each)

    counted.recount(rounds, Counts(3, 1, 4, ("tool_calls",)))

    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (13, 1, 24)
    assert counted.finish_reasons == ["length", "tool_calls"]


@pytest.mark.parametrize(
    ("outcome", "has_content", "output_tokens", "is_uncounted"),
    [
        pytest.param(Outcome.SUCCESS, True, None, True, id="no-usage"),
        pytest.param(Outcome.SUCCESS, False, None, True, id="no-usage-in-a-whole-reply"),
        pytest.param(Outcome.CLIENT_DISCONNECTED, True, None, True, id="left-before-the-usage"),
        pytest.param(Outcome.ENGINE_ERROR, False, None, False, id="no-output"),
        pytest.param(Outcome.SUCCESS, True, 0, False, id="counted"),
    ],
)
def test_output_without_a_count_is_noticed(outcome, has_content, output_tokens, is_uncounted):
    made = account()
    made.outcome, made.output_tokens = outcome, output_tokens
    if has_content:
        made.timeline.mark_content(1.0)

    assert made.is_uncounted is is_uncounted


def test_first_failure_is_the_cause():
    failed = account()
    failed.fail(Outcome.ENGINE_ERROR, "lost")
    failed.fail(Outcome.CLIENT_DISCONNECTED, "left")

    assert (failed.outcome, failed.why) == (Outcome.ENGINE_ERROR, "lost")
