"""Idle connections, per endpoint: the youngest is used first, the old are closed.

Rule: a request costs the same whatever the number of connections.
"""

from __future__ import annotations

import asyncio

from pdproxy.core.instance import Endpoint
from pdproxy.upstream.connection import Connection
from pdproxy.upstream.limits import ClientLimits
from pdproxy.upstream.request import host_line

_SWEEPS_PER_LIFE = 2  # an idle connection is closed at 1 to 1.5 times its allowed age


class Origin:
    """One endpoint's idle connections and its Host line; where its connections belong.

    Attributes:
        host: the Host line of its requests.
        label: the endpoint's name in error details.
    """

    __slots__ = ("_idle", "_is_forgotten", "_pool", "endpoint", "host", "label")

    def __init__(self, pool: Pool, endpoint: Endpoint) -> None:
        self._pool = pool
        # Ordered from the oldest to the youngest; removal of any one costs the same.
        self._idle: dict[Connection, None] = {}
        self._is_forgotten = False
        self.endpoint = endpoint
        self.host = host_line(endpoint.authority)
        self.label = str(endpoint)

    def __len__(self) -> int:
        return len(self._idle)

    def new_connection(self) -> Connection:
        """Make a protocol for a transport to this endpoint."""
        connection = Connection(self, self._pool.limits, self._pool.loop)
        self._pool.connections.add(connection)
        return connection

    def take(self) -> Connection | None:
        """Return the youngest idle connection that may be used, or None."""
        idle = self._idle
        while idle:
            connection, _ = idle.popitem()
            if connection.is_open and not self._pool.is_old(connection):
                return connection
            connection.abort()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if there are enough."""
        if self._is_forgotten or len(self._idle) >= self._pool.limits.max_idle_per_endpoint:
            connection.abort()
            return
        connection.idle_since_s = self._pool.loop.time()
        self._idle[connection] = None
        self._pool.plan_sweep()

    def lost(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._idle.pop(connection, None)
        self._pool.drop(connection)

    def close_idle(self) -> None:
        """Close all idle connections, such as those to an engine that restarted."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def close_old(self) -> None:
        """Close the idle connections that are too old to be used."""
        for connection in list(self._idle):
            if not self._pool.is_old(connection):
                return
            del self._idle[connection]
            connection.abort()

    def forget(self) -> None:
        """Close the idle connections, and those in use when they are done."""
        self._is_forgotten = True
        self.close_idle()


class Pool:
    """All origins, and one timer for the idle connections of all.

    Attributes:
        connections: every open connection, idle or in use.
    """

    def __init__(self, limits: ClientLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = limits
        self.loop = loop
        self.connections: set[Connection] = set()
        self._origins: dict[Endpoint, Origin] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    def origin(self, endpoint: Endpoint) -> Origin:
        """Return the entry of an endpoint; a new one if it is not known."""
        origin = self._origins.get(endpoint)
        if origin is None:
            origin = self._origins[endpoint] = Origin(self, endpoint)
        return origin

    def idle_count(self, endpoint: Endpoint) -> int:
        """Return the number of idle connections to an endpoint."""
        origin = self._origins.get(endpoint)
        return 0 if origin is None else len(origin)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop an endpoint; requests in flight to it go on."""
        if (origin := self._origins.pop(endpoint, None)) is not None:
            origin.forget()

    def drop(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self.connections.discard(connection)
        if self._emptied is not None and not self.connections and not self._emptied.done():
            self._emptied.set_result(None)

    def is_old(self, connection: Connection) -> bool:
        """Whether the engine may be about to close this idle connection."""
        return self.loop.time() - connection.idle_since_s >= self.limits.idle_keepalive_s

    def plan_sweep(self) -> None:
        """Make sure that idle connections are looked at."""
        if self._sweeper is None:
            period_s = self.limits.idle_keepalive_s / _SWEEPS_PER_LIFE
            self._sweeper = self.loop.call_later(period_s, self._sweep)

    async def close(self, timeout_s: float) -> None:
        """Close every connection, used or not; return when their sockets are closed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for endpoint in list(self._origins):
            self.forget(endpoint)
        for connection in self.connections:
            connection.abort()
        if self.connections:
            self._emptied = self.loop.create_future()
            await asyncio.wait([self._emptied], timeout=timeout_s)

    def _sweep(self) -> None:
        self._sweeper = None
        for origin in self._origins.values():
            origin.close_old()
        if any(map(len, self._origins.values())):
            self.plan_sweep()
