"""Tracing, if it is switched on; the libraries for it are loaded only then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdproxy.runtime.settings import Settings
from pdproxy.server.context import NO_TRACER, RequestTracer


@asynccontextmanager
async def tracing(settings: Settings) -> AsyncIterator[RequestTracer]:
    """Give the tracer that the settings ask for; send what it holds at the end."""
    if not settings.tracing:
        yield NO_TRACER
        return
    from pdproxy.runtime.otel import exporting

    async with exporting() as tracer:
        yield tracer
