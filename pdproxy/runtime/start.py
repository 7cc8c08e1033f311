"""What is told and checked once the proxy listens, whatever the number of its processes."""

from __future__ import annotations

import logging
import ssl
import sys
from importlib.metadata import version

from pdproxy import __version__
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role
from pdproxy.core.wording import counted
from pdproxy.errors import ConfigError
from pdproxy.runtime.settings import Settings
from pdproxy.upstream.prober import Prober

logger = logging.getLogger(__name__)

# For the answer to the proxy's own question at start; a loaded machine is slow to start.
SELF_CHECK_S = 10.0
_REPORTED = ("aiohttp", "uvloop", "httptools", "msgspec", "orjson", "pydantic-settings")


def report_start(settings: Settings, fleet: Fleet, port: int, workers: int) -> None:
    """Log what runs here, and what the operator should know."""
    for warning in settings.warnings:
        logger.warning("%s", warning)
    python = ".".join(map(str, sys.version_info[:3]))
    parts = [f"Python {python}", *(f"{name} {version(name)}" for name in _REPORTED)]
    logger.info("pdproxy %s on %s", __version__, ", ".join(parts))
    logger.info(
        "listening on %s port %d with %s and %s%s",
        *(settings.host, port),
        counted(len(fleet.instances(Role.PREFILL)), "prefiller"),
        counted(len(fleet.instances(Role.DECODE)), "decoder"),
        f" and {workers} workers" if workers > 1 else "",
    )


async def check_self(endpoint: Endpoint) -> None:
    """Ask a listener of the proxy for its health.

    Raises:
        ConfigError: it does not answer; an installed library may be of a version that breaks it.
    """
    tls = None
    if endpoint.tls:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    async with Prober(SELF_CHECK_S, tls) as prober:
        if not await prober.is_serving(endpoint):
            text = "the proxy does not answer its own question for /health as it should"
            raise ConfigError([f"{text}; compare the versions in the log with those it supports"])
