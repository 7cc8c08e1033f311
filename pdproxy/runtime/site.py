"""What a serving process has for itself if it is alone, and shares if it is one of several."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role
from pdproxy.core.judge import Reports
from pdproxy.core.load import Board, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.dispatch.in_flight import InFlight, OwnInFlight
from pdproxy.runtime.following import following
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.metrics_site import bind_metrics
from pdproxy.runtime.roster import FleetRoster
from pdproxy.runtime.rules import allow_list, engine_ssl, health_rules, roster_rules
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.tally import FLUSH_S
from pdproxy.server.context import HistorySource, Page, RequestsSource, Roster, RunningRequest
from pdproxy.server.shutdown import Shutdown
from pdproxy.upstream.prober import Prober

logger = logging.getLogger(__name__)

# For how long the listener waits for engines that are up already, so that the first request
# finds them; those that are not up join later.
FIRST_PROBES_S = 1.0

# Told where each instance was that has left the fleet.
OnGone: TypeAlias = Callable[[Endpoint], None]
# Gives the requests in flight in this process.
OwnRequests: TypeAlias = Callable[[], list[RunningRequest]]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a process serves.

    Attributes:
        board: keeps the load.
        running: counts the client requests.
        admitted: counts those that were let in.
        queued: counts those that wait, and prompts that do.
        row: the number of this process among several; 0 if it is alone.
        reports: who is told what requests learn of instances; None for the process's own fleet.
        roster: fills the fleet, and is asked by administrative calls.
        history: makes the recent past of the whole proxy from that of this process.
        requests: makes the requests in flight of the whole proxy from those of this process.
        page: makes the metrics page of the whole proxy from the metrics of this process.
        flush_s: how long a count may stay in this process only.
        metrics_sockets: gives those of --metrics-port, which listen already.
        shutdown: the end of this process.
    """

    board: Board
    running: InFlight
    admitted: InFlight
    queued: InFlight
    reports: Reports | None
    roster: Callable[[Fleet, OnGone], AbstractAsyncContextManager[Roster]]
    history: Callable[[HistorySource], HistorySource]
    requests: Callable[[OwnRequests], RequestsSource]
    page: Callable[[Metrics, Fleet], Page]
    metrics_sockets: Callable[[], list[socket.socket]]
    flush_s: float = FLUSH_S
    row: int = 0
    shutdown: Shutdown = field(default_factory=Shutdown)


def alone(settings: Settings) -> Site:
    """Return the site of a proxy of one process."""
    return Site(
        board=LoadBoard(on_anomaly=report_anomaly),
        running=OwnInFlight(),
        admitted=OwnInFlight(),
        queued=OwnInFlight(),
        reports=None,
        roster=lambda fleet, on_gone: own_roster(settings, fleet, on_gone),
        history=lambda own: own,
        requests=_own_requests,
        page=lambda metrics, _fleet: metrics.scrape,
        metrics_sockets=lambda: bind_metrics(settings),
    )


def make_fleet(
    settings: Settings, board: Board, reports: Reports | None = None, seed: int | None = None
) -> Fleet:
    """Return a fleet without instances; `seed` is for its policies."""
    rng = random.Random(seed)
    names = {Role.PREFILL: settings.prefill_policy, Role.DECODE: settings.decode_policy}
    policies = {role: POLICIES[name](role, rng) for role, name in names.items()}
    return Fleet(board, policies, time.monotonic, health_rules(settings), reports)


@asynccontextmanager
async def own_roster(
    settings: Settings, fleet: Fleet, on_gone: OnGone
) -> AsyncIterator[FleetRoster]:
    """Let the configured instances join, and own the states of all until the block ends."""
    rng = random.Random(settings.seed)
    allow = allow_list(settings)
    async with Prober(settings.probe_timeout, engine_ssl(settings), allow) as prober:
        rules = roster_rules(settings)
        roster = FleetRoster(fleet, prober, rules, rng, on_gone, time.monotonic)
        try:
            await roster.start(_configured(settings), FIRST_PROBES_S)
            async with following(settings, roster):
                yield roster
        finally:
            await roster.stop()


def _own_requests(own: OwnRequests) -> RequestsSource:
    async def requests() -> list[RunningRequest]:
        return own()

    return requests


def report_anomaly(slot: int, text: str) -> None:
    """Log that charges and releases do not match."""
    logger.error("load of slot %d: %s; this is a bug", slot, text)


def _configured(settings: Settings) -> list[tuple[Role, Endpoint]]:
    prefill = [(Role.PREFILL, endpoint) for endpoint in settings.prefill_endpoints]
    return prefill + [(Role.DECODE, endpoint) for endpoint in settings.decode_endpoints]
