"""Opens connections to engines and says in our words why one could not be opened."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

from pdproxy import errors
from pdproxy.upstream.connection import Connection
from pdproxy.upstream.pool import Origin

# Our own limits, for which no engine is to blame.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE})

# A peer that vanished without a word during an hour-long stream is noticed after about two
# minutes: 60 s of silence, then 4 probes 15 s apart. Names differ between systems.
_KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


async def connect(
    origin: Origin, timeout_s: float, ssl_context: ssl.SSLContext | None
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
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: connection,
                endpoint.host,
                endpoint.port,
                ssl=ssl_context,
                server_hostname=endpoint.host if ssl_context is not None else None,
            )
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
