"""Steps of durations and the percentiles that come back out of them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.durations import LAST_STEP, SHORTEST_S, STEPS_PER_DOUBLING, percentiles, step_of

SHARES = (0.5, 0.9, 0.99)
STEP = 2 ** (1 / STEPS_PER_DOUBLING)


def counted(durations):
    return Counter(step_of(duration_s) for duration_s in durations)


def test_nothing_counted_has_no_percentiles():
    assert percentiles({}, SHARES) is None
    assert percentiles({3: 0}, SHARES) is None


@pytest.mark.parametrize("duration_s", [0.0, -1.0, SHORTEST_S])
def test_what_is_too_short_to_tell_is_in_the_first_step(duration_s):
    assert step_of(duration_s) == 0


def test_steps_grow_with_the_duration_up_to_the_last():
    durations = [SHORTEST_S * STEP**n for n in range(LAST_STEP + 40)]
    steps = [step_of(duration_s) for duration_s in durations]

    assert steps == sorted(steps)
    assert steps[-1] == LAST_STEP == step_of(1e9)


@given(st.lists(st.floats(SHORTEST_S, 1800.0), min_size=1, max_size=200))
def test_percentile_is_within_a_step_of_the_true_one(durations):
    found = percentiles(counted(durations), SHARES)

    assert found is not None
    for share, seconds in zip(SHARES, found, strict=True):
        true = sorted(durations)[math.ceil(share * len(durations)) - 1]
        assert true / STEP / 1.0001 <= seconds <= true * STEP * 1.0001


@given(st.lists(st.floats(0.0, 1e6), min_size=1))
def test_percentiles_ascend(durations):
    found = percentiles(counted(durations), SHARES)

    assert found is not None
    assert list(found) == sorted(found)


def test_steps_without_a_count_change_nothing():
    counts = counted([0.1, 0.2, 0.4])

    assert percentiles({**counts, 1: 0, 150: 0}, SHARES) == percentiles(counts, SHARES)
