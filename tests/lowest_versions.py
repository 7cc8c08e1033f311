"""`constraints-lowest.txt`: the lowest release of each run-time dependency that is allowed.

After a change of the dependencies, `python -m tests.lowest_versions` writes it; a test compares.
"""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
USER_EXTRAS = ("otel",)
LOWEST = ROOT / "constraints-lowest.txt"

_HEAD = (
    "# The lower bounds of pyproject.toml, written by 'make generated'; CI runs tests with them.\n"
)
_REQUIREMENT = re.compile(r"(?P<name>[a-z0-9-]+)>=(?P<lowest>[0-9.]+),<(?P<bound>[0-9.]+)")


def bounds() -> dict[str, tuple[str, str]]:
    """Return the lowest allowed and the lowest refused version of each run-time dependency.

    Those of the extras for users are among them.

    Raises:
        ValueError: one is not of the form `name>=1.2.3,<4`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = {}
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *chain(*(extras[e] for e in USER_EXTRAS))):
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement} is not of the form name>=1.2.3,<4")
        found[match["name"]] = (match["lowest"], match["bound"])
    return found


def lowest_text() -> str:
    """Return what the file has to hold."""
    return _HEAD + "".join(f"{name}=={lowest}\n" for name, (lowest, _) in bounds().items())


if __name__ == "__main__":
    LOWEST.write_text(lowest_text(), "utf-8")
    print(LOWEST.name)  # noqa: T201  # a command of its own
