"""Settings, turned into the rules of each part; the parts do not know the settings."""

from __future__ import annotations

import random
import ssl

from pydantic import SecretStr

from pdproxy.core.admission import Limits
from pdproxy.core.allow import AllowList
from pdproxy.core.health import HealthRules
from pdproxy.dispatch.orphans import ReleaseRules
from pdproxy.dispatch.rules import DispatchRules, TokenIds
from pdproxy.errors import ConfigError
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.watch import RosterRules
from pdproxy.server.context import ServerRules
from pdproxy.server.shutdown import ShutdownRules
from pdproxy.upstream.limits import ClientLimits, Timeouts


def dispatch_rules(settings: Settings) -> DispatchRules:
    """Return the limits of one request."""
    connect_s, idle_s = settings.connect_timeout, _limit(settings.idle_timeout)
    first_token_s = _limit(settings.first_token_timeout)
    return DispatchRules(
        max_attempts=max(1, settings.max_retries),
        retry_delay_s=settings.retry_delay,
        prefill=Timeouts(connect_s, _limit(settings.prefill_timeout), idle_s),
        decode_stream=Timeouts(connect_s, first_token_s, idle_s),
        decode_whole=Timeouts(connect_s, _limit(settings.answer_timeout), idle_s),
        first_token_s=first_token_s,
        kv_handle_ttl_s=settings.kv_handle_ttl,
        max_event_bytes=settings.max_event_bytes,
        max_answer_bytes=settings.max_answer_bytes,
        max_parallel_prompts=settings.max_parallel_prompts,
        recompute=settings.recompute,
        token_ids=TokenIds(settings.token_ids),
        continue_lost=settings.continue_lost,
        max_rounds=settings.max_rounds,
        decode_alone=settings.on_no_prefiller == "decode-only",
    )


def server_rules(settings: Settings, rng: random.Random) -> ServerRules:
    """Return the limits and keys of the HTTP side."""
    return ServerRules(
        max_body_bytes=settings.max_body_bytes,
        body_s=_limit(settings.body_timeout),
        buffer_bytes=settings.stream_buffer_bytes,
        write_stall_s=_limit(settings.write_stall_timeout),
        models_s=settings.models_timeout,
        models_cache_s=settings.models_cache,
        engine_key=_secret(settings.engine_api_key),
        fallback_key=_secret(settings.openai_api_key),
        api_keys=tuple(key.get_secret_value() for key in settings.api_keys),
        admin_token=_secret(settings.admin_token),
        own_name=settings.host,
        debug_headers=settings.debug_headers,
        via=f"1.1 pdproxy-{rng.getrandbits(64):016x}",
    )


def admission_limits(settings: Settings) -> Limits:
    """Return how many requests are let in, and how long the others wait."""
    return Limits(
        max_in_flight=settings.max_in_flight,
        max_queue=settings.max_queue,
        queue_s=_limit(settings.queue_timeout),
        max_per_prefiller=settings.max_per_prefiller,
        max_per_decoder=settings.max_per_decoder,
        waits_for_kv=settings.kv_queue,
    )


def release_rules(settings: Settings) -> ReleaseRules:
    """Return how KV handles that are not used are released."""
    return ReleaseRules(
        max_running=settings.kv_release_concurrency,
        max_waiting=settings.kv_release_queue,
        limit_s=settings.kv_release_timeout,
    )


def shutdown_rules(settings: Settings) -> ShutdownRules:
    """Return how much time requests have at the end."""
    return ShutdownRules(delay_s=settings.shutdown_delay, grace_s=settings.shutdown_grace)


def allow_list(settings: Settings) -> AllowList | None:
    """Return which addresses engines may have; None if that is not limited."""
    return AllowList(settings.instance_allow) if settings.instance_allow else None


def client_limits(settings: Settings) -> ClientLimits:
    """Return the limits of the engine client."""
    return ClientLimits(idle_keepalive_s=settings.engine_keepalive_timeout)


def roster_rules(settings: Settings) -> RosterRules:
    """Return when instances are probed."""
    return RosterRules(
        probe_interval_s=settings.probe_interval,
        add_interval_s=settings.waiting_retry_interval,
        add_attempts=max(1, settings.max_waiting_retries),
        scrape_interval_s=settings.scrape_interval,
    )


def health_rules(settings: Settings) -> HealthRules:
    """Return when instances are left out, and how they come back."""
    return HealthRules(
        failures_to_eject=settings.eject_after,
        ejection_s=settings.eject_time,
        max_ejection_s=max(settings.eject_time, settings.max_eject_time),
        probes_to_eject=settings.probe_failures,
        slow_start_s=settings.slow_start,
    )


def engine_ssl(settings: Settings) -> ssl.SSLContext:
    """Return how https:// engines are checked.

    Raises:
        ConfigError: the CA file cannot be used.
    """
    ca_file = settings.engine_ca_file
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"--engine-ca-file: {ca_file} cannot be used: {error}"]) from None
    if settings.engine_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def listener_ssl(settings: Settings) -> ssl.SSLContext | None:
    """Return the certificate of the listener, None for plain HTTP.

    Raises:
        ConfigError: certificate or key cannot be used.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        text = f"--ssl-certfile, --ssl-keyfile: {settings.ssl_certfile} cannot be used: {error}"
        raise ConfigError([text]) from None
    return context


def _limit(seconds: float) -> float | None:
    """Return None for 0, which stands for no limit."""
    return seconds or None


def _secret(value: SecretStr | None) -> str:
    return value.get_secret_value() if value is not None else ""
