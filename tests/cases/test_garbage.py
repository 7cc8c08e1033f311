"""A request leaves nothing that only a collection of garbage would free: its body may be big."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from pdproxy.core.api import GenerateRequest
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.relay import StreamRelay
from tests.cases.cuts import HASTE
from tests.cases.scene import CHAT, chat, scene
from tests.fakes import behaviours

HOLDERS = (web.Request, GenerateRequest, StreamRelay, Account)
CUT = behaviours.recompute(3)
PATHS = {
    "streamed": (chat(stream=True), None),
    "whole": (chat(), None),
    "n": (chat(n=2), None),
    "recomputed, streamed": (chat(stream=True), CUT),
    "recomputed, whole": (chat(), CUT),
    "refused": (chat(), behaviours.error(400)),
    "failed": (chat(), behaviours.error(500)),
    "lost": (chat(stream=True), behaviours.stream([], then="reset")),
}


@contextmanager
def uncollected() -> Iterator[list[object]]:
    """Fill a list with what holds bodies and is found by a collection only, at the end."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [one for one in gc.garbage if isinstance(one, HOLDERS)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("path", PATHS)
async def test_request_leaves_no_garbage(path: str) -> None:
    body, decoder = PATHS[path]
    async with scene([None], [decoder], *HASTE) as stage:
        await stage.post(CHAT, body)
        with uncollected() as found:
            await stage.post(CHAT, body)
            await stage.assert_quiescent()
            await asyncio.sleep(0.05)

    assert [type(one).__name__ for one in found] == []
