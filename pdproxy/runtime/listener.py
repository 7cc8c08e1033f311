"""The listening socket: bound early so that faults show at start, bounded in what it accepts.

Rule: an accepted connection must find a file descriptor for its way to an engine too. Beyond
that a client is told so at once, instead of the process failing in the middle of a request.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import cast

from pdproxy.errors import ConfigError, Overloaded
from pdproxy.server.failures import closing_answer

logger = logging.getLogger(__name__)

# For the log, the listener, the event loop, probes and the admin calls.
RESERVED_DESCRIPTORS = 64
# A client's own connection, one to an engine, and one that the pool keeps idle for a moment.
DESCRIPTORS_PER_CLIENT = 3
MIN_CONNECTIONS = 16
# Refused connections that are given time to send their request, out of the reserve, and how much.
MAX_PATIENT = 32
PATIENCE_S = 1.0
# More is of no use to one process and makes some kernels allocate tables.
MAX_DESCRIPTORS = 1_048_576


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
        return wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def max_connections(descriptors: int) -> int:
    """Return how many client connections a limit of open files can carry."""
    return max(MIN_CONNECTIONS, (descriptors - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CLIENT)


def bind(
    host: str, port: int, backlog: int, *, prefix: str = "", is_shared: bool = False
) -> list[socket.socket]:
    """Bind and listen on every address of `host`.

    `prefix` stands before the names of its flags. With `is_shared`, others of this user may bind
    the same, and the kernel spreads connections over all sockets.

    Raises:
        ConfigError: the name is unknown, or an address is in use or not this machine's.
    """
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:  # the second for a name no resolver is asked for
        raise ConfigError([f"--{prefix}host: {host!r} cannot be resolved: {error}"]) from None
    sockets: list[socket.socket] = []
    failures: list[str] = []
    for family, kind, proto, _, address in dict.fromkeys(found):
        try:
            sockets.append(_listen((family, kind, proto), address, backlog, is_shared))
        except OSError as error:
            failures.append(f"cannot listen on {address[0]} port {port}: {error.strerror}")
    if not sockets or any("in use" in failure for failure in failures):
        for listening in sockets:
            listening.close()
        flags = f"--{prefix}host, --{prefix}port"
        raise ConfigError([f"{flags}: {failure}" for failure in failures])
    return sockets


def bind_for_each(count: int, host: str, port: int, backlog: int) -> list[list[socket.socket]]:
    """Bind a set of sockets for each of several processes, among which the kernel spreads.

    Raises:
        ConfigError: as of `bind`.
    """
    # Sockets that share would also share with those of another pdproxy on this port.
    for listening in bind(host, port, backlog):
        listening.close()
    return [bind(host, port, backlog, is_shared=True) for _ in range(count)]


def _listen(
    kind: tuple[int, int, int], address: object, backlog: int, is_shared: bool
) -> socket.socket:
    family = kind[0]
    listening = socket.socket(*kind)
    try:
        if is_shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)  # type: ignore[arg-type]  # as getaddrinfo gave it
        listening.listen(backlog)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def bounded(
    factory: Callable[[], asyncio.Protocol], count: Callable[[], int], limit: int
) -> Callable[[], asyncio.Protocol]:
    """Return a protocol factory that refuses connections while `count()` is at `limit`."""
    patient: set[_Refusal] = set()

    def make() -> asyncio.Protocol:
        return factory() if count() < limit else _Refusal(patient)

    return make


class _Refusal(asyncio.Protocol):
    """Answers 503 and closes.

    It waits a moment for the request: a socket closed with unread bytes is reset, and a reset
    takes the answer from the client. With `MAX_PATIENT` waiting, further ones are not waited for.
    """

    def __init__(self, patient: set[_Refusal]) -> None:
        self._patient = patient
        self._transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, transport: asyncio.BaseTransport
    ) -> None:
        """Wait for the request, if there is room to wait."""
        # A cast, no check: the transports of uvloop do not derive from asyncio's.
        transport = cast("asyncio.WriteTransport", transport)
        self._transport = transport
        if len(self._patient) >= MAX_PATIENT:
            self._refuse()
            return
        self._patient.add(self)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._refuse)

    def data_received(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, _data: bytes
    ) -> None:
        """Take the request, whatever it is, as the moment to answer."""
        self._refuse()

    def connection_lost(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, _error: Exception | None
    ) -> None:
        """Make room for the next."""
        self._patient.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _refuse(self) -> None:
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        error = Overloaded("the proxy has no room for another connection")
        transport.write(closing_answer(error))
        transport.close()
