"""The settings that say what is told: by the log, by the metrics, and on answers."""

from __future__ import annotations

from pydantic_settings import BaseSettings

from pdproxy.runtime import setting_types as types
from pdproxy.runtime.options import Arity, Group, Option, setting


class Observing(BaseSettings):
    """Part of `Settings`."""

    # --- Logging
    log_level: types.LogLevel = setting(
        "INFO",
        Option(
            Group.LOGGING,
            "LEVEL",
            "least level that is logged: DEBUG, INFO, WARNING, ERROR, CRITICAL",
        ),
    )
    log_format: types.LogFormat = setting(
        "text",
        Option(
            Group.LOGGING, "FORMAT", "text for people or json for collectors, one object a line"
        ),
    )
    metrics_host: types.Host | None = setting(
        None,
        Option(
            Group.LISTENING,
            "HOST",
            "name or address for --metrics-port; that of --host if not given",
            example="0.0.0.0",
        ),
    )
    metrics_port: types.Port | None = setting(
        None,
        Option(
            Group.LISTENING,
            "PORT",
            "TCP port that serves /metrics and /health alone, so that scrapers need no way to the "
            "API; --port serves them too",
            example="9100",
        ),
    )
    tracing: types.Switch = setting(
        False,
        Option(
            Group.LOGGING,
            "",
            "send a span for each request, round and leg to the collector that OpenTelemetry's own "
            "variables name, such as OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra pdproxy[otel]",
            arity=Arity.NONE,
        ),
    )
    debug_headers: types.Switch = setting(
        False,
        Option(
            Group.LOGGING,
            "",
            "answer requests that send 'X-PDProxy-Debug: 1' with headers that name instances, "
            "rounds and timings",
            arity=Arity.NONE,
        ),
    )
