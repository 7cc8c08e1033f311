"""Numbers of client requests that limits are about, of one process or of all in the proxy."""

from __future__ import annotations

from typing import Protocol


class InFlight(Protocol):
    """A number of client requests, such as those worked on; of all processes, if they share it."""

    def count(self) -> int:
        """Return the sum."""
        ...

    def add(self, change: int) -> None:
        """Change this process's part."""
        ...


class OwnInFlight:
    """The number of one process."""

    def __init__(self) -> None:
        self._count = 0

    def count(self) -> int:
        """Return it."""
        return self._count

    def add(self, change: int) -> None:
        """Change it."""
        self._count += change
