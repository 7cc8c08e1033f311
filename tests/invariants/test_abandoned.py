"""Clients that leave between the legs: soon their prefillers hold nothing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from pdproxy.core.api import Api, parse_generate
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.batch import answer
from pdproxy.dispatch.legs import Call
from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.dispatch.stage import FakeDownstream, stage
from tests.fakes.client import as_json
from tests.fakes.waiting import until

CLIENTS = 1000
# Prefilled prompts stay pinned for longer than the test may take, and all fit.
CONFIG = SimConfig(kv_lease_s=600, num_blocks=8192, max_num_seqs=2000)


@pytest.mark.slow
@pytest.mark.case("C42")
async def test_thousand_clients_that_leave_between_the_legs_leave_nothing_held():
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        play = await stack.enter_async_context(stage(p=[], d=[]))
        sims = {role: [await stack.enter_async_context(in_process(CONFIG))] for role in Role}
        for role, (sim,) in sims.items():
            play.fleet.add(role, Endpoint("127.0.0.1", sim.port), state=State.ACTIVE)
        (prefiller,) = sims[Role.PREFILL]
        leaving: list[asyncio.Task[None]] = []

        async def one(number: int) -> None:
            body = {"prompt": f"{number} times upon a time", "max_tokens": 4, "stream": True}
            account = Account("id", Api.COMPLETIONS.value, "peer", Timeline(0.0))
            # The mark between the legs is where the client leaves.
            account.timeline = _Leaving(0.0)
            request = parse_generate(Api.COMPLETIONS, as_json(body))
            call = Call(account, [("content-type", "application/json")], None)
            await answer(play.tools, request, call, FakeDownstream())

        for start in range(0, CLIENTS, 100):
            leaving += [loop.create_task(one(start + k)) for k in range(100)]
            await asyncio.gather(*leaving, return_exceptions=True)
        # Below a second on an idle machine; the bound is for a busy one.
        await until(lambda: not prefiller.books.held_blocks, 30)
        await until(lambda: play.orphans.is_idle)
        play.assert_idle()

    assert all(task.cancelled() for task in leaving)
    counts = prefiller.engine.handles.counts
    # Where a connection was kept, the decode had been written when its client left.
    assert (counts.issued, counts.expired) == (CLIENTS, 0)
    assert counts.pulled + counts.released == CLIENTS
    assert play.observer.abandoned == ["released"] * CLIENTS


class _Leaving(Timeline):
    """A client that leaves as soon as its prompt is prefilled."""

    def mark_prefill_done(  # type: ignore[explicit-override]  # typing has it from 3.12
        self, now: float
    ) -> None:
        super().mark_prefill_done(now)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
