"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-engines",
        action="store_true",
        help="also run tests/real_engines, against the vLLM engines named in its README",
    )
