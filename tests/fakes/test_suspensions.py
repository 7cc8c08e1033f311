"""The canceller strikes each suspension once, and only a run that it spares comes to its end."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.suspensions import Moment, Suspensions, child_tasks_watched


async def child(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)


async def work() -> int:
    await asyncio.sleep(0.001)
    async with asyncio.TaskGroup() as group:
        group.create_task(child(2))
        group.create_task(child(0))
    return 5


@pytest.mark.parametrize("moment", ["asleep", "waking", "twice"])
async def test_each_suspension_is_struck_in_turn_until_the_work_is_done(moment: Moment) -> None:
    loop = asyncio.get_running_loop()
    runs: list[Suspensions] = []
    results: list[int] = []

    with child_tasks_watched():
        for at in range(20):
            watcher = Suspensions(at, moment)
            runs.append(watcher)
            task = loop.create_task(watcher.run(work()))
            await asyncio.wait({task})
            assert task.cancelled() == watcher.has_struck
            assert all(other.done() for other in watcher.children)
            if not watcher.is_reached:
                results.append(task.result())
                break

    # Its own two, two of the first child and its sleep, the sleep of the second child.
    assert [run.has_struck for run in runs] == [True] * 6 + [False]
    assert results == [5]


async def test_cancel_at_the_moment_of_waking_loses_what_was_waited_for() -> None:
    loop = asyncio.get_running_loop()
    treasure: asyncio.Future[int] = loop.create_future()
    found: list[int] = []

    async def wait_for_treasure() -> None:
        found.append(await treasure)

    task = loop.create_task(Suspensions(0, "waking").run(wait_for_treasure()))
    await asyncio.sleep(0)
    treasure.set_result(7)
    await asyncio.wait({task})

    assert task.cancelled()
    assert treasure.result() == 7
    assert not found
