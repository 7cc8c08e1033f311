"""Asks an engine whether it serves; outside the hot path, so by aiohttp's client."""

from __future__ import annotations

import errno
import os
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from pdproxy.core.allow import AllowList
from pdproxy.core.instance import Endpoint
from pdproxy.upstream.allowed import NOT_ALLOWED, AllowedResolver

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
METRICS_PATH = "/metrics"
MAX_METRICS_BYTES = 4 << 20  # ten times the page of an engine with every histogram
OK = 200
NOT_FOUND = 404
# A server without /health that asks for a key on /v1/models is there all the same.
_ALIVE_ON_MODELS = frozenset({200, 401, 403})
# Errors that leave no doubt; a name that is not resolved may be the resolver's fault.
_REFUSALS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe found.

    Attributes:
        is_serving: the engine answered that it serves.
        is_refused: nothing listens there, or there is no way to it.
        why: what was wrong, in words; "" if it serves.
    """

    is_serving: bool
    is_refused: bool = False
    why: str = ""


class Prober:
    """Probes engines; an async context manager that holds one client session."""

    def __init__(
        self,
        timeout_s: float,
        ssl_context: ssl.SSLContext | None,
        allow: AllowList | None = None,
    ) -> None:
        """Make a prober; `timeout_s` is for one whole probe."""
        self._allow = allow
        self._timeout_s = timeout_s
        self._ssl: ssl.SSLContext | bool = True if ssl_context is None else ssl_context
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Each default of the library that would surprise is set: proxies from the environment,
        # a cache of names, 100 connections, five minutes in total.
        connector = aiohttp.TCPConnector(
            limit=0,
            use_dns_cache=False,
            force_close=True,
            ssl=self._ssl,
            resolver=AllowedResolver(self._allow) if self._allow is not None else None,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def is_serving(self, endpoint: Endpoint) -> bool:
        """Return whether the engine serves."""
        return (await self.probe(endpoint)).is_serving

    async def probe(self, endpoint: Endpoint) -> ProbeResult:
        """Ask GET /health, or /v1/models of an engine that has no /health."""
        try:
            if self._allow is not None and self._allow.allows(endpoint.host) is False:
                raise PermissionError(errno.EACCES, NOT_ALLOWED)
            path, good = HEALTH_PATH, frozenset({OK})
            status = await self._status(endpoint, path)
            if status == NOT_FOUND:
                path, good = MODELS_PATH, _ALIVE_ON_MODELS
                status = await self._status(endpoint, path)
        except TimeoutError:
            return ProbeResult(False, why=f"no answer to a probe within {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            return _not_connected(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return ProbeResult(False, why=f"probe: {str(error) or type(error).__name__}")
        if status in good:
            return ProbeResult(True)
        return ProbeResult(False, why=f"{path} answered {status}")

    async def metrics(self, endpoint: Endpoint) -> bytes:
        """Return the start of the engine's metrics page; nothing if it has none."""
        assert self._session is not None, "used outside `async with`"
        try:
            url = endpoint.url + METRICS_PATH
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != OK:
                    return b""
                page = bytearray()
                async for part in response.content.iter_any():
                    page += part
                    if len(page) >= MAX_METRICS_BYTES:
                        break
                return bytes(page[:MAX_METRICS_BYTES])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return b""

    async def _status(self, endpoint: Endpoint, path: str) -> int:
        assert self._session is not None, "used outside `async with`"
        async with self._session.get(endpoint.url + path, allow_redirects=False) as response:
            return response.status


def _not_connected(error: aiohttp.ClientConnectorError) -> ProbeResult:
    if isinstance(error, aiohttp.ClientSSLError):  # its number is not the system's
        return ProbeResult(False, why=f"probe: {error.__cause__ or error}")
    number = error.os_error.errno
    # The error's own text may hold the address in place of the reason.
    is_known = number is not None and number > 0 and number != errno.EACCES
    why = os.strerror(number or 0) if is_known else str(error)
    return ProbeResult(False, number in _REFUSALS, f"probe: {why}")
