"""What the operator should know of settings that are valid: none of it stops the proxy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdproxy.runtime.instances_arg import is_loopback

if TYPE_CHECKING:
    from pdproxy.runtime.settings import Settings

# After which vLLM's prefillers give up KV cache that no decoder has fetched, by default.
ENGINE_LEASE_S = 30.0
# After which uvicorn, the engines' HTTP server, closes an idle connection, by default.
ENGINE_KEEPALIVE_S = 5.0


def cautions(settings: Settings) -> Iterator[str]:
    """Find what is worth a warning; a line each."""
    yield from _open_to_others(settings)
    yield from _two_roles(settings)
    yield from _beyond_engines(settings)
    if settings.engine_insecure:
        yield "--engine-insecure: certificates of https:// engines are not checked"
    if settings.demo and settings.worker_count > 1:
        yield "--demo serves with one process, whatever --workers says"


def _open_to_others(settings: Settings) -> Iterator[str]:
    if settings.admin_token is None and not is_loopback(settings.host):
        yield (
            f"listening on {settings.host} without --admin-token: administrative "
            "calls, such as /instances/*, are taken from this machine only, where a reverse proxy "
            "makes everybody count as such"
        )


def _two_roles(settings: Settings) -> Iterator[str]:
    decoders = {endpoint.key for endpoint in settings.decode_endpoints}
    for endpoint in settings.prefill_endpoints:
        if endpoint.key in decoders:
            yield (
                f"{endpoint} is a prefiller and a decoder: a request may be handed over from the "
                "engine to itself, which not every KV connector can do"
            )


def _beyond_engines(settings: Settings) -> Iterator[str]:
    """Find times that engines with their own defaults do not keep."""
    if settings.kv_handle_ttl >= ENGINE_LEASE_S:
        yield (
            f"--kv-handle-ttl is {settings.kv_handle_ttl:g} s, but engines give up KV cache that "
            f"nobody fetched after {ENGINE_LEASE_S:g} s unless told otherwise, and may answer a "
            "later use with wrong text"
        )
    if settings.engine_keepalive_timeout >= ENGINE_KEEPALIVE_S:
        yield (
            f"--engine-keepalive-timeout is {settings.engine_keepalive_timeout:g} s, but engines "
            f"close idle connections after {ENGINE_KEEPALIVE_S:g} s unless told otherwise, and "
            "requests on such connections have to be sent again"
        )
