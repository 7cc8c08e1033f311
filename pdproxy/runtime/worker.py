"""The worker wires everything; to read it is to see how the program hangs together."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import cast

import uvloop
from aiohttp import web

from pdproxy import __version__
from pdproxy.connectors.pull import PullConnector
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role
from pdproxy.core.load import LoadBoard, OutputEstimator, TokenEstimator
from pdproxy.core.policy import POLICIES
from pdproxy.dispatch.abilities import AbilityBook
from pdproxy.dispatch.admission import Admission
from pdproxy.dispatch.legs import Tools
from pdproxy.dispatch.orphans import Orphans
from pdproxy.errors import ConfigError
from pdproxy.runtime.following import following
from pdproxy.runtime.listener import bind, bounded, max_connections, raise_descriptor_limit
from pdproxy.runtime.logs import setup_logging
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.metrics_site import bind_metrics, metrics_site
from pdproxy.runtime.recorder import Recorder
from pdproxy.runtime.reporter import Reporter
from pdproxy.runtime.roster import FleetRoster
from pdproxy.runtime.rules import (
    admission_limits,
    allow_list,
    client_limits,
    dispatch_rules,
    engine_ssl,
    health_rules,
    listener_ssl,
    release_rules,
    roster_rules,
    server_rules,
    shutdown_rules,
)
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.tally import flushing
from pdproxy.runtime.tracing import tracing
from pdproxy.server.app import build_app
from pdproxy.server.context import Context
from pdproxy.server.protocol import ClientProtocol
from pdproxy.server.shutdown import Shutdown
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.prober import Prober

logger = logging.getLogger(__name__)

# For how long the listener waits for engines that are up already, so that the first request
# finds them; those that are not up join later.
FIRST_PROBES_S = 1.0
# For the answer to the proxy's own question at start; a loaded machine is slow to start.
SELF_CHECK_S = 10.0
# For the clients of cut requests to be told; one that does not read is not waited for longer.
TELLING_S = 0.5
_REPORTED = ("aiohttp", "uvloop", "httptools", "msgspec", "orjson", "pydantic-settings")


@dataclass(frozen=True, slots=True)
class Worker:
    """A serving proxy: what its owner may ask of it."""

    host: str
    port: int
    fleet: Fleet
    metrics: Metrics
    shutdown: Shutdown


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
    settings: Settings, sockets: list[socket.socket] | None = None
) -> AsyncIterator[Worker]:
    """Serve on sockets that listen already, or on the settings' address; close them in the end."""
    if sockets is None:
        sockets = bind(settings.host, settings.port, settings.listen_backlog)
    clock, shutdown = time.monotonic, Shutdown()
    rng = random.Random(settings.seed)
    ids = random.SystemRandom()
    fleet = _make_fleet(settings, rng)
    recorder = Recorder()
    metrics = Reporter(fleet, recorder)
    engine_tls, allow = engine_ssl(settings), allow_list(settings)
    client = EngineClient(client_limits(settings), ssl_context=engine_tls, allow=allow)
    connector = PullConnector()
    orphans = Orphans(release_rules(settings), client, fleet, connector, metrics, clock)
    tools = Tools(
        client=client,
        fleet=fleet,
        connector=connector,
        tokens=TokenEstimator(),
        outputs=OutputEstimator(),
        rules=dispatch_rules(settings),
        observer=metrics,
        clock=clock,
        rng=ids,
        orphans=orphans,
        admission=Admission(admission_limits(settings), fleet, metrics, clock),
        abilities=AbilityBook(settings.reasoning_end_id),
    )

    async with (
        tracing(settings) as tracer,
        Prober(settings.probe_timeout, engine_tls, allow) as prober,
        flushing(metrics.flush),
    ):
        roster = FleetRoster(fleet, prober, roster_rules(settings), rng, client.forget, clock)
        context = Context(
            tools=tools,
            rules=server_rules(settings, ids),
            observer=metrics,
            roster=roster,
            history=recorder,
            clock=clock,
            rng=ids,
            shutdown=shutdown,
            tracer=tracer,
            allow=allow,
        )
        try:
            await roster.start(_configured(settings), FIRST_PROBES_S)
            site = metrics_site(context, bind_metrics(settings))
            async with following(settings, roster), site, _listening(settings, context, sockets):
                host, port = sockets[0].getsockname()[:2]
                yield Worker(host=host, port=port, fleet=fleet, metrics=metrics, shutdown=shutdown)
        finally:
            await orphans.close()
            await roster.stop()
            await client.close()


@asynccontextmanager
async def _listening(
    settings: Settings, context: Context, sockets: list[socket.socket]
) -> AsyncIterator[None]:
    """Answer on the sockets; in the end let running requests finish within the grace."""
    runner = web.AppRunner(
        build_app(context),
        # A client that leaves must end its legs at once; off in the library by default.
        handler_cancellation=True,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=TELLING_S,
    )
    await runner.setup()
    server = runner.server
    assert server is not None, "set up above"
    limit = max_connections(raise_descriptor_limit())
    loop, tls = asyncio.get_running_loop(), listener_ssl(settings)

    def connection() -> ClientProtocol:
        return ClientProtocol(
            server,
            loop=loop,
            header_s=settings.header_timeout or None,
            keepalive_s=settings.keepalive_timeout,
            max_header_bytes=settings.max_header_bytes,
            is_ending=lambda: context.shutdown.has_begun,
        )

    factory = bounded(connection, lambda: len(server.connections), limit)
    servers = [
        await loop.create_server(factory, sock=s, ssl=tls, backlog=settings.listen_backlog)
        for s in sockets
    ]
    logger.info("at most %d client connections at once", limit)
    rules = shutdown_rules(settings)
    try:
        yield
    finally:
        await context.shutdown.delay(rules)
        for each in servers:
            each.close()
        # Not the library's pre_shutdown: it makes connections deaf to the rest of a body.
        for client in server.connections:
            cast("ClientProtocol", client).close_if_idle()
        await context.shutdown.finish(rules)
        await runner.cleanup()


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
        _report_start(settings, worker)
        await _check_self(settings, worker)
        if announce is not None:
            announce(worker)
        await worker.shutdown.begun()
        logger.info("stopping; %d requests in flight", worker.metrics.in_flight)
    logger.info("stopped")
    return 1 if worker.shutdown.cut else 0


async def _check_self(settings: Settings, worker: Worker) -> None:
    """Ask the proxy for its own health, over its own socket.

    Raises:
        ConfigError: it does not answer; an installed library may be of a version that breaks it.
    """
    tls = None
    if settings.ssl_certfile is not None:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    endpoint = Endpoint.of(worker.host, worker.port, tls=tls is not None)
    async with Prober(SELF_CHECK_S, tls) as prober:
        if not await prober.is_serving(endpoint):
            text = f"the proxy does not answer its own /health at {endpoint} as it should"
            raise ConfigError([f"{text}; compare the versions in the log with those it supports"])


def _report_start(settings: Settings, worker: Worker) -> None:
    for warning in settings.warnings:
        logger.warning("%s", warning)
    if settings.workers > 1:
        logger.warning("--workers %d: this version serves with one process", settings.workers)
    python = ".".join(map(str, sys.version_info[:3]))
    parts = [f"Python {python}", *(f"{name} {version(name)}" for name in _REPORTED)]
    logger.info("pdproxy %s on %s", __version__, ", ".join(parts))
    logger.info(
        "listening on %s port %d with %d prefill and %d decode instances",
        settings.host,
        worker.port,
        len(worker.fleet.instances(Role.PREFILL)),
        len(worker.fleet.instances(Role.DECODE)),
    )


def _make_fleet(settings: Settings, rng: random.Random) -> Fleet:
    names = {Role.PREFILL: settings.prefill_policy, Role.DECODE: settings.decode_policy}
    policies = {role: POLICIES[name](role, rng) for role, name in names.items()}
    board = LoadBoard(on_anomaly=_report_anomaly)
    return Fleet(board, policies, time.monotonic, health_rules(settings))


def _report_anomaly(slot: int, text: str) -> None:
    logger.error("load of slot %d: %s; this is a bug", slot, text)


def _configured(settings: Settings) -> list[tuple[Role, Endpoint]]:
    prefill = [(Role.PREFILL, endpoint) for endpoint in settings.prefill_endpoints]
    return prefill + [(Role.DECODE, endpoint) for endpoint in settings.decode_endpoints]
