"""Every asynchronous test here runs on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from pdproxy.upstream.client import ClientLimits, EngineClient


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    engine_client = EngineClient(ClientLimits())
    yield engine_client
    await engine_client.close()
