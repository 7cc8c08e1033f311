"""How texts for people say numbers."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return such as `1 request` or `2 requests`; the noun's plural has an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
