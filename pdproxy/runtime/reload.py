"""Follows the configuration file: what it adds to or drops from the instances takes effect at once.

Rule: only the lists of instances are read again. A file that is wrong changes nothing, and what
was added by calls is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from pdproxy.core.instance import Role, Source
from pdproxy.core.wording import counted
from pdproxy.errors import ConfigError
from pdproxy.runtime.roster import FILE_GROUP, FleetRoster
from pdproxy.runtime.settings import Settings

logger = logging.getLogger(__name__)


class Reload:
    """Reads the settings again when the file has changed, or when told to.

    Args:
        settings: those in effect.
        read: reads them again, from the same sources.
        roster: is told of the instances.
    """

    def __init__(
        self, settings: Settings, read: Callable[[], Settings], roster: FleetRoster
    ) -> None:
        self._settings = settings
        self._read = read
        self._roster = roster
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Read again soon, whether the file has changed or not."""
        self._asked.set()

    async def follow(self, path: Path, interval_s: float) -> None:
        """Look at the file for ever.

        A change counts once the file is the same for two looks: an editor may be writing it.
        """
        seen: bytes | None = None
        taken: bytes | None = None  # it may have changed since the start read it
        while True:
            is_asked = await self._is_asked_within(interval_s)
            now = await asyncio.to_thread(_content, path)
            is_settled = now is not None and now == seen != taken
            seen = now
            if is_asked or is_settled:
                taken = now
                await self.reload()

    async def reload(self) -> None:
        """Read the settings again and let the instances follow."""
        try:
            new = await asyncio.to_thread(self._read)
        except ConfigError as error:
            for fault in error.faults:
                logger.warning("the configuration is not taken over: %s", fault)
            return
        counts = [
            await self._roster.follow(role, FILE_GROUP, endpoints, Source.CONFIGURED)
            for role, endpoints in (
                (Role.PREFILL, new.prefill_endpoints),
                (Role.DECODE, new.decode_endpoints),
            )
        ]
        logger.info("configuration read: %s of instances", counted(sum(counts), "change"))
        if others := _other_changes(self._settings, new):
            logger.warning("takes effect at the next start only: %s", ", ".join(others))
        self._settings = new

    async def _is_asked_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True


# And what is no setting.
_NOT_COMPARED = frozenset(("origins", "reread"))
_INSTANCE_LISTS = frozenset(
    f"{role}{form}" for role in ("prefiller", "decoder") for form in ("s", "_hosts", "_ports")
)


def _other_changes(old: Settings, new: Settings) -> list[str]:
    names = [name for name in Settings.model_fields if name not in _INSTANCE_LISTS | _NOT_COMPARED]
    return [name for name in names if getattr(old, name) != getattr(new, name)]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
