"""Follows names: every address of a name is an instance, for as long as the name has it.

Rule: a resolution that fails changes nothing; a resolver's bad moment must not empty a fleet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from pdproxy.core.instance import Endpoint, Role, Source
from pdproxy.runtime.roster import FleetRoster

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
RESOLVE_S = 10.0  # a resolver that has not answered by then has failed


class NameWatch:
    """Resolves the names again and again.

    Args:
        names: with the role of what is behind each.
        roster: is told of the addresses.
        resolve: returns the addresses of a host and port, or raises OSError.
    """

    def __init__(
        self, names: Sequence[tuple[Role, Endpoint]], roster: FleetRoster, resolve: Resolve
    ) -> None:
        self._names = names
        self._roster = roster
        self._resolve = resolve
        self._failing: set[tuple[Role, Endpoint]] = set()

    async def follow(self, interval_s: float) -> None:
        """Resolve for ever."""
        while True:
            await self.resolve()
            await asyncio.sleep(interval_s)

    async def resolve(self) -> None:
        """Resolve all names once, side by side."""
        await asyncio.gather(*(self._follow_one(role, name) for role, name in self._names))

    async def _follow_one(self, role: Role, name: Endpoint) -> None:
        try:
            async with asyncio.timeout(RESOLVE_S):
                addresses = await self._resolve(name.host, name.port)
        except (OSError, UnicodeError) as error:
            if (role, name) not in self._failing:
                self._failing.add((role, name))
                logger.warning("%s is not resolved, nothing changes: %r", name, error)
            return
        self._failing.discard((role, name))
        endpoints = [Endpoint(address, name.port, name.tls) for address in addresses]
        await self._roster.follow(role, f"name {name}", endpoints, Source.NAME)


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Return all addresses of a name, by the system's resolver.

    Raises:
        OSError: it has none, or the resolver does not answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})
