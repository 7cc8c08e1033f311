import pytest

from pdproxy.core.pulse import FULL, GAP_EDGES_S, Pulse
from pdproxy.core.timeline import Timeline


@pytest.fixture
def pulse():
    return Pulse(Timeline(0.0))


def counted(pulse):
    edges = (*GAP_EDGES_S, float("inf"))
    return {edge: count for edge, count in zip(edges, pulse.counts, strict=True) if count}


def test_first_content_has_no_gap_before_it(pulse):
    pulse.beat(1.0, 1)

    assert (pulse.noted, counted(pulse)) == (0, {})


def test_gap_is_counted_under_the_first_edge_that_is_not_below_it(pulse):
    for now in (0.0, 0.5, 1.25, 101.25):
        pulse.beat(now, 1)

    assert pulse.noted == 3
    assert pulse.sum_s == pytest.approx(101.25)
    assert counted(pulse) == {0.5: 1, 0.75: 1, float("inf"): 1}


def test_events_that_are_written_together_follow_without_a_gap(pulse):
    pulse.beat(1.0, 3)
    pulse.beat(2.0, 2)

    assert pulse.noted == 4
    assert pulse.sum_s == 1.0
    assert counted(pulse) == {0.01: 3, 1.0: 1}


def test_what_does_not_reach_the_client_is_no_beat(pulse):
    pulse.beat(1.0, 1)
    pulse.is_hidden = True
    pulse.beat(2.0, 1)
    pulse.is_hidden = False
    pulse.beat(5.0, 1)

    assert pulse.sum_s == 4.0
    assert pulse.noted == 1


def test_a_long_stream_asks_to_be_counted_now_and_then(pulse):
    asked = [pulse.beat(float(now), 1) for now in range(FULL + 1)]

    assert asked == [False] * FULL + [True]

    pulse.clear()
    assert not pulse.beat(FULL + 1.0, 1)
    assert pulse.noted == sum(pulse.counts) == 1
