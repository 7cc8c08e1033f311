"""Leaves these tests out unless they are asked for; finds the engines; watches their lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.proxy import ProxyProcess, running_proxy
from tests.real_engines.engines import Engines
from tests.real_engines.exchange import Lab

HERE = Path(__file__).parent
# Far above what a loaded machine without accelerators needs for one test.
TIMEOUT_S = 900
# Needs a model that reasons, and engines that recite.
REASONING = "test_recompute_reasoning.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.real_engines)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    left_out = ours if not config.getoption("--real-engines") else []
    if not config.getoption("--real-reasoning"):
        left_out = left_out or [item for item in ours if item.path.name == REASONING]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """The operator's engines, each alive before the test, and after it whatever the test did."""
    found = await Engines.from_environment()
    await found.assert_alive()
    yield found
    await found.assert_alive()
    await found.assert_idle()


@pytest.fixture
async def proxy(engines: Engines) -> AsyncIterator[ProxyProcess]:
    """The real command in front of all engines."""
    async with running_proxy(engines.prefillers, engines.decoders) as running:
        yield running


@pytest.fixture
def lab(engines: Engines, proxy: ProxyProcess) -> Lab:
    """The proxy and the plain engine, to be asked the same."""
    return Lab(proxy, engines)
