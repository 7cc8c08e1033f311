"""The end of one serving process, step by step."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.errors import ShuttingDown
from pdproxy.server.shutdown import Shutdown, ShutdownRules

NO_TIME = ShutdownRules(delay_s=0.0, grace_s=0.0)
MUCH_TIME = ShutdownRules(delay_s=60.0, grace_s=60.0)
BOUND_S = 5.0


async def request(shutdown: Shutdown, end: asyncio.Event) -> str:
    try:
        with shutdown.running():
            await end.wait()
    except ShuttingDown:
        return "cut"
    return "done"


async def test_what_runs_when_the_grace_is_over_is_cut_with_a_reason():
    shutdown, end = Shutdown(), asyncio.Event()
    tasks = [asyncio.create_task(request(shutdown, end)) for _ in range(3)]
    await asyncio.sleep(0)
    shutdown.begin()
    await shutdown.finish(NO_TIME)

    assert await asyncio.gather(*tasks) == ["cut"] * 3
    assert shutdown.cut == 3


async def test_the_end_comes_as_soon_as_the_last_request_has_ended():
    shutdown, end = Shutdown(), asyncio.Event()
    task = asyncio.create_task(request(shutdown, end))
    await asyncio.sleep(0)
    shutdown.begin()
    finishing = asyncio.create_task(shutdown.finish(MUCH_TIME))
    await asyncio.sleep(0)
    end.set()
    async with asyncio.timeout(BOUND_S):
        await finishing

    assert await task == "done"
    assert shutdown.cut == 0


@pytest.mark.parametrize("step", ["delay", "finish"])
async def test_a_second_call_takes_the_time_that_is_left(step):
    shutdown, end = Shutdown(), asyncio.Event()
    task = asyncio.create_task(request(shutdown, end))
    await asyncio.sleep(0)
    shutdown.begin()
    waiting = asyncio.create_task(getattr(shutdown, step)(MUCH_TIME))
    await asyncio.sleep(0)
    shutdown.begin()
    async with asyncio.timeout(BOUND_S):
        await waiting
        await shutdown.finish(MUCH_TIME)

    assert await task == "cut"


async def test_a_client_that_leaves_is_not_taken_for_cut():
    shutdown = Shutdown()
    task = asyncio.create_task(request(shutdown, asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await shutdown.finish(NO_TIME)
    assert shutdown.cut == 0


async def test_a_request_that_comes_after_the_cut_is_refused():
    shutdown = Shutdown()
    await shutdown.finish(NO_TIME)

    assert await request(shutdown, asyncio.Event()) == "cut"


async def test_without_a_signal_nothing_is_delayed():
    shutdown = Shutdown()
    async with asyncio.timeout(BOUND_S):
        await shutdown.delay(MUCH_TIME)

    assert not shutdown.has_begun
