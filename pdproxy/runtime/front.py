"""What clients connect to: the application on its sockets, and its end in steps."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias, cast

from aiohttp import web

from pdproxy.core.instance import Endpoint
from pdproxy.errors import ConfigError
from pdproxy.runtime.listener import bind, bounded, max_connections, raise_descriptor_limit
from pdproxy.runtime.rules import listener_ssl, shutdown_rules
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.start import check_self
from pdproxy.server.app import build_app
from pdproxy.server.context import Context
from pdproxy.server.protocol import ClientProtocol

logger = logging.getLogger(__name__)

# For the clients of cut requests to be told; one that does not read is not waited for longer.
TELLING_S = 0.5

Listen: TypeAlias = Callable[[socket.socket], Awaitable[asyncio.Server]]


@asynccontextmanager
async def listening(
    settings: Settings, context: Context, sockets: list[socket.socket]
) -> AsyncIterator[Listen]:
    """Answer on the sockets, and on those passed to what this gives.

    In the end running requests may finish within the grace.
    """
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
    backlog = settings.listen_backlog

    async def listen(each: socket.socket) -> asyncio.Server:
        return await loop.create_server(factory, sock=each, ssl=tls, backlog=backlog)

    try:
        await _check(connection, tls)
    except ConfigError:
        await runner.cleanup()
        raise
    servers = [await listen(each) for each in sockets]
    logger.info("at most %d client connections at once", limit)
    rules = shutdown_rules(settings)
    try:
        yield listen
    finally:
        await context.shutdown.delay(rules)
        for each in servers:
            each.close()
        # Not the library's pre_shutdown: it makes connections deaf to the rest of a body.
        for client in server.connections:
            cast("ClientProtocol", client).close_if_idle()
        await context.shutdown.finish(rules)
        await runner.cleanup()


async def _check(factory: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
    """Have the proxy answer itself, where no client comes in between.

    Those that wait for a proxy that starts may be more than it takes.

    Raises:
        ConfigError: it does not answer as it should.
    """
    (own,) = bind("127.0.0.1", 0, backlog=1)
    host, port = own.getsockname()
    server = await asyncio.get_running_loop().create_server(factory, sock=own, ssl=tls)
    try:
        await check_self(Endpoint.of(host, port, tls=tls is not None))
    finally:
        server.close()
