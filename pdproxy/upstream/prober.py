"""Asks an engine whether it serves; outside the hot path, so by aiohttp's client."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Self

import aiohttp

from pdproxy.core.instance import Endpoint

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
OK = 200
NOT_FOUND = 404
# A server without /health that asks for a key on /v1/models is there all the same.
_ALIVE_ON_MODELS = frozenset({200, 401, 403})


class Prober:
    """Probes engines; an async context manager that holds one client session."""

    def __init__(self, timeout_s: float, ssl_context: ssl.SSLContext | None) -> None:
        """Make a prober; `timeout_s` is for one whole probe."""
        self._timeout_s = timeout_s
        self._ssl: ssl.SSLContext | bool = True if ssl_context is None else ssl_context
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Each default of the library that would surprise is set: proxies from the environment,
        # a cache of names, 100 connections, five minutes in total.
        connector = aiohttp.TCPConnector(
            limit=0, use_dns_cache=False, force_close=True, ssl=self._ssl
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
        """Return whether the engine answers GET /health, or /v1/models if it has no /health."""
        try:
            status = await self._status(endpoint, HEALTH_PATH)
            if status != NOT_FOUND:
                return status == OK
            return await self._status(endpoint, MODELS_PATH) in _ALIVE_ON_MODELS
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    async def _status(self, endpoint: Endpoint, path: str) -> int:
        assert self._session is not None, "used outside `async with`"
        async with self._session.get(endpoint.url + path, allow_redirects=False) as response:
            return response.status
