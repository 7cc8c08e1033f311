import asyncio
import contextlib

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.retry import Phase
from pdproxy.dispatch.attempts import Attempts
from pdproxy.errors import (
    EngineAnswered,
    NoInstance,
    PDProxyError,
    Recomputed,
    UpstreamLost,
    UpstreamUnreachable,
)
from tests.dispatch.stage import FakeObserver, FirstOne

BUSY = EngineAnswered(429, [("retry-after", "7")], b"")
LOST = UpstreamLost("x")


@pytest.fixture
def fleet():
    return Fleet(LoadBoard(), {role: FirstOne() for role in Role}, lambda: 0.0)


def add(fleet, count):
    return [
        fleet.add(Role.DECODE, Endpoint("h", port + 1), state=State.ACTIVE)[0]
        for port in range(count)
    ]


def next_of(attempts, fleet):
    with attempts.lease(fleet, Role.DECODE, Cost()) as lease:
        return lease.instance


def test_one_that_has_not_failed_comes_first(fleet):
    d1, d2 = add(fleet, 2)
    attempts = Attempts()

    assert next_of(attempts, fleet) is d1
    attempts.note_failure(d1, LOST)
    assert next_of(attempts, fleet) is d2
    assert attempts.made == {Role.PREFILL: 0, Role.DECODE: 2}


def test_when_all_have_failed_those_that_are_not_busy_are_asked_again(fleet):
    d1, d2 = add(fleet, 2)
    attempts = Attempts()
    attempts.note_failure(d1, BUSY)
    attempts.note_failure(d2, LOST)

    assert next_of(attempts, fleet) is d2
    assert not attempts.is_other_free(fleet, Role.DECODE)
    assert attempts.busy_answer(fleet, Role.DECODE) is None
    assert attempts.last is LOST


def test_move_to_another_instance_is_told_with_how_it_ended(fleet):
    d1, _ = add(fleet, 2)
    attempts, observer = Attempts(), FakeObserver()
    next_of(attempts, fleet)
    with attempts.following(Role.DECODE, observer):
        attempts.note_failure(d1, UpstreamUnreachable("x"))
    assert observer.failovers == []

    for error, phase, result in (
        (None, Phase.CONNECT, "recovered"),
        (LOST, Phase.CONNECT, "failed"),
        (Recomputed("x"), Phase.CONNECT, "recovered"),
        (asyncio.CancelledError(), Phase.CONNECT, "abandoned"),
    ):
        next_of(attempts, fleet)
        quiet = contextlib.suppress(PDProxyError, asyncio.CancelledError)
        with quiet, attempts.following(Role.DECODE, observer):
            if error is not None:
                raise error
        assert observer.failovers.pop() == (Role.DECODE, phase, result)


def test_attempt_on_the_same_instance_is_no_move(fleet):
    (d1,) = add(fleet, 1)
    attempts = Attempts()
    attempts.note_failure(d1, LOST)

    assert next_of(attempts, fleet) is d1
    assert attempts.moved is None


def test_busy_answer_is_there_when_nobody_else_is(fleet):
    d1, d2 = add(fleet, 2)
    attempts = Attempts()
    attempts.note_failure(d1, BUSY)
    assert attempts.busy_answer(fleet, Role.DECODE) is None

    fleet.set_state(d2, State.GONE)

    assert attempts.busy_answer(fleet, Role.DECODE) is BUSY


def test_failures_of_one_leg_say_nothing_of_the_other(fleet):
    (d1,) = add(fleet, 1)
    p1, _ = fleet.add(Role.PREFILL, Endpoint("h", 1), state=State.ACTIVE)
    attempts = Attempts()
    attempts.note_failure(p1, BUSY)

    assert attempts.is_other_free(fleet, Role.DECODE)
    assert attempts.busy_answer(fleet, Role.DECODE) is None
    assert next_of(attempts, fleet) is d1


def test_nobody_at_all_is_told(fleet):
    attempts = Attempts()

    with pytest.raises(NoInstance):
        next_of(attempts, fleet)

    assert attempts.made[Role.DECODE] == 0
