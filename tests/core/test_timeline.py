import pytest

from pdproxy.core.timeline import Timeline

DURATIONS = ("ttft_s", "prefill_s", "handoff_s", "first_token_s", "decode_s", "total_s")
LAST_COUNTS = ("received", "prefill_started", "prefill_done", "decode_started", "last_content")
FIRST_COUNTS = ("first_event", "first_content")


def mark(line, name, now):
    getattr(line, f"mark_{name}")(now)


def test_durations_lie_between_their_marks():
    line = Timeline(received=100.0)
    line.mark_prefill_started(101.0)
    line.mark_prefill_done(104.0)
    line.mark_decode_started(104.5)
    line.mark_first_event(105.0)
    line.mark_first_content(106.0)
    line.mark_last_content(109.0)
    line.mark_finished(110.0)

    assert {name: getattr(line, name) for name in DURATIONS} == {
        "ttft_s": 6.0,
        "prefill_s": 3.0,
        "handoff_s": 0.5,
        "first_token_s": 1.5,
        "decode_s": 3.0,
        "total_s": 10.0,
    }
    assert line.tpot_s(output_tokens=4) == 1.0


def test_what_did_not_happen_has_no_duration():
    line = Timeline(received=0.0)

    assert [getattr(line, name) for name in DURATIONS] == [None] * len(DURATIONS)
    assert line.tpot_s(10) is None


@pytest.mark.parametrize("name", FIRST_COUNTS)
def test_a_first_stays_the_first(name):
    line = Timeline(received=0.0)
    mark(line, name, 1.0)
    mark(line, name, 2.0)

    assert getattr(line, name) == 1.0


@pytest.mark.parametrize("name", LAST_COUNTS)
def test_what_is_done_again_counts_from_the_last_time(name):
    line = Timeline(received=0.0)
    mark(line, name, 1.0)
    mark(line, name, 2.0)

    assert getattr(line, name) == 2.0


@pytest.mark.parametrize("output_tokens", [0, 1])
def test_one_token_has_no_time_per_token(output_tokens):
    line = Timeline(received=0.0)
    line.mark_first_content(1.0)
    line.mark_last_content(1.0)

    assert line.tpot_s(output_tokens) is None
