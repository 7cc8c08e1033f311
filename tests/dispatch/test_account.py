from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome


def account():
    return Account("id", "/v1/completions", "peer", Timeline(0.0))


def test_tokens_of_all_prompts_are_added_and_unknown_ones_are_not_zero():
    counted = account()
    counted.count(3, 0, None)
    counted.count(4, None, None)

    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (7, 0, None)

    counted.count(None, 2, 5)
    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (7, 2, 5)


def test_first_failure_is_the_cause():
    failed = account()
    failed.fail(Outcome.ENGINE_ERROR, "lost")
    failed.fail(Outcome.CLIENT_DISCONNECTED, "left")

    assert (failed.outcome, failed.why) == (Outcome.ENGINE_ERROR, "lost")
