"""The worker wires everything; to read it is to see how the program hangs together."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from pdproxy.connectors.pull import PullConnector
from pdproxy.core.fleet import Fleet
from pdproxy.core.load import OutputEstimator, TokenEstimator
from pdproxy.core.wording import counted
from pdproxy.dispatch.abilities import AbilityBook
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.admission import Admission
from pdproxy.dispatch.legs import Tools
from pdproxy.dispatch.orphans import Orphans
from pdproxy.runtime.front import Listen, listening
from pdproxy.runtime.listener import bind
from pdproxy.runtime.logs import setup_logging
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.metrics_site import metrics_site
from pdproxy.runtime.recorder import Recorder
from pdproxy.runtime.reporter import Reporter
from pdproxy.runtime.rules import (
    admission_limits,
    allow_list,
    client_limits,
    dispatch_rules,
    engine_ssl,
    release_rules,
    server_rules,
)
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.site import Site, alone, make_fleet
from pdproxy.runtime.start import report_start
from pdproxy.runtime.tally import flushing
from pdproxy.runtime.tracing import tracing
from pdproxy.server.context import Context
from pdproxy.server.running import shown
from pdproxy.server.shutdown import Shutdown
from pdproxy.upstream.client import EngineClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """A serving proxy: what its owner may ask of it.

    Attributes:
        listen: makes it accept on one more socket, which it owns then.
    """

    host: str
    port: int
    fleet: Fleet
    metrics: Metrics
    shutdown: Shutdown
    listen: Listen


def run(settings: Settings) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        ConfigError: the address cannot be listened on, or a file cannot be used.
    """
    setup_logging(settings.log_level, settings.log_format)
    sockets = bind(settings.host, settings.port, settings.listen_backlog)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_until_signal(settings, sockets))


@asynccontextmanager
async def serving(
    settings: Settings, sockets: list[socket.socket] | None = None, site: Site | None = None
) -> AsyncIterator[Worker]:
    """Serve on sockets that listen already, or on the settings' address; close them in the end.

    `site` is what the process shares with others; without one it is alone.
    """
    if sockets is None:
        sockets = bind(settings.host, settings.port, settings.listen_backlog)
    site = site or alone(settings)
    # Workers that began with one seed would choose in step.
    seed = None if settings.seed is None else settings.seed + site.row
    fleet = make_fleet(settings, site.board, site.reports, seed)
    metrics = Reporter(fleet, Recorder(), site.running, time.monotonic)
    allow = allow_list(settings)
    client = EngineClient(client_limits(settings), ssl_context=engine_ssl(settings), allow=allow)
    tools = _make_tools(settings, site, fleet, metrics, client)
    try:
        async with (
            tracing(settings) as tracer,
            flushing(metrics.flush, site.flush_s),
            site.roster(fleet, client.forget) as roster,
        ):
            running: dict[int, Account] = {}
            context = Context(
                tools=tools,
                rules=server_rules(settings, tools.rng),
                observer=metrics,
                page=site.page(metrics, fleet),
                requests=site.requests(lambda: shown(running.values(), tools.clock())),
                roster=roster,
                history=site.history(metrics),
                clock=tools.clock,
                rng=tools.rng,
                shutdown=site.shutdown,
                tracer=tracer,
                allow=allow,
                running=running,
            )
            scrapers = metrics_site(context, site.metrics_sockets())
            async with scrapers, listening(settings, context, sockets) as listen:
                host, port = sockets[0].getsockname()[:2]
                yield Worker(host, port, fleet, metrics, site.shutdown, listen)
    finally:
        await tools.orphans.close()
        await client.close()


def _make_tools(
    settings: Settings, site: Site, fleet: Fleet, metrics: Metrics, client: EngineClient
) -> Tools:
    connector, clock = PullConnector(), time.monotonic
    return Tools(
        client=client,
        fleet=fleet,
        connector=connector,
        tokens=TokenEstimator(),
        outputs=OutputEstimator(),
        rules=dispatch_rules(settings),
        observer=metrics,
        clock=clock,
        rng=random.SystemRandom(),
        orphans=Orphans(release_rules(settings), client, fleet, connector, metrics, clock),
        admission=Admission(
            admission_limits(settings), fleet, metrics, clock, site.admitted, site.queued
        ),
        abilities=AbilityBook(settings.reasoning_end_id),
    )


async def serve_until_signal(
    settings: Settings,
    sockets: list[socket.socket],
    announce: Callable[[Worker], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; `announce` is called once the proxy answers.

    Returns:
        The exit code: 0 if all requests ended by themselves, else 1.
    """
    loop = asyncio.get_running_loop()
    async with serving(settings, sockets) as worker:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.shutdown.begin)
        report_start(settings, worker.fleet, worker.port, workers=1)
        if announce is not None:
            announce(worker)
        await worker.shutdown.begun()
        logger.info("stopping; %s in flight", counted(worker.metrics.in_flight, "request"))
    logger.info("stopped")
    return 1 if worker.shutdown.cut else 0
