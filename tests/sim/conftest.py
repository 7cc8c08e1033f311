"""Engines and a client session for the tests of the simulated engine."""

import aiohttp
import pytest

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def prefiller():
    async with in_process(SimConfig(role="prefill")) as sim:
        yield sim


@pytest.fixture
async def decoder():
    async with in_process(SimConfig(role="decode")) as sim:
        yield sim
