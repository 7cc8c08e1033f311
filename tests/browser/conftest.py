"""The browser. Where it is missing its tests fail in CI, and are skipped elsewhere."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.browsing import chromium, missing

if TYPE_CHECKING:
    from playwright.async_api import Browser

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if lack := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(lack)
        pytest.skip(lack)
    async with chromium() as running:
        yield running
