"""Resolves engines' names under an allow list, so that no name leads elsewhere later on."""

from __future__ import annotations

import asyncio
import errno
import socket

import aiohttp
from aiohttp.abc import ResolveResult

from pdproxy.core.allow import AllowList
from pdproxy.core.instance import Endpoint

NOT_ALLOWED = "its address is not in --instance-allow"
CHECK_S = 5.0  # for the resolver, when a call adds an instance


async def is_admissible(allow: AllowList | None, endpoint: Endpoint) -> bool:
    """Tell whether an endpoint may be added: all of its addresses are allowed, and it has one.

    Nothing is connected, so the answer says nothing of what listens there.
    """
    if allow is None:
        return True
    verdict = allow.allows(endpoint.host)
    if verdict is not None:
        return verdict
    try:
        async with asyncio.timeout(CHECK_S):
            addresses = await _resolve(endpoint)
    except (OSError, UnicodeError):
        return False
    return all(map(allow.allows_address, addresses))


async def allowed_hosts(allow: AllowList | None, endpoint: Endpoint) -> list[str]:
    """Return what to connect to: the host itself, or those of its addresses that are allowed.

    Raises:
        OSError: none is, or the name cannot be resolved.
    """
    verdict = True if allow is None else allow.allows(endpoint.host)
    if verdict:
        return [endpoint.host]
    if allow is not None and verdict is None:
        found = [host for host in await _resolve(endpoint) if allow.allows_address(host)]
        if found:
            return found
    raise PermissionError(errno.EACCES, NOT_ALLOWED)


class AllowedResolver(aiohttp.ThreadedResolver):
    """Gives the probes' client the addresses that are allowed."""

    def __init__(self, allow: AllowList) -> None:
        super().__init__()
        self._allow = allow

    async def resolve(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the allowed addresses of a name."""
        found = await super().resolve(host, port, family)
        if self._allow.allows(host):
            return found
        allowed = [each for each in found if self._allow.allows_address(each["host"])]
        if not allowed:
            raise PermissionError(errno.EACCES, NOT_ALLOWED)
        return allowed


async def _resolve(endpoint: Endpoint) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
