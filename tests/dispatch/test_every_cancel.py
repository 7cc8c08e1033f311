"""A request cancelled at every await of its path: no load, task or upstream request is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cases.scene import CHAT, COMPLETIONS, chat, completion
from tests.dispatch.application import PASSED_ON, Stage, stage_of
from tests.fakes import behaviours, client
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import Reply
from tests.fakes.suspensions import Moment, Suspensions, child_tasks_watched
from tests.fakes.waiting import until
from tests.fakes.wire import PeerGone

MAX_SUSPENSIONS = 200  # far above what a request needs

# --- what is asked, and of whom


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of request.

    Attributes:
        least_suspensions: how many it has at least, whatever comes in one read; fewer would mean
            that nothing is tested.
        reads_late: the client lets its answer pile up before it reads.
    """

    path: str
    body: dict[str, Any] | bytes
    p: Sequence[Behaviour | None] = (None,)
    d: Sequence[Behaviour | None] = (None,)
    least_suspensions: int = 3
    reads_late: bool = False


def fails_first(failure: Behaviour) -> Behaviour:
    """Return an engine that fails the first attempt of each request, told apart by its seed."""

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        seed = request.json["seed"]
        attempts = sum(call.json.get("seed") == seed for call in request.engine.calls)
        healthy = behaviours.default_for(request.engine.role)
        await (failure if attempts == 1 else healthy)(request, answer)

    return behaviour


async def flood(_request: EngineRequest, answer: Answer) -> None:
    """Say more than all buffers between the engine and the client hold."""
    await answer.start_stream()
    said = {"choices": [{"index": 0, "delta": {"content": "x" * (1 << 20)}}]}
    for _ in range(12):
        await answer.event(said)
    await answer.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    await answer.chunk(behaviours.DONE)
    await answer.end()


async def hear(_: EngineRequest, answer: Answer) -> None:
    """Answer an upload in two parts."""
    await answer.head(200, [("content-type", "text/plain"), ("transfer-encoding", "chunked")])
    await answer.chunk(b"oui")
    await answer.end()


PROMPTS = ["un", "deux", "trois"]
LOST = fails_first(behaviours.reset)
BUSY = fails_first(behaviours.error(500))
RECOMPUTED = fails_first(behaviours.recompute(2))
SCENARIOS = {
    "stream": Scenario(CHAT, chat(stream=True)),
    "document": Scenario(CHAT, chat()),
    "choices": Scenario(CHAT, chat(stream=True, n=2)),
    "prompts-streamed": Scenario(
        COMPLETIONS, completion(prompt=PROMPTS, stream=True), least_suspensions=6
    ),
    "prompts": Scenario(COMPLETIONS, completion(prompt=PROMPTS), least_suspensions=6),
    "decoder-alone": Scenario(COMPLETIONS, completion(echo=True, logprobs=1), least_suspensions=2),
    "prefill-again": Scenario(CHAT, chat(stream=True), p=[LOST], least_suspensions=5),
    "decode-again": Scenario(CHAT, chat(stream=True), d=[LOST], least_suspensions=5),
    "decode-again-document": Scenario(CHAT, chat(), d=[BUSY], least_suspensions=4),
    "slow-client": Scenario(CHAT, chat(stream=True), d=[flood], reads_late=True),
    "refused": Scenario(CHAT, chat(stream=True), d=[behaviours.error(400)]),
    "continued": Scenario(CHAT, chat(stream=True), d=[RECOMPUTED], least_suspensions=5),
    "continued-document": Scenario(CHAT, chat(), d=[RECOMPUTED], least_suspensions=4),
    "given-back": Scenario(CHAT, chat(stream=True), d=[behaviours.recompute(2)]),
    "passed-on": Scenario(PASSED_ON, b"\x00" * 100_000, d=[hear], least_suspensions=2),
}


async def ask(stage: Stage, scenario: Scenario, seed: int) -> Reply | None:
    """Return the answer; None if the connection was closed without one."""
    kind, body = "application/octet-stream", scenario.body
    if not isinstance(body, bytes):
        kind, body = "application/json", client.as_json({**body, "seed": seed})
    head = client.request_bytes("POST", scenario.path, body, [("Content-Type", kind)])
    async with await client.RawClient.connect(stage.port) as peer:
        try:
            # Apart, so that the handler waits for the body.
            await peer.wire.write(head.removesuffix(body))
            await until(lambda: stage.watcher.seen)
            await peer.wire.write(body)
            reply = await peer.read_head()
            if scenario.reads_late:
                peer.wire.pause_reading()
                await asyncio.sleep(0.05)
                peer.wire.resume_reading()
            return await peer.read_rest(reply)
        except PeerGone:
            return None


@pytest.mark.slow
@pytest.mark.parametrize("connections", ["fresh", "kept"])
@pytest.mark.parametrize("moment", ["asleep", "waking", "twice"])
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
async def test_request_cancelled_at_any_await_leaves_nothing_behind(
    scenario: Scenario, moment: Moment, connections: str
) -> None:
    reply, at = None, -1

    async with stage_of(scenario.p, scenario.d) as stage:
        with child_tasks_watched():
            for at in range(MAX_SUSPENSIONS):
                stage.watcher = Suspensions(at, moment)
                reply = await ask(stage, scenario, seed=at)
                await stage.assert_nothing_left()
                if not stage.watcher.is_reached:
                    break
                if connections == "fresh":
                    stage.close_idle_connections()

    assert scenario.least_suspensions <= at < MAX_SUSPENSIONS - 1
    assert reply is not None
    assert reply.ended
