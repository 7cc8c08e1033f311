import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.stops import Stopped, Straddle, hidden_stops, shows_stops, start_of_stop
from tests.core.making import chat
from tests.properties import UNHURRIED

TEXTS = st.text("abs", max_size=8)
STOPS = st.lists(st.text("abs", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


def test_stops_that_are_part_of_the_output_hide_nothing():
    shown = chat(stop=["END"], include_stop_str_in_output=True)

    assert shows_stops(shown)
    assert hidden_stops(shown) == frozenset()
    assert hidden_stops(chat(stop="END")) == {"END"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param("over E", 1, id="first character"),
        pytest.param("over EN", 2, id="two characters"),
        pytest.param("EEN", 2, id="the longest start"),
        pytest.param("over END", 0, id="a whole stop string is not a start"),
        pytest.param("over", 0, id="none"),
        pytest.param("", 0, id="no text"),
    ],
)
def test_the_end_of_a_text_may_start_a_stop_string(text, size):
    assert start_of_stop(text, {"END", "ENORMOUS"}) == size


@UNHURRIED
@given(TEXTS, STOPS)
def test_the_longest_start_of_a_stop_string_is_found(text, stops):
    sizes = [
        size
        for size in range(1, len(text) + 1)
        for stop in stops
        if len(stop) > size and stop.startswith(text[-size:])
    ]

    assert start_of_stop(text, stops) == max(sizes, default=0)


def test_a_stop_string_across_the_seam_is_found_once_it_is_complete():
    straddle = Straddle("text S", ["STOP"], shows_stops=False)

    assert straddle.look("TO") is None
    assert straddle.look("P and on") == Stopped("STOP", len("STOP and on"))


def test_a_shown_stop_string_belongs_to_the_answer():
    straddle = Straddle("text ST", ["STOP"], shows_stops=True)

    assert straddle.look("OP and on") == Stopped("STOP", len(" and on"))


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        pytest.param("a STOP", " b", id="before the seam"),
        pytest.param("a ", "STOP", id="behind the seam"),
        pytest.param("a ST", "ART", id="not completed"),
        pytest.param("", "STOP", id="nothing before"),
    ],
)
def test_a_stop_string_on_one_side_is_left_to_the_engine(before, behind):
    assert Straddle(before, ["STOP"], shows_stops=False).look(behind) is None


@UNHURRIED
@given(TEXTS, st.lists(TEXTS, max_size=4), STOPS)
def test_the_stop_string_that_is_complete_first_is_found(before, pieces, stops):
    straddle, seam = Straddle(before, stops, shows_stops=True), len(before)
    found, text = None, before
    for piece in pieces:
        text += piece
        found = straddle.look(piece)
        if found:
            break

    whole = "".join((before, *pieces))
    ends = [
        begin + len(stop)
        for stop in stops
        for begin in range(max(0, seam - len(stop) + 1), seam)
        if whole.startswith(stop, begin)
    ]
    assert (found is not None) == bool(ends)
    if found is not None:
        assert len(text) - found.excess == min(ends)
