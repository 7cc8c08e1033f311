"""Load is an exact sum that is never clamped; estimates start sanely and learn."""

import pytest

from pdproxy.core.load import (
    NO_LOAD,
    START_OUTPUT_TOKENS,
    Cost,
    Load,
    LoadAnomalyError,
    LoadBoard,
    OutputEstimator,
    TokenEstimator,
)

COST = Cost(requests=1, compute_tokens=1000, kv_tokens=1200, body_bytes=4000)


def test_open_slot_holds_nothing():
    board = LoadBoard()

    assert board.load(board.open()) == NO_LOAD


def test_charges_add_up_and_releases_take_back():
    board = LoadBoard()
    slot = board.open()

    board.charge(slot, COST)
    board.charge(slot, Cost(kv_tokens=7))

    assert board.load(slot) == Load(2, 1000, 1207, 4000)
    board.release(slot, COST)
    assert board.load(slot) == Load(1, 0, 7, 0)


def test_slots_are_apart():
    board = LoadBoard()
    one, other = board.open(), board.open()

    board.charge(one, COST)

    assert one != other
    assert board.load(other) == NO_LOAD


def test_closed_slot_is_reused_empty_and_the_longest_unused_first():
    board = LoadBoard()
    slots = [board.open() for _ in range(3)]
    board.close(slots[1])
    board.close(slots[0])

    assert [board.open(), board.open(), board.open()] == [slots[1], slots[0], 3]
    assert board.load(slots[0]) == NO_LOAD


@pytest.mark.parametrize(
    "cost",
    [
        pytest.param(Cost(requests=1), id="requests"),
        pytest.param(Cost(requests=0, compute_tokens=1), id="compute"),
        pytest.param(Cost(requests=0, kv_tokens=1), id="kv"),
        pytest.param(Cost(requests=0, body_bytes=1), id="bytes"),
    ],
)
@pytest.mark.case("C47")
def test_negative_sum_is_reported_and_stays_visible(cost):
    anomalies = []
    board = LoadBoard(lambda slot, text: anomalies.append((slot, text)))
    slot = board.open()

    board.release(slot, cost)

    assert [reported for reported, _ in anomalies] == [slot]
    assert board.load(slot).is_negative
    board.charge(slot, cost)
    assert board.load(slot) == NO_LOAD


def test_negative_sum_raises_unless_told_otherwise():
    board = LoadBoard()
    slot = board.open()

    with pytest.raises(LoadAnomalyError, match="negative"):
        board.release(slot, COST)


@pytest.mark.parametrize("act", ["charge", "release"])
def test_closed_slot_takes_nothing_and_reports(act):
    anomalies = []
    board = LoadBoard(lambda slot, text: anomalies.append(text))
    slot = board.open()
    board.close(slot)

    getattr(board, act)(slot, COST)

    assert len(anomalies) == 1
    assert "closed" in anomalies[0]
    assert board.load(slot) == NO_LOAD


def test_slot_with_load_is_not_closed_but_reported():
    anomalies = []
    board = LoadBoard(lambda slot, text: anomalies.append(text))
    slot = board.open()
    board.charge(slot, COST)

    board.close(slot)

    assert len(anomalies) == 1
    assert board.load(slot) == Load(1, 1000, 1200, 4000)
    assert board.open() != slot


def test_tokens_of_an_unknown_model_are_a_quarter_of_the_bytes_rounded_up():
    estimator = TokenEstimator()

    assert estimator.estimate("m", 4000) == 1000
    assert estimator.estimate("m", 1) == 1
    assert estimator.estimate("m", 0) == 0


def test_tokens_per_byte_are_learned_per_model():
    estimator = TokenEstimator()
    for _ in range(100):
        estimator.observe("cjk", 3000, 1500)

    assert estimator.estimate("cjk", 3000) == pytest.approx(1500, rel=0.02)
    assert estimator.estimate("other", 4000) == 1000


def test_short_prompts_do_not_govern_the_estimate_of_long_ones():
    estimator = TokenEstimator()
    for _ in range(50):
        estimator.observe("m", 40_000, 10_000)
        estimator.observe("m", 2, 40)  # a greeting in a chat template

    assert estimator.estimate("m", 40_000) == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(("text_bytes", "tokens"), [(0, 10), (-1, 10), (10, 0), (10, -1)])
def test_senseless_prompt_counts_teach_nothing(text_bytes, tokens):
    estimator = TokenEstimator()

    estimator.observe("m", text_bytes, tokens)

    assert estimator.estimate("m", 4000) == 1000


def test_least_recent_model_is_forgotten_first():
    estimator = TokenEstimator(max_models=2)
    outputs = OutputEstimator(max_models=2)
    for model in ("a", "b", "a", "c"):
        for _ in range(200):
            estimator.observe(model, 1000, 1000)
            outputs.observe(model, 10)

    assert estimator.estimate("b", 1000) == 250
    assert estimator.estimate("a", 1000) > 900
    assert outputs.expect("b", None) == START_OUTPUT_TOKENS
    assert outputs.expect("a", None) < 20


def test_expected_output_is_the_mean_or_the_limit_if_that_is_less():
    outputs = OutputEstimator()

    assert outputs.expect("m", None) == 256
    assert outputs.expect("m", 16) == 16
    assert outputs.expect("m", 100_000) == 256


def test_expected_output_follows_the_answers():
    outputs = OutputEstimator()
    for _ in range(300):
        outputs.observe("m", 1000)

    assert outputs.expect("m", None) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("model", ["", "a" * 1000])
def test_estimates_are_never_negative_whatever_the_limit(model):
    assert OutputEstimator().expect(model, -5) == 0
