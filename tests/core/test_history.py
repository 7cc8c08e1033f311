"""The ring of buckets: what is kept, for how long, and that processes add up."""

from __future__ import annotations

import random
import sys

import msgspec
import pytest

from pdproxy.core.durations import step_of
from pdproxy.core.history import (
    BUCKET_S,
    BUCKETS,
    MAX_ERRORS,
    MAX_FAILURES,
    MAX_TEXT_CHARACTERS,
    WINDOW_S,
    Failure,
    History,
    Recent,
    merge,
    shown,
)

START_S = 1_800_000_000.0


class Clock:
    def __init__(self, now_s: float = START_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def history(clock):
    return History(clock)


def failure(at_s=START_S, request_id="r"):
    return Failure(at_s, request_id, "/v1/x", "m", "engine_error", 502, "p:1", "d:1", "lost")


def outcomes(recent):
    return {index: bucket.outcomes for index, bucket in sorted(recent.buckets.items())}


def test_requests_are_counted_in_the_bucket_of_their_end(history, clock):
    history.count_request("success", output_tokens=7, ttft_s=0.1, tpot_s=0.02)
    clock.now_s += BUCKET_S
    history.count_request("engine_error")
    history.count_request("success", output_tokens=3)
    first, second = (int(START_S) // BUCKET_S + n for n in (0, 1))

    buckets = history.recent().buckets

    assert buckets[first].outcomes == {"success": 1}
    assert buckets[first].output_tokens == 7
    assert buckets[first].ttft == {step_of(0.1): 1}
    assert buckets[first].tpot == {step_of(0.02): 1}
    assert buckets[second].outcomes == {"engine_error": 1, "success": 1}
    assert buckets[second].output_tokens == 3
    assert buckets[second].ttft == {}


def test_buckets_lie_on_the_wall_clock(clock):
    clock.now_s = START_S + 4.9
    history = History(clock)
    history.count_recompute()
    clock.now_s = START_S + 5.1
    history.count_recompute()

    assert [b.index * BUCKET_S for b in history.recent().buckets.values()] == [
        START_S,
        START_S + 5,
    ]


def test_a_quarter_of_an_hour_is_kept_and_no_more(history, clock):
    for _ in range(3 * BUCKETS):
        history.count_request("success")
        clock.now_s += BUCKET_S

    recent = history.recent()

    # The one that runs has none yet.
    assert len(recent.buckets) == BUCKETS - 1
    assert min(recent.buckets) * BUCKET_S == clock.now_s - WINDOW_S + BUCKET_S


def test_silence_lets_the_old_go(history, clock):
    history.count_request("success")
    clock.now_s += WINDOW_S

    assert history.recent().buckets == {}


def test_a_clock_set_back_or_far_ahead_is_survived(history, clock):
    history.count_request("success")
    for jump_s in (-7200, 100 * WINDOW_S, -50 * WINDOW_S):
        clock.now_s += jump_s
        history.count_request("success")
        recent = history.recent()
        assert list(outcomes(recent).values()) == [{"success": 1}]
        assert recent.started_s <= recent.now_s == clock.now_s


def test_memory_is_bounded_whatever_the_number_of_requests(history, clock):
    rng = random.Random(1)
    for _ in range(20_000):
        clock.now_s += 0.5
        history.count_request(
            "success",
            ttft_s=rng.uniform(0.01, 60),
            tpot_s=rng.uniform(0.01, 60),
            output_tokens=100,
        )
        history.keep_failure(failure(clock.now_s), is_clients=True)

    recent = history.recent()

    assert len(recent.buckets) <= BUCKETS
    assert len(recent.failures) == MAX_FAILURES
    assert len(msgspec.msgpack.encode(recent)) < 100_000
    assert sys.getsizeof(recent.buckets) < 20_000


def test_clients_faults_do_not_push_out_those_of_engines(history):
    history.keep_failure(failure(START_S, "engine"), is_clients=False)
    for number in range(2 * MAX_FAILURES):
        history.keep_failure(failure(START_S + 1 + number, f"c{number}"), is_clients=True)

    kept = [each.request_id for each in history.recent().failures]

    assert kept[0] == "engine"
    assert kept[-1] == f"c{2 * MAX_FAILURES - 1}"
    assert len(kept) == MAX_FAILURES + 1


def test_last_error_of_an_instance_replaces_the_one_before_and_counts(history, clock):
    history.keep_error("decode", "d:1", "refused")
    clock.now_s += 1
    history.keep_error("decode", "d:1", "lost")
    history.keep_error("prefill", "d:1", "timeout")

    errors = {(e.role, e.name): (e.reason, e.count, e.at_s) for e in history.recent().errors}

    assert errors == {
        ("decode", "d:1"): ("lost", 2, START_S + 1),
        ("prefill", "d:1"): ("timeout", 1, START_S + 1),
    }


def test_errors_of_instances_long_gone_make_room(history):
    for number in range(MAX_ERRORS + 10):
        history.keep_error("decode", f"d:{number}", "refused")

    names = [error.name for error in history.recent().errors]

    assert len(names) == MAX_ERRORS
    assert names[-1] == f"d:{MAX_ERRORS + 9}"
    assert "d:0" not in names


def play(histories, clock, seed=3):
    """Spread the same traffic over one or several histories."""
    rng = random.Random(seed)
    for number in range(400):
        clock.now_s += rng.uniform(0, 2)
        history = histories[number % len(histories)]
        outcome = rng.choice(["success", "engine_error"])
        history.count_request(outcome, ttft_s=rng.uniform(0, 9), output_tokens=number)
        if outcome != "success":
            history.keep_failure(failure(clock.now_s, f"r{number}"), is_clients=number % 3 == 0)
            history.keep_error("decode", f"d:{number % 5}", f"reason {number}")
        if number % 7 == 0:
            history.count_recompute()


def test_what_several_processes_counted_adds_up_to_what_one_would_have():
    one, several = Clock(), Clock()
    alone, parts = [History(one)], [History(several) for _ in range(4)]
    play(alone, one)
    play(parts, several)
    whole = alone[0].recent()

    merged = merge([part.recent() for part in parts])

    assert merged.buckets == whole.buckets
    assert merged.started_s == whole.started_s
    assert sorted(merged.errors, key=repr) == sorted(whole.errors, key=repr)
    assert merged.failures[-MAX_FAILURES:] == whole.failures[-MAX_FAILURES:]


def test_merging_changes_no_part(history):
    history.count_request("success", ttft_s=1.0)
    part = history.recent()
    before = msgspec.json.encode(part)

    merge([part, part])

    assert msgspec.json.encode(part) == before


def test_history_travels_between_processes_as_it_is(history):
    history.count_request("success", ttft_s=1.0)
    history.keep_failure(failure(), is_clients=False)
    history.keep_error("decode", "d:1", "lost")
    sent = msgspec.msgpack.encode(history.recent())

    assert msgspec.msgpack.decode(sent, type=Recent) == history.recent()


def test_texts_of_others_are_cut_and_fit_for_utf_8():
    assert shown("x" * 1000) == "x" * MAX_TEXT_CHARACTERS
    assert shown("a\ud800b") == "a?b"
    assert shown("été <b>") == "été <b>"
