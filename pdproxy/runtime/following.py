"""What keeps the instances in step with the outside: the configuration file and names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

from pdproxy.core.instance import Endpoint, Role
from pdproxy.runtime.instances_arg import expand
from pdproxy.runtime.names import NameWatch, Resolve, resolve_by_system
from pdproxy.runtime.reload import Reload
from pdproxy.runtime.roster import FleetRoster
from pdproxy.runtime.settings import Settings
from pdproxy.tasks import spawn

logger = logging.getLogger(__name__)

CONFIG_INTERVAL_S = 1.0  # between two looks at the file; reading it costs nothing
FIRST_RESOLUTION_S = 1.0  # for which the start waits for names, as it does for engines


@asynccontextmanager
async def following(
    settings: Settings, roster: FleetRoster, resolve: Resolve = resolve_by_system
) -> AsyncIterator[None]:
    """Follow file and names until the block ends; SIGHUP reads the file again at once."""
    tasks: list[asyncio.Task[None]] = []

    def begin(work: Coroutine[Any, Any, None], name: str) -> None:
        tasks.append(spawn(work, name=name))

    loop = asyncio.get_running_loop()
    on_hangup: Callable[[], None] = _nothing_to_read
    reread: Callable[[], Settings] | None = settings.reread
    if settings.config is not None and reread is not None:
        reload = Reload(settings, reread, roster)
        begin(reload.follow(settings.config, CONFIG_INTERVAL_S), "configuration file")
        on_hangup = reload.ask
    # Signals reach the main thread only; elsewhere the file is followed all the same.
    with contextlib.suppress(ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    if names := _names(settings):
        watch = NameWatch(names, roster, resolve)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_RESOLUTION_S):
                await watch.resolve()
        begin(watch.follow(settings.dns_interval), "names")
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGHUP)


def _nothing_to_read() -> None:
    logger.info("SIGHUP: there is no --config file to read")


def _names(settings: Settings) -> list[tuple[Role, Endpoint]]:
    lists = ((Role.PREFILL, settings.prefiller_dns), (Role.DECODE, settings.decoder_dns))
    return [
        (role, name)
        for role, entries in lists
        for name in chain.from_iterable(expand(entry) for entry in entries)
    ]
