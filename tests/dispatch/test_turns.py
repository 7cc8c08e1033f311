"""No more are at it than may be, and one that leaves lets the next one in."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.dispatch.turns import REST, Turns
from tests.fakes.waiting import until


@pytest.mark.parametrize(("most", "wanted"), [(0, 1), (1, 1), (3, 3)])
async def test_only_so_many_are_at_it(most, wanted):
    turns, now, seen = Turns(), 0, []

    async def one() -> None:
        nonlocal now
        async with turns.turn(most):
            now += 1
            seen.append(now)
            for _ in range(3):
                await asyncio.sleep(0)
            now -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(9):
            group.create_task(one())

    assert len(seen) == 9
    assert max(seen) == wanted


async def test_failure_and_cancellation_end_a_turn():
    turns, entered = Turns(), []

    async def one(name: str, *, fails: bool = False) -> None:
        async with turns.turn(1):
            entered.append(name)
            if fails:
                raise ValueError(name)
            await asyncio.Event().wait()

    with pytest.raises(ValueError, match="fails"):
        await one("fails", fails=True)
    tasks = [asyncio.create_task(one(name)) for name in ("first", "waits", "last")]
    await until(lambda: entered[1:] == ["first"])
    tasks[1].cancel()
    tasks[0].cancel()
    await until(lambda: entered[2:] == ["last"])
    tasks[2].cancel()
    await asyncio.wait(tasks)


async def test_turn_is_followed_by_a_rest_of_four_times_its_length():
    turns, loop = Turns(), asyncio.get_running_loop()

    async with turns.turn(1):
        began_s = loop.time()
        await asyncio.sleep(0.02)
        took_s = loop.time() - began_s
    ended_s = loop.time()
    async with turns.turn(1):
        rested_s = loop.time() - ended_s

    assert rested_s >= REST * took_s - 0.001
