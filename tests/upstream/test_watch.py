"""Watch: one timer, whatever the number of steps and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from pdproxy.upstream.watch import Watch


class FakeTimer:
    def __init__(self, at_s: float, ring: Callable[[], None]) -> None:
        self.at_s = at_s
        self.ring = ring
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """A clock and its timers, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[FakeTimer] = []
        self.made_count = 0

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, ring: Callable[[], None]) -> FakeTimer:
        self.made_count += 1
        self.timers.append(FakeTimer(at_s, ring))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [t for t in self.timers if t.at_s <= end_s and not t.is_cancelled]:
            timer = min(due, key=lambda t: t.at_s)
            self.timers.remove(timer)
            self.now_s = max(self.now_s, timer.at_s)
            timer.ring()
        self.now_s = end_s


def watching() -> tuple[FakeLoop, Watch, list[float]]:
    loop = FakeLoop()
    rung: list[float] = []
    watch = Watch(cast(asyncio.AbstractEventLoop, loop), lambda: rung.append(loop.now_s))
    return loop, watch, rung


def test_it_expires_once_after_its_limit():
    loop, watch, rung = watching()

    watch.expect(5)
    loop.advance(4.9)
    assert rung == []
    loop.advance(100)

    assert rung == [105.0]


def test_a_noted_step_moves_the_end_without_a_new_timer():
    loop, watch, rung = watching()
    watch.expect(5)

    for _ in range(4):
        loop.advance(1)
        watch.since_s = loop.now_s
    assert loop.made_count == 1
    loop.advance(100)

    assert rung == [109.0]


def test_a_shorter_limit_rings_in_time():
    loop, watch, rung = watching()
    watch.expect(600)

    loop.advance(10)
    watch.expect(2)
    loop.advance(700)

    assert rung == [112.0]


def test_a_longer_limit_uses_the_timer_that_is_armed():
    loop, watch, rung = watching()
    watch.expect(2)

    watch.expect(10)
    assert loop.made_count == 1
    loop.advance(100)

    assert rung == [110.0]


def test_no_limit_never_rings():
    loop, watch, rung = watching()
    watch.expect(2)

    watch.expect(None)
    loop.advance(100)

    assert rung == []


def test_a_thousand_exchanges_within_one_limit_cost_one_timer():
    loop, watch, rung = watching()

    for _ in range(1000):
        watch.expect(5)
        loop.advance(0.001)
        watch.expect(None)

    assert loop.made_count == 1
    assert rung == []


def test_a_stopped_watch_leaves_no_timer():
    loop, watch, rung = watching()
    watch.expect(5)

    watch.stop()

    assert all(timer.is_cancelled for timer in loop.timers)
    loop.advance(100)
    assert rung == []


def test_a_clock_of_milliseconds_does_not_ring_in_a_loop():
    loop, watch, rung = watching()
    watch.expect(5)

    loop.now_s += 4.9995
    loop.timers.pop().ring()

    assert len(rung) == 1
