"""Options of the whole test suite, and what is left out of it on this machine."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.needs import is_left_out, lacks

LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-engines",
        action="store_true",
        help="also run tests/real_engines, against the vLLM engines named in its README",
    )
    parser.addoption(
        "--real-reasoning",
        action="store_true",
        help="with --real-engines: also the tests of a model that reasons",
    )


@pytest.hookimpl(trylast=True)  # once all marks are there
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if is_left_out(item)]
    config.stash[LEFT_OUT] = Counter(text for item in left_out for text in lacks(item))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    counts = config.stash.get(LEFT_OUT, Counter())  # none if a path was not found
    return [f"{count} tests are left out: {text}" for text, count in sorted(counts.items())]


@pytest.fixture(autouse=True)
def _has_what_it_needs(request: pytest.FixtureRequest) -> None:
    """Fail where a need should have been met."""
    if missing := lacks(request.node):
        pytest.fail("; ".join(missing))
