"""The server's parts on a socket: one handler, or the whole application over fake engines."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from pdproxy.core.instance import Endpoint, Role, Source, State
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.dispatch.account import Account
from pdproxy.runtime.recorder import Recorder
from pdproxy.server.context import Context, RunningRequest, ServerRules
from pdproxy.server.running import shown
from pdproxy.server.shutdown import Shutdown
from tests.dispatch.stage import Stage
from tests.dispatch.stage import stage as engines

RULES = ServerRules(
    max_body_bytes=1 << 20,
    body_s=10,
    buffer_bytes=1 << 16,
    write_stall_s=10,
    models_s=2,
    models_cache_s=5,
    engine_key="",
    fallback_key="",
    api_keys=(),
    admin_token="",
    via="1.1 pdproxy-test",
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class FakeRequests:
    """Keeps what it is told of requests."""

    started: list[str] = field(default_factory=list)
    finished: list[Account] = field(default_factory=list)

    def request_started(self, endpoint: str) -> None:
        self.started.append(endpoint)

    def request_finished(self, account: Account) -> None:
        self.finished.append(account)

    @property
    def in_flight(self) -> int:
        return len(self.started) - len(self.finished)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        return b"# metrics\n", "text/plain; version=0.0.4; charset=utf-8"


class FakeRoster:
    """Keeps what it is asked; instances it adds are active at once unless `is_slow`."""

    def __init__(self, play: Stage) -> None:
        self._fleet = play.fleet
        self.is_slow = False
        self.records: list[InstanceRecord] = []

    async def add(self, role: Role, endpoint: Endpoint) -> Change:
        state = State.JOINING if self.is_slow else State.ACTIVE
        _, is_new = self._fleet.add(role, endpoint, state=state, source=Source.CALL)
        return Change.WAITING if is_new else Change.UNCHANGED

    async def remove(self, role: Role, endpoint: Endpoint) -> Change:
        instance = self._fleet.find(role, endpoint)
        if instance is None:
            return Change.UNKNOWN
        self._fleet.set_state(instance, State.DRAINING)
        return Change(self._fleet.state(instance))

    async def drain(self, role: Role, endpoint: Endpoint, deadline_s: float | None) -> Change:
        return await self.remove(role, endpoint)

    async def undrain(self, role: Role, endpoint: Endpoint) -> Change:
        return await self.add(role, endpoint)

    async def describe(self) -> list[InstanceRecord]:
        return self.records or self._fleet.records()


@dataclass(slots=True)
class Server:
    """A context over fake engines; `port` is set while something serves."""

    context: Context
    play: Stage
    requests: FakeRequests
    roster: FakeRoster
    recorder: Recorder
    port: int = 0

    @property
    def account(self) -> Account:
        """The account of the only request."""
        assert len(self.requests.started) == len(self.requests.finished) == 1
        return self.requests.finished[0]


@asynccontextmanager
async def server(
    p: Any = (None,),
    d: Any = (None,),
    rules: dict[str, Any] | None = None,
    recorder: Recorder | None = None,
    **dispatch: Any,
) -> AsyncIterator[Server]:
    """A context over fake engines; `rules` replace those of RULES, `dispatch` those of dispatch."""
    async with engines(p, d, **dispatch) as play:
        requests, roster = FakeRequests(), FakeRoster(play)
        recorder = recorder or Recorder()

        async def own_requests() -> list[RunningRequest]:
            return shown(context.running.values(), context.clock())

        context = Context(
            tools=play.tools,
            rules=replace(RULES, **(rules or {})),
            observer=requests,
            requests=own_requests,
            page=requests.scrape,
            roster=roster,
            history=recorder,
            clock=time.monotonic,
            rng=random.Random(0),
            shutdown=Shutdown(),
        )
        made = Server(context, play, requests, roster, recorder)
        yield made


@asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[int]:
    """Serve an application as the worker does; yields the port."""
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, handle_signals=False, shutdown_timeout=1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def handling(handler: Handler) -> AsyncIterator[int]:
    """Serve every path by one handler; yields the port."""
    app = web.Application(client_max_size=1 << 20)
    app.router.add_route("*", "/{path:.*}", handler)
    async with listening(app) as port:
        yield port
