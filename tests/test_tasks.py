import asyncio
import gc
import logging

import pytest

from pdproxy import tasks
from pdproxy.tasks import keep_calling, spawn


async def test_result_and_name_are_those_of_a_task():
    async def work() -> int:
        return 7

    task = spawn(work(), name="mine")

    assert task.get_name() == "mine"
    assert await task == 7


async def test_running_task_is_referenced_and_a_done_one_is_not():
    gate = asyncio.Event()
    task = spawn(gate.wait(), name="waiting")
    gc.collect()
    assert task in tasks._RUNNING

    gate.set()
    await task
    await asyncio.sleep(0)

    assert task not in tasks._RUNNING


async def test_death_is_logged_with_its_name(caplog):
    async def die() -> None:
        raise ValueError("why")

    task = spawn(die(), name="poor")
    with pytest.raises(ValueError, match="why"):
        await task
    await asyncio.sleep(0)

    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "poor" in record.getMessage()
    assert record.exc_info is not None


async def test_cancellation_is_no_death(caplog):
    task = spawn(asyncio.Event().wait(), name="leaving")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)

    assert not caplog.records
    assert task not in tasks._RUNNING


async def test_what_is_called_again_and_again_outlives_its_failures(caplog):
    calls: list[bool] = []
    is_enough = asyncio.Event()

    def act() -> None:
        is_bad = len(calls) in (1, 2, 4)
        calls.append(is_bad)
        if len(calls) == 6:
            is_enough.set()
        if is_bad:
            raise ValueError("why")

    task = spawn(keep_calling(act, 0, "telling"), name="keeping")
    await is_enough.wait()
    task.cancel()

    logged = [record for record in caplog.records if "telling failed" in record.getMessage()]
    assert len(logged) == 2, "one for each row of failures"
