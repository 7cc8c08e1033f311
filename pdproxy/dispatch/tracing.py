"""What dispatch needs of tracing: spans that have children, and go to engines as headers.

Rule: without tracing there is one span that does nothing, and nothing of it is ever made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from pdproxy.core.headers import HeaderList

Attributes = Mapping[str, str | int]


class Span(Protocol):
    """A piece of work on one request."""

    def child(self, name: str, attributes: Attributes) -> AbstractContextManager[Span]:
        """Return a span inside this one, which ends with its block."""
        ...

    def note(self, attributes: Attributes) -> None:
        """Add what has become known."""
        ...

    def carry(self, headers: HeaderList) -> HeaderList:
        """Return headers for an engine whose own spans belong into this one."""
        ...


class NoSpan:
    """Stands for every span while nothing is traced; the client's trace context passes as it is."""

    __slots__ = ()

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def child(self, name: str, attributes: Attributes) -> NoSpan:
        """Return itself."""
        return self

    def note(self, attributes: Attributes) -> None:
        """Keep nothing."""

    def carry(self, headers: HeaderList) -> HeaderList:
        """Return the headers as they are."""
        return headers


NO_SPAN = NoSpan()
