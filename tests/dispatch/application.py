"""The application on a socket, with hands on what `runtime.worker` keeps to itself."""

# Python 3.11 has no typing.override to mark the overriding method with.
# mypy: disable-error-code="explicit-override"

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pdproxy.connectors.pull import PullConnector
from pdproxy.core.admission import Limits
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Load, LoadBoard, OutputEstimator, TokenEstimator
from pdproxy.core.policy import POLICIES
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.dispatch.admission import Admission
from pdproxy.dispatch.legs import Tools
from pdproxy.dispatch.orphans import Orphans, ReleaseRules
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.recorder import Recorder
from pdproxy.runtime.rules import client_limits, dispatch_rules, server_rules
from pdproxy.runtime.sources import load_settings
from pdproxy.server.app import build_app
from pdproxy.server.context import Context, RunningRequest
from pdproxy.server.shutdown import Shutdown
from pdproxy.upstream.client import EngineClient
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.suspensions import Suspensions
from tests.fakes.waiting import until

PASSED_ON = "/v1/audio/transcriptions"
# A busy machine may stand still for longer than a connection may take by default.
PATIENT = ("--connect-timeout", "60")
# Three rounds: a first one, one between others, and the last one.
ARGUMENTS = (*PATIENT, "--retry-delay", "0", "--max-rounds", "3", "--stream-buffer-bytes", "1024")


async def no_requests() -> list[RunningRequest]:
    """Show none: nobody asks here."""
    return []


class NoRoster:
    """A roster for a proxy whose instances never change."""

    async def add(self, *_: object) -> Change:
        return Change.UNCHANGED

    async def remove(self, *_: object) -> Change:
        return Change.UNKNOWN

    async def drain(self, *_: object) -> Change:
        return Change.UNKNOWN

    async def undrain(self, *_: object) -> Change:
        return Change.UNKNOWN

    async def describe(self) -> list[InstanceRecord]:
        return []


@dataclass(slots=True)
class Stage:
    """The application on a socket, with hands on what `runtime.worker` keeps to itself."""

    port: int
    fleet: Fleet
    metrics: Metrics
    engine_client: EngineClient
    engines: Sequence[FakeEngine]
    anomalies: list[str]
    watcher: Suspensions = field(default_factory=lambda: Suspensions(-1, "asleep"))

    def loads(self) -> list[Load]:
        return [self.fleet.load(i) for role in Role for i in self.fleet.instances(role)]

    def busy_connections(self) -> int:
        pool = self.engine_client._pool
        if pool is None:
            return 0
        idle = sum(
            self.engine_client.idle_connections(Endpoint.parse(engine.address))
            for engine in self.engines
        )
        return len(pool.connections) - idle

    def close_idle_connections(self) -> None:
        for engine in self.engines:
            self.engine_client.forget(Endpoint.parse(engine.address))

    def left_behind(self) -> dict[str, object]:
        """Return what a request that has ended must not leave; empty if all is well."""
        found = {
            "loads": [load for load in self.loads() if load != Load()],
            "anomalies": self.anomalies,
            "in flight": self.metrics.in_flight,
            "open upstream": sum(engine.open_answers for engine in self.engines),
            "busy connections": self.busy_connections(),
            "tasks": [task for task in self.watcher.children if not task.done()],
        }
        return {name: value for name, value in found.items() if value}

    async def assert_nothing_left(self) -> None:
        try:
            await until(lambda: not self.left_behind())
        except TimeoutError:
            raise AssertionError(self.left_behind()) from None


class HeldAnswer(Answer):
    """Says nothing more once the request was cancelled: only a closed connection ends it."""

    def __init__(self, answer: Answer, stage: Stage) -> None:
        super().__init__(answer._wire)
        self._stage = stage

    async def send(self, data: bytes) -> None:
        if self._stage.watcher.has_struck:
            await self.hang()
        await super().send(data)


def held(behaviour: Behaviour, stage: Stage) -> Behaviour:
    """Return `behaviour` with an answer that stops when the request is cancelled."""

    async def held_behaviour(request: EngineRequest, answer: Answer) -> None:
        mine = HeldAnswer(answer, stage)
        try:
            await behaviour(request, mine)
        finally:
            answer.left = mine.left

    return held_behaviour


@asynccontextmanager
async def stage_of(
    p: Sequence[Behaviour | None], d: Sequence[Behaviour | None]
) -> AsyncIterator[Stage]:
    """Serve the real application; its handlers run under the stage's watcher."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine("prefill", b)) for b in p]
        engines += [await stack.enter_async_context(FakeEngine("decode", b)) for b in d]
        anomalies: list[str] = []
        board = LoadBoard(on_anomaly=lambda _, text: anomalies.append(text))
        rng = random.Random(1)
        policies = {role: POLICIES["least_load"](role, rng) for role in Role}
        fleet = Fleet(board, policies, time.monotonic)
        for engine in engines:
            fleet.add(Role(engine.role), Endpoint.parse(engine.address), state=State.ACTIVE)
        settings = load_settings([*ARGUMENTS], {})
        metrics = Metrics(fleet)
        engine_client = EngineClient(client_limits(settings))
        stack.push_async_callback(engine_client.close)
        connector = PullConnector()
        orphans = Orphans(
            ReleaseRules(meeting_s=0.0), engine_client, fleet, connector, metrics, time.monotonic
        )
        stack.push_async_callback(orphans.close)
        tools = Tools(
            client=engine_client,
            fleet=fleet,
            connector=connector,
            tokens=TokenEstimator(),
            outputs=OutputEstimator(),
            rules=dispatch_rules(settings),
            observer=metrics,
            clock=time.monotonic,
            rng=rng,
            orphans=orphans,
            admission=Admission(Limits(), fleet, metrics, time.monotonic),
        )
        context = Context(
            tools=tools,
            rules=server_rules(settings, rng),
            observer=metrics,
            requests=no_requests,
            page=metrics.scrape,
            roster=NoRoster(),
            history=Recorder(),
            clock=time.monotonic,
            rng=rng,
            shutdown=Shutdown(),
        )
        stage = Stage(0, fleet, metrics, engine_client, engines, anomalies)
        for engine in engines:
            engine.behaviour = held(engine.behaviour, stage)
            # What is passed on does not reach the behaviour by itself.
            engine.routes[PASSED_ON] = engine.behaviour
        app = build_app(context)

        @web.middleware
        async def watched(request: web.Request, handler: Any) -> web.StreamResponse:
            response: web.StreamResponse = await stage.watcher.run(handler(request))
            return response

        app.middlewares.append(watched)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stage.port = runner.addresses[0][1]
        yield stage
