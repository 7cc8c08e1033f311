"""What every handler shares: made once by the worker, passed to the routes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from pdproxy.core.allow import AllowList
from pdproxy.core.history import Recent
from pdproxy.core.instance import Endpoint, Role
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.core.timeline import Stage
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.legs import Tools
from pdproxy.dispatch.tracing import NO_SPAN, Attributes, NoSpan, Span
from pdproxy.server.shutdown import Shutdown


@dataclass(frozen=True, slots=True)
class ServerRules:
    """Limits and keys of the HTTP side.

    Attributes:
        max_body_bytes: of a request's body, after decompression.
        body_s: within which a client has to send its body; None for no limit.
        buffer_bytes: waiting for a slow client before its decoder is throttled.
        write_stall_s: within which a slow client has to go on reading; None for no limit.
        models_s: timeout of one engine's answer to /v1/models.
        models_cache_s: for how long that answer is kept.
        engine_key: replaces the client's Authorization towards engines; "" for none.
        fallback_key: is sent to engines if the client sends none; "" for none.
        api_keys: of clients; empty for an open API.
        admin_token: guards the admin calls; "" opens them to loopback peers only.
        own_name: the host that the proxy listens on, as the operator names it.
        debug_headers: answers tell of their way to those who ask for it.
        via: this proxy's token in the Via header, by which it knows a request that came back.
    """

    max_body_bytes: int
    body_s: float | None
    buffer_bytes: int
    write_stall_s: float | None
    models_s: float
    models_cache_s: float
    engine_key: str
    fallback_key: str
    api_keys: tuple[str, ...]
    admin_token: str
    via: str
    own_name: str = "localhost"
    debug_headers: bool = False


class RequestObserver(Protocol):
    """Who is told of client requests."""

    def request_started(self, endpoint: str) -> None:
        """A request has come in."""
        ...

    def request_finished(self, account: Account) -> None:
        """A request has ended, in whatever way."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests begun and not finished."""
        ...


class Roster(Protocol):
    """Who owns the states of the instances; all that goes in and out is a plain value.

    Each call has its effect once however often it is repeated, and says what it did.
    """

    async def add(self, role: Role, endpoint: Endpoint) -> Change:
        """Let an engine join once it answers; one that is draining takes requests again."""
        ...

    async def remove(self, role: Role, endpoint: Endpoint) -> Change:
        """Take an instance out of service; its running requests end as usual."""
        ...

    async def drain(self, role: Role, endpoint: Endpoint, deadline_s: float | None) -> Change:
        """Do as `remove` does; what still runs after `deadline_s` is cut."""
        ...

    async def undrain(self, role: Role, endpoint: Endpoint) -> Change:
        """Let a draining instance take requests again."""
        ...

    async def describe(self) -> list[InstanceRecord]:
        """Return all instances, prefillers first, in order of registration."""
        ...


class HistorySource(Protocol):
    """Where the recent past comes from: this process, or all workers together."""

    async def recent(self) -> Recent:
        """Return what was counted lately; to be read before anything else is awaited."""
        ...


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request in flight, as administrators are told of it; nothing of its prompt."""

    request_id: str
    client: str
    endpoint: str
    model: str
    stream: bool
    stage: Stage
    age_s: float
    prefiller: str | None
    decoder: str | None
    prefill_attempts: int
    decode_attempts: int
    rounds: int


# Gives the requests in flight, of this process or of all workers.
RequestsSource: TypeAlias = Callable[[], Awaitable[list[RunningRequest]]]


class RequestTracer(Protocol):
    """Who begins the span of a request."""

    def request(
        self, name: str, headers: Mapping[str, str], attributes: Attributes
    ) -> AbstractContextManager[Span]:
        """Return the span of a request with these headers, which ends with its block."""
        ...


class NoTracer:
    """Traces nothing."""

    def request(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> NoSpan:
        """Return the span that does nothing."""
        return NO_SPAN


NO_TRACER = NoTracer()

# Takes an `Accept` header; gives all metrics in the format it asks for, and its content type.
Page: TypeAlias = Callable[[str], Awaitable[tuple[bytes, str]]]


@dataclass(frozen=True, slots=True)
class Context:
    """What every handler shares.

    Attributes:
        page: makes the metrics page.
        requests: gives the requests in flight.
        allow: which addresses engines may have; None for any.
        running: accounts of the requests in flight, by their `id()`.
    """

    tools: Tools
    rules: ServerRules
    observer: RequestObserver
    page: Page
    requests: RequestsSource
    roster: Roster
    history: HistorySource
    clock: Callable[[], float]
    rng: random.Random
    shutdown: Shutdown
    tracer: RequestTracer = NO_TRACER
    allow: AllowList | None = None
    running: dict[int, Account] = field(default_factory=dict)

    def is_stopping(self) -> bool:
        """Whether the proxy is ending, so that balancers are to stay away."""
        return self.shutdown.has_begun
