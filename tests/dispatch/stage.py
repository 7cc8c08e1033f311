"""What stands around dispatch in its tests: a client, an observer, and fake engines on sockets."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import orjson

from pdproxy.connectors.pull import PullConnector
from pdproxy.core.admission import Limits
from pdproxy.core.api import Api, parse_generate
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Instance, Role, State
from pdproxy.core.load import NO_LOAD, Cost, LoadBoard, OutputEstimator, TokenEstimator
from pdproxy.core.policy import Candidate, Reason
from pdproxy.core.retry import Phase
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.admission import Admission
from pdproxy.dispatch.batch import answer
from pdproxy.dispatch.legs import Call, Tools
from pdproxy.dispatch.orphans import Orphans, ReleaseRules
from pdproxy.dispatch.ports import Headers
from pdproxy.dispatch.rules import DispatchRules
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.limits import ClientLimits, Timeouts
from pdproxy.upstream.response import Response
from tests.fakes import behaviours
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import events_of
from tests.fakes.engine import FakeEngine

KINDS: dict[Role, behaviours.Role] = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
QUICK = Timeouts(connect_s=2, head_s=10, idle_s=10)
RULES = DispatchRules(
    max_attempts=3,
    retry_delay_s=0.0,
    prefill=QUICK,
    decode_stream=QUICK,
    decode_whole=QUICK,
    first_token_s=10,
    kv_handle_ttl_s=25,
    max_event_bytes=1 << 20,
    max_answer_bytes=1 << 20,
    max_parallel_prompts=2,
)

RELEASES = ReleaseRules(meeting_s=0.0)


class FakeDownstream:
    """A client that keeps what it is sent, and fails the test on a write that may not be."""

    def __init__(self) -> None:
        self.headers: Headers = ()
        self.blocks: list[bytes] = []
        self.answer: tuple[int, bytes] | None = None
        self.is_started = False
        self.is_over = False
        self.is_congested = False
        self.drains = 0

    @property
    def is_committed(self) -> bool:
        return self.is_started or self.answer is not None

    @property
    def events(self) -> list[Any]:
        """The events it was sent: [DONE] as text, others decoded."""
        texts = events_of(b"".join(self.blocks))
        return [text if text == "[DONE]" else orjson.loads(text) for text in texts]

    @property
    def json(self) -> Any:
        assert self.answer is not None
        return orjson.loads(self.answer[1])

    async def start(self, headers: Headers) -> None:
        assert not self.is_committed
        self.headers = headers
        self.is_started = True

    async def start_raw(self, status: int, headers: Headers) -> None:
        await self.start([(":status", str(status)), *headers])

    def write(self, block: bytes) -> None:
        assert self.is_started
        assert not self.is_over, block
        assert block
        self.blocks.append(block)

    async def drain(self) -> None:
        self.drains += 1
        self.is_congested = False

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        assert not self.is_committed
        self.headers = headers
        self.answer = (status, body)


@dataclass(slots=True)
class FakeObserver:
    """Keeps what it is told."""

    attempts: list[tuple[Role, str, str]] = field(default_factory=list)
    retries: list[tuple[Role, str]] = field(default_factory=list)
    rounds: list[tuple[str, str]] = field(default_factory=list)
    routes: list[tuple[Role, Reason]] = field(default_factory=list)
    failovers: list[tuple[Role, Phase, str]] = field(default_factory=list)
    exhausted: list[Instance] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    full: int = 0
    missing: int = 0
    abandoned: list[str] = field(default_factory=list)
    lost_replies: int = 0
    queued: int = 0
    waits: list[float] = field(default_factory=list)

    def routed(self, role: Role, reason: Reason) -> None:
        self.routes.append((role, reason))

    def failed_over(self, role: Role, phase: Phase, result: str) -> None:
        self.failovers.append((role, phase, result))

    def prefill_skipped(self, reason: str) -> None:
        self.skipped.append(reason)

    def ran_out(self, instance: Instance) -> None:
        assert instance.role is Role.DECODE
        self.exhausted.append(instance)

    def pulse_full(self, account: Account) -> None:
        self.full += 1
        account.pulse.clear()

    def attempt_finished(
        self, instance: Instance, outcome: str, seconds: float, reason: str = ""
    ) -> None:
        assert seconds >= 0
        self.attempts.append((instance.role, outcome, reason))

    def queue_changed(self, change: int) -> None:
        self.queued += change
        assert self.queued >= 0

    def queue_left(self, seconds: float) -> None:
        self.waits.append(seconds)

    def retried(self, role: Role, reason: str) -> None:
        self.retries.append((role, reason))

    def recompute_ended(self, decoder: str, result: str) -> None:
        self.rounds.append((decoder, result))

    def recomputed_tokens(self, model: str, tokens: int) -> None:
        assert tokens >= 0

    def handle_missing(self, instance: Instance) -> None:
        assert instance.role is Role.PREFILL
        self.missing += 1

    def handle_abandoned(self, instance: Instance, action: str) -> None:
        assert instance.role is Role.PREFILL
        self.abandoned.append(action)

    def prefill_reply_lost(self, instance: Instance) -> None:
        assert instance.role is Role.PREFILL
        self.lost_replies += 1


class WatchedClient(EngineClient):
    """Counts the response heads that have arrived, and tells of each."""

    heads = 0
    on_head: Callable[[Endpoint, Response], object] = staticmethod(lambda *_: None)

    async def send(  # type: ignore[explicit-override]  # typing has it from 3.12
        self, endpoint: Endpoint, *args: Any, **more: Any
    ) -> Response:
        response = await super().send(endpoint, *args, **more)
        self.heads += 1
        self.on_head(endpoint, response)
        return response


class FirstOne:
    """Always picks the first candidate, so that a test knows who is asked."""

    name: ClassVar[str] = "first_one"

    def pick(self, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
        return candidates[0]


class Clock:
    """A monotonic clock that a test may put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass(slots=True)
class Stage:
    """Fake engines and the tools of dispatch; `p` and `d` are prefillers and decoders."""

    tools: Tools
    client: WatchedClient
    observer: FakeObserver
    clock: Clock
    p: list[FakeEngine]
    d: list[FakeEngine]
    account: Account = field(
        default_factory=lambda: Account("id", Api.CHAT.value, "peer", Timeline(0.0))
    )

    @property
    def fleet(self) -> Fleet:
        return self.tools.fleet

    @property
    def orphans(self) -> Orphans:
        return self.tools.orphans

    @property
    def calls(self) -> tuple[int, int]:
        """How often prefillers and decoders were asked."""
        return sum(len(e.calls) for e in self.p), sum(len(e.calls) for e in self.d)

    async def run(
        self,
        downstream: FakeDownstream,
        body: dict[str, Any],
        api: Api = Api.CHAT,
        headers: Headers = (),
    ) -> FakeDownstream:
        """Answer one request; returns `downstream`."""
        request = parse_generate(api, orjson.dumps(body))
        call = Call(self.account, [("content-type", "application/json"), *headers], None)
        await answer(self.tools, request, call, downstream)
        downstream.is_over = True
        return downstream

    def instance(self, engine: FakeEngine) -> Instance:
        role = Role.PREFILL if engine in self.p else Role.DECODE
        found = self.fleet.find(role, Endpoint.parse(engine.address))
        assert found is not None
        return found

    def assert_idle(self) -> None:
        """Nothing is charged to any instance."""
        for role in Role:
            for instance in self.fleet.instances(role):
                assert self.fleet.load(instance) == NO_LOAD, instance.label


@asynccontextmanager
async def stage(
    p: Sequence[Behaviour | None] = (None,),
    d: Sequence[Behaviour | None] = (None,),
    *,
    limits: ClientLimits | None = None,
    admission: Limits | None = None,
    **rules: Any,
) -> AsyncIterator[Stage]:
    """Start an engine per behaviour, None for a healthy one; `rules` replace those of RULES."""
    clock, observer = Clock(), FakeObserver()
    fleet = Fleet(LoadBoard(), {role: FirstOne() for role in Role}, clock)
    async with AsyncExitStack() as stack:
        engines: dict[Role, list[FakeEngine]] = {Role.PREFILL: [], Role.DECODE: []}
        for role, chosen in ((Role.PREFILL, p), (Role.DECODE, d)):
            for behaviour in chosen:
                fake = FakeEngine(KINDS[role], behaviour)
                engine = await stack.enter_async_context(fake)
                fleet.add(role, Endpoint.parse(engine.address), state=State.ACTIVE)
                engines[role].append(engine)
        client = WatchedClient(limits)
        stack.push_async_callback(client.close)
        connector = PullConnector()
        orphans = Orphans(RELEASES, client, fleet, connector, observer, clock)
        stack.push_async_callback(orphans.close)
        tools = Tools(
            client=client,
            fleet=fleet,
            connector=connector,
            tokens=TokenEstimator(),
            outputs=OutputEstimator(),
            rules=replace(RULES, **rules),
            observer=observer,
            clock=clock,
            rng=random.Random(0),
            orphans=orphans,
            admission=Admission(admission or Limits(), fleet, observer, clock),
        )
        yield Stage(tools, client, observer, clock, engines[Role.PREFILL], engines[Role.DECODE])
