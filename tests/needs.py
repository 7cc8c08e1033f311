"""What some tests need of the machine beside Python.

Rule: nothing is skipped in silence. A test whose need is not met is left out, and a line above the
results says which and what to install. In CI, which installs what can be installed, it fails.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from importlib.util import find_spec

import pytest

IS_CI = os.environ.get("CI") == "true"


def chromium_path() -> str:
    """Return where the browser is, "" if there is none."""
    return shutil.which("chromium") or ""


def _chromium() -> str:
    if find_spec("playwright") is None:
        return "the extra pdproxy[browser] is not installed"
    return "" if chromium_path() else "there is no chromium: apt-get install chromium"


def _curl() -> str:
    return "" if shutil.which("curl") else "there is no curl: apt-get install curl"


def _promtool() -> str:
    return "" if shutil.which("promtool") else "there is no promtool: apt-get install prometheus"


def _ipv6() -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return "this machine has no IPv6 loopback"
    return ""


# What tells what is lacking, "" if nothing; by the name in `@pytest.mark.needs(name)`.
NEEDS: dict[str, Callable[[], str]] = {
    "chromium": _chromium,
    "curl": _curl,
    "promtool": _promtool,
    "ipv6": _ipv6,
}
# No package brings it.
NOT_INSTALLABLE = frozenset({"ipv6"})


def lacks(item: pytest.Item) -> list[str]:
    """Return what a test lacks on this machine."""
    names = [name for mark in item.iter_markers("needs") for name in mark.args]
    return [text for name in names if (text := NEEDS[name]())]


def is_left_out(item: pytest.Item) -> bool:
    """Whether a test is to be left out for what it lacks."""
    names = [name for mark in item.iter_markers("needs") for name in mark.args]
    return any(NEEDS[name]() for name in names if name in NOT_INSTALLABLE or not IS_CI)
