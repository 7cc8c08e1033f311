"""Opens connections to engines and says in our words why one could not be opened."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl

from pdproxy import errors
from pdproxy.core.allow import AllowList
from pdproxy.core.instance import Endpoint
from pdproxy.upstream.allowed import allowed_hosts
from pdproxy.upstream.connection import Connection
from pdproxy.upstream.pool import Origin

# Our own limits, for which no engine is to blame.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE})

# A peer that vanished without a word during an hour-long stream is noticed after about two
# minutes: 60 s of silence, then 4 probes 15 s apart. Names differ between systems.
_KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


async def connect(
    origin: Origin,
    timeout_s: float,
    ssl_context: ssl.SSLContext | None,
    allow: AllowList | None = None,
) -> Connection:
    """Open a connection to an endpoint: name, TCP and, with a context, TLS.

    Raises:
        UpstreamUnreachable: refused, no route, no such name, a failed TLS handshake.
        UpstreamTimeout: phase "connect".
        Overloaded: this process may open no more files.
    """
    connection = origin.new_connection()
    endpoint = origin.endpoint
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            hosts = await allowed_hosts(allow, endpoint)
            transport = await _open(connection, endpoint, hosts, ssl_context)
        _set_options(transport)
    except (OSError, UnicodeError) as error:
        _give_up(origin, connection)
        if scope.expired():
            raise errors.UpstreamTimeout(
                "the engine could not be reached in time",
                phase="connect",
                detail=f"{origin.label}: no connection within {timeout_s:g} s",
            ) from error
        raise _translated(error, origin.label) from error
    except BaseException:
        _give_up(origin, connection)
        raise
    return connection


async def _open(
    connection: Connection, endpoint: Endpoint, hosts: list[str], tls: ssl.SSLContext | None
) -> asyncio.BaseTransport:
    """Connect to the first of `hosts` that takes it; the last one's failure counts."""
    loop = asyncio.get_running_loop()
    name = endpoint.host if tls is not None else None
    for host in hosts[:-1]:
        with contextlib.suppress(ConnectionError):
            transport, _ = await loop.create_connection(
                lambda: connection, host, endpoint.port, ssl=tls, server_hostname=name
            )
            return transport
    transport, _ = await loop.create_connection(
        lambda: connection, hosts[-1], endpoint.port, ssl=tls, server_hostname=name
    )
    return transport


def _give_up(origin: Origin, connection: Connection) -> None:
    connection.abort()
    origin.lost(connection)


def _translated(error: OSError | UnicodeError, label: str) -> errors.PDProxyError:
    if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
        return errors.Overloaded("the proxy has too many open files", detail=f"{label}: {error}")
    return errors.UpstreamUnreachable(
        "the engine could not be reached", detail=f"{label}: {error!r}"
    )


def _set_options(transport: asyncio.BaseTransport) -> None:
    """Send small writes at once, and notice a peer that is gone.

    Raises:
        OSError: the connection is already broken.
    """
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
