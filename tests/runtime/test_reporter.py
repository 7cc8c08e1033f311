"""What has ended is counted and logged soon, together, and before anybody reads the counts."""

from __future__ import annotations

import logging
import random

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Role
from pdproxy.core.load import LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.in_flight import OwnInFlight
from pdproxy.runtime import reporter as reporters
from pdproxy.runtime.recorder import Recorder
from pdproxy.runtime.reporter import MOST, Reporter
from tests.fakes.waiting import until

CHAT = "/v1/chat/completions"


@pytest.fixture
def reporter(caplog):
    caplog.set_level(logging.INFO, logger="pdproxy.access")
    policies = {role: POLICIES["least_load"](role, random.Random(0)) for role in Role}
    fleet = Fleet(LoadBoard(), policies, lambda: 0.0)
    return Reporter(fleet, Recorder(), OwnInFlight(), lambda: 1.0)


@pytest.fixture
def logged(caplog):
    """Return what gives the number of access lines so far."""
    return lambda: sum(len(record.getMessage().splitlines()) for record in caplog.records)


def end(reporter, count=1):
    for number in range(count):
        reporter.request_started(CHAT)
        timeline = Timeline(0.0)
        timeline.mark_finished(0.5)
        reporter.request_finished(Account(f"r-{number}", CHAT, "peer", timeline, status=200))


async def test_request_that_ends_alone_is_logged_at_once(reporter, logged):
    end(reporter)

    assert logged() == 1
    assert reporter.in_flight == 0


async def test_requests_that_follow_are_logged_together_a_moment_later(
    reporter, logged, caplog, monkeypatch
):
    monkeypatch.setattr(reporters, "PAUSE_S", 0.01)
    end(reporter, 4)
    assert logged() == 1
    assert reporter.in_flight == 0

    await until(lambda: logged() == 4)

    assert [len(record.getMessage().splitlines()) for record in caplog.records] == [1, 3]


async def test_request_after_a_pause_is_logged_at_once_again(reporter, logged, monkeypatch):
    monkeypatch.setattr(reporters, "PAUSE_S", 0.001)
    end(reporter)
    await until(lambda: reporter._pause is None)

    end(reporter)

    assert logged() == 2


async def test_not_more_are_logged_together_than_hold_up_nobody(reporter, logged):
    end(reporter, 1 + MOST)

    assert logged() == 1 + MOST


async def test_page_counts_all_that_have_ended(reporter):
    end(reporter, 5)

    page = reporter.exposition()[0].decode()

    (line,) = [
        row
        for row in page.splitlines()
        if row.startswith("pdproxy_requests_total")
        and 'outcome="success"' in row
        and 'stream="false"' in row
        and CHAT in row
    ]
    assert line.endswith(" 5.0")
    assert f'pdproxy_requests_in_flight{{endpoint="{CHAT}"}} 0.0' in page


async def test_history_counts_all_that_have_ended(reporter):
    end(reporter, 5)

    recent = await reporter.recent()

    assert sum(bucket.outcomes["success"] for bucket in recent.buckets.values()) == 5


async def test_flush_leaves_nothing_to_be_lost_at_the_end(reporter, logged):
    end(reporter, 5)

    reporter.flush()

    assert logged() == 5
