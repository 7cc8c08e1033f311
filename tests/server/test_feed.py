"""Series, sums and percentiles out of a history."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy.core.durations import percentiles, step_of
from pdproxy.core.history import BUCKET_S, BUCKETS, WINDOW_S, Bucket, Recent
from pdproxy.dispatch.account import Outcome
from pdproxy.server.feed import FAULTS, MINUTE, SHARES, SMOOTHED, points, totals

# A multiple of BUCKET_S.
NOW_S = 1_800_000_000
NOW = NOW_S // BUCKET_S


def recent(*buckets, now_s=NOW_S + 2.0, started_s=NOW_S - 10_000.0):
    return Recent(now_s, started_s, {bucket.index: bucket for bucket in buckets}, [], [])


def timed(index, *ttfts):
    bucket = Bucket(index, outcomes={"success": len(ttfts)})
    for ttft_s in ttfts:
        bucket.ttft[step_of(ttft_s)] = bucket.ttft.get(step_of(ttft_s), 0) + 1
    return bucket


# --- points


def test_every_bucket_that_is_over_has_a_point():
    found = points(recent(), 0)

    assert [p.at_s for p in found] == list(range(NOW_S - WINDOW_S + BUCKET_S, NOW_S, BUCKET_S))
    assert all((p.requests, p.ttft_s) == (0, None) for p in found)


def test_there_is_no_point_before_the_start():
    found = points(recent(started_s=NOW_S - 12.0), 0)

    assert [p.at_s for p in found] == [NOW_S - 15, NOW_S - 10, NOW_S - 5]


def test_a_proxy_that_has_just_started_has_no_points():
    assert points(recent(started_s=NOW_S + 1.0), 0) == []


def test_a_point_has_the_counts_of_its_bucket():
    bucket = Bucket(
        NOW - 1,
        outcomes={"success": 5, "engine_error": 2, "client_error": 1, "client_disconnected": 1},
        output_tokens=70,
        recomputes=3,
    )

    point = points(recent(bucket), 0)[-1]

    counts = (point.requests, point.failed, point.output_tokens, point.recomputes)
    assert counts == (9, 2, 70, 3)


def test_percentiles_of_a_point_are_over_the_half_minute_that_ends_with_it():
    first = NOW - 20
    history = recent(timed(first, 0.1, 0.2), timed(first + 3, 0.4))
    by_index = {p.at_s // BUCKET_S: p.ttft_s for p in points(history, 0)}
    both = timed(0, 0.1, 0.2, 0.4)

    assert by_index[first - 1] is None
    assert by_index[first] == percentiles(timed(0, 0.1, 0.2).ttft, SHARES)
    assert by_index[first + SMOOTHED - 1] == percentiles(both.ttft, SHARES)
    assert by_index[first + SMOOTHED] == percentiles(timed(0, 0.4).ttft, SHARES)
    assert by_index[first + 3 + SMOOTHED] is None


@pytest.mark.parametrize("back", [1, 2, SMOOTHED, 30, BUCKETS])
def test_asking_since_a_time_gives_the_same_points_as_asking_for_all(back):
    history = recent(*(timed(NOW - n, 0.01 * n, 0.02 * n) for n in range(1, BUCKETS, 3)))
    since_s = NOW_S - back * BUCKET_S

    assert points(history, since_s) == [p for p in points(history, 0) if p.at_s >= since_s]


@pytest.mark.parametrize("since_s", [-5.0, 0.0, NOW_S * 10.0, 1e300])
def test_any_time_may_be_asked_for(since_s):
    assert len(points(recent(), since_s)) in {0, BUCKETS - 1}


# --- totals


def test_sums_include_the_bucket_that_runs():
    history = recent(*(Bucket(NOW - n, {"success": 1}, output_tokens=10) for n in range(BUCKETS)))

    minute, window = totals(history, MINUTE), totals(history, BUCKETS)

    assert (minute.requests, minute.output_tokens) == (MINUTE, 10 * MINUTE)
    assert (window.requests, window.outcomes) == (BUCKETS, {"success": BUCKETS})
    assert minute.seconds == 60 - BUCKET_S + 2.0


def test_sums_shortly_after_the_start_say_how_long_they_are():
    assert totals(recent(started_s=NOW_S - 1.0), BUCKETS).seconds == 3.0
    assert totals(recent(started_s=NOW_S - 1.0), MINUTE).seconds == 3.0


def test_totals_count_apart_what_clients_did_themselves():
    found = totals(recent(Bucket(NOW, {outcome.value: 1 for outcome in Outcome})), MINUTE)

    assert (found.requests, found.failed) == (len(Outcome), len(FAULTS))
    assert {"engine_error", "proxy_error", "rejected"} == FAULTS


def test_totals_leave_the_history_as_it_was():
    history = recent(timed(NOW, 0.1), timed(NOW - 1, 0.3))
    before = msgspec.json.encode(history)

    totals(history, BUCKETS)
    points(history, 0)

    assert msgspec.json.encode(history) == before
