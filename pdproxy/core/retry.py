"""What to do after a failed attempt: one pure decision per leg.

Rule: a KV handle is sent to a second decoder only if the first one certainly did not get it; a
handle that may be spent would be answered with wrong text (vLLM 0.32, seen on engines).
"""

from __future__ import annotations

import random
from enum import Enum, StrEnum, auto

from pdproxy.core.instance import Role
from pdproxy.errors import (
    EngineAnswered,
    PDProxyError,
    UpstreamCut,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)

# HTTP statuses by which an engine says "not now".
TOO_MANY_REQUESTS = 429
REQUEST_TIMEOUT = 408
UNAVAILABLE = 503
FIRST_SERVER_ERROR = 500

# Growth of the wait between attempts, its spread, and its bounds in seconds.
GROWTH = 2.0
JITTER = 0.5
MIN_DELAY_S = 0.05
MAX_DELAY_S = 5.0
# For how long at most an engine's Retry-After keeps other requests away from it.
MAX_RETRY_AFTER_S = 10.0


class Verdict(Enum):
    """How a leg goes on after a failed attempt."""

    GIVE_UP = auto()
    ELSEWHERE = auto()  # the same leg on another instance, the same one if there is no other
    ONLY_ELSEWHERE = auto()  # the same, but never on an instance that said "not now"
    FRESH_PREFILL = auto()  # the handle may be spent: prefill again, then another decoder
    FRESH_PREFILL_ONLY_ELSEWHERE = auto()


class Phase(StrEnum):
    """How far a leg had come when it failed; a closed set, since it is a label of metrics."""

    CONNECT = "connect"
    BEFORE_FIRST_TOKEN = "before_first_token"
    MID_STREAM = "mid_stream"


def phase_of(error: PDProxyError) -> Phase:
    """Return how far a leg had come that failed before any output reached the client."""
    return Phase.CONNECT if was_never_sent(error) else Phase.BEFORE_FIRST_TOKEN


def judge(role: Role, error: PDProxyError) -> Verdict:
    """Return how to go on after `error` ended an attempt before any output reached the client."""
    if was_never_sent(error):
        return Verdict.ELSEWHERE
    is_decode = role is Role.DECODE
    if isinstance(error, EngineAnswered):
        if not _is_retryable(error.engine_status):
            return Verdict.GIVE_UP
        if is_busy(error):
            return Verdict.FRESH_PREFILL_ONLY_ELSEWHERE if is_decode else Verdict.ONLY_ELSEWHERE
    elif not isinstance(error, UpstreamError):
        return Verdict.GIVE_UP
    return Verdict.FRESH_PREFILL if is_decode else Verdict.ELSEWHERE


def was_never_sent(error: PDProxyError) -> bool:
    """Tell whether the request certainly did not reach the engine: there was no connection."""
    is_connect_timeout = isinstance(error, UpstreamTimeout) and error.phase == "connect"
    return is_connect_timeout or isinstance(error, UpstreamUnreachable)


def is_reply_lost(error: PDProxyError) -> bool:
    """Tell whether the engine may have done its work without an answer of it arriving."""
    return isinstance(error, UpstreamError) and not was_never_sent(error)


def is_busy(error: PDProxyError) -> bool:
    """Tell whether the engine said "not now", after which it is not asked again by the request."""
    if not isinstance(error, EngineAnswered):
        return False
    if error.engine_status == TOO_MANY_REQUESTS:
        return True
    names = {name for name, _ in error.headers}
    return error.engine_status == UNAVAILABLE and "retry-after" in names


def retry_after_s(error: PDProxyError) -> float:
    """Return for how long a busy engine asks to be left alone; 0 if it names no time.

    Capped, since an engine's word must not take an instance out of service. Only a number of
    seconds counts, as engines send it; RFC 9110, 10.2.3 allows a date, too.
    """
    if not isinstance(error, EngineAnswered) or not is_busy(error):
        return 0.0
    said = next((value for name, value in error.headers if name == "retry-after"), "")
    is_number = said.isascii() and said.isdigit()
    return min(MAX_RETRY_AFTER_S, float(said)) if is_number else 0.0


def is_instance_fault(error: PDProxyError) -> bool:
    """Tell whether `error` counts against the instance's health."""
    if isinstance(error, EngineAnswered):
        status = error.engine_status
        return status >= FIRST_SERVER_ERROR and not is_busy(error)
    return isinstance(error, UpstreamError) and not isinstance(error, UpstreamCut)


def delay_s(attempt: int, base_s: float, rng: random.Random) -> float:
    """Return the wait in seconds before the attempt after `attempt` (1 for the first).

    Doubling from `base_s`, up to a half longer at random, so that clients that failed together do
    not come back together; never below MIN_DELAY_S, never above MAX_DELAY_S.
    """
    grown = base_s * GROWTH ** (attempt - 1)
    spread = grown * rng.uniform(1, 1 + JITTER)
    return min(MAX_DELAY_S, max(MIN_DELAY_S, spread))


def _is_retryable(status: int) -> bool:
    return status >= FIRST_SERVER_ERROR or status in (TOO_MANY_REQUESTS, REQUEST_TIMEOUT)
