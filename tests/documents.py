"""Reads the project's documents: code blocks, tables, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def commands(path: Path) -> list[str]:
    """Return the lines of all `sh` blocks, continued ones joined."""
    blocks = [text for kind, text in _BLOCK.findall(path.read_text("utf-8")) if kind == "sh"]
    joined = "".join(blocks).replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


def section(text: str, heading: str) -> str:
    """Return what stands below a heading of level two."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables in a text, without heads."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_rule = line.startswith("|--")
        if line.startswith("|") and not is_rule and before.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def code(text: str) -> list[str]:
    """Return what stands between backticks."""
    return _CODE.findall(text)


def links(path: Path) -> list[str]:
    text = _BLOCK.sub("", path.read_text("utf-8"))
    return [link for link in _LINK.findall(text) if "://" not in link]


def anchors(path: Path) -> set[str]:
    """Return the anchors that a renderer makes of the headings."""
    headings = _HEADING.findall(_BLOCK.sub("", path.read_text("utf-8")))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
