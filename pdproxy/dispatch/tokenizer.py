"""Asks the engines' tokenizer; any decoder will do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdproxy.core.fleet import Fleet
from pdproxy.core.headers import HeaderList
from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import decode, join_object
from pdproxy.core.plain import Object
from pdproxy.core.recount import Asking
from pdproxy.errors import UpstreamError
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.limits import Timeouts

Ask = Callable[[str, bytes], Awaitable[Object | None]]

_TIMEOUTS = Timeouts(connect_s=5, head_s=5, idle_s=5)
_LONGEST_S = 10.0  # for all that a cut asks: meanwhile the client hears nothing
_MAX_BYTES = 64 * 1024 * 1024  # a million ids take ten
_OK = 200


class Tokenizer:
    """The tokenizer of the engines, as a client with these headers reaches it."""

    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        headers: HeaderList,
        *,
        longest_s: float = _LONGEST_S,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._headers = headers
        self._longest_s = longest_s

    async def ask(self, path: str, body: bytes, *, until: float | None = None) -> Object | None:
        """Return what an engine says; None if none does in time, on the loop's clock `until`."""
        now = asyncio.get_running_loop().time()
        until = now + self._longest_s if until is None else until
        if now >= until:
            return None
        try:
            async with asyncio.timeout_at(until):
                return await self._first_answer(path, body)
        except TimeoutError:
            return None

    async def _first_answer(self, path: str, body: bytes) -> Object | None:
        for instance in self._fleet.available(Role.DECODE):
            try:
                response = await self._client.send(
                    instance.endpoint, "POST", path, self._headers, body, timeouts=_TIMEOUTS
                )
                with response:
                    answer = await response.read(_MAX_BYTES)
                plain = decode(answer) if response.status == _OK else None
            except (UpstreamError, ValueError):
                continue
            if isinstance(plain, dict):
                return plain
        return None

    async def settle(self, asking: Asking) -> None:
        """Answer all questions that come; those left when time is up get None."""
        until = asyncio.get_running_loop().time() + self._longest_s
        said: Object | None = None
        while True:
            try:
                question = asking.send(said)
            except StopIteration:
                return
            said = await self.ask(question.path, join_object(question.fields), until=until)
