"""The port that only scrapers use: /metrics and /health, apart from the API."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pdproxy.runtime.listener import bind
from pdproxy.runtime.settings import Settings
from pdproxy.server.app import build_metrics_app
from pdproxy.server.context import Context

logger = logging.getLogger(__name__)

BACKLOG = 64
# A scrape takes milliseconds; it does not hold up the end.
SHUTDOWN_S = 1.0


def bind_metrics(settings: Settings) -> list[socket.socket]:
    """Listen on the addresses of --metrics-port; on none if it is not set.

    Raises:
        ConfigError: an address cannot be listened on.
    """
    if settings.metrics_port is None:
        return []
    host = settings.metrics_host or settings.host
    return bind(host, settings.metrics_port, BACKLOG, prefix="metrics-")


@asynccontextmanager
async def metrics_site(context: Context, sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Answer scrapers on sockets that listen already; close them in the end."""
    runner = web.AppRunner(
        build_metrics_app(context),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        for listening in sockets:
            await web.SockSite(runner, listening).start()
            logger.info("metrics at %s port %d", *listening.getsockname()[:2])
        yield
    finally:
        await runner.cleanup()
