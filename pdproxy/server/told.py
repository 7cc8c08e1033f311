"""What an answer tells of its own way: which instances, how many attempts, where the time went."""

from __future__ import annotations

from functools import lru_cache

from pdproxy.core.headers import HeaderList
from pdproxy.dispatch.account import Account

MILLISECONDS = 1000.0
ASKING_HEADER = "X-PDProxy-Debug"


def told_headers(account: Account, now: float, *, is_stream: bool, is_asked: bool) -> HeaderList:
    """Return the headers that go onto an answer at its head, as far as is known by then."""
    headers = debug_headers(account) if is_asked else []
    return headers if is_stream and not is_asked else headers + server_timing(account, now)


def traced(account: Account) -> dict[str, str | int]:
    """Return what the span of a request says once it has ended, by OpenTelemetry's names."""
    told: dict[str, str | int | None] = {
        "http.response.status_code": account.status,
        "gen_ai.request.model": account.model or None,
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": account.output_tokens,
        "pdproxy.request_id": account.request_id,
        "pdproxy.outcome": account.outcome.value,
        "pdproxy.rounds": account.rounds,
        "error.type": account.code or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def server_timing(account: Account, now: float) -> HeaderList:
    """Return the header by which browsers and tools show where the time of an answer went.

    Such as `Server-Timing: queue;dur=0.4, prefill;dur=52.1, handoff;dur=0.1, total;dur=310.2`.
    """
    timeline = account.timeline
    spent_s = timeline.spent_so_far_s(now)
    shown = [seconds * MILLISECONDS for seconds in (*spent_s.values(), timeline.age_s(now))]
    return [("server-timing", _timing_form(*spent_s) % tuple(shown))]


@lru_cache(64)
def _timing_form(*stages: str) -> str:
    """Return the header's text for these stages, with places for their times."""
    return ", ".join(f"{name};dur=%.1f" for name in (*stages, "total"))


def debug_headers(account: Account) -> HeaderList:
    """Return what an answer tells of its way to who asked for it; what is not known is left out."""
    told = {
        "prefiller": account.prefiller,
        "prefiller-reason": account.prefiller_reason,
        "prefill-attempts": account.prefill_attempts,
        "decoder": account.decoder,
        "decoder-reason": account.decoder_reason,
        "decode-attempts": account.decode_attempts,
        "rounds": account.rounds,
    }
    return [(f"x-pdproxy-{name}", str(value)) for name, value in told.items() if value]
