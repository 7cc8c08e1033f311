"""The proxy in front of real decoders whose answers are cut, and the engine that nobody cuts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.cases.sims import Told, told
from tests.fakes.client import Reply
from tests.fakes.proxy import running_proxy
from tests.real_engines.cutting import Cut, Cutting, cutting_decoders
from tests.real_engines.engines import Engines
from tests.real_engines.exchange import Lab

# Reasoning is continued by ids only, and so is text that does not tokenise back.
ALWAYS_IDS = ("--token-ids", "always", "--retry-delay", "0")


@dataclass(frozen=True, slots=True)
class Stage:
    """What the tests of cut answers ask."""

    lab: Lab
    cutting: Cutting

    async def cut(self, path: str, body: dict[str, Any], *cuts: Cut) -> Reply:
        """Ask the proxy while the decoders cut their next answers so."""
        self.cutting.begin(cuts)
        reply = await self.lab.post(path, body)
        assert self.cutting.made == list(cuts)
        return reply

    async def uncut(self, path: str, body: dict[str, Any]) -> Told:
        return told(await self.lab.plain(path, body))


@asynccontextmanager
async def stage(engines: Engines, *args: str) -> AsyncIterator[Stage]:
    """Set it; a single decoder stands behind two that cut, so that there is another to go to."""
    decoders = engines.decoders if len(engines.decoders) > 1 else (*engines.decoders,) * 2
    cutting = Cutting()
    async with (
        cutting_decoders(decoders, cutting) as cutters,
        running_proxy(engines.prefillers, cutters, *args) as proxy,
    ):
        yield Stage(Lab(proxy, engines), cutting)
