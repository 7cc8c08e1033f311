import random

import pytest

from pdproxy.core.instance import Role
from pdproxy.core.retry import (
    JITTER,
    MAX_DELAY_S,
    MAX_RETRY_AFTER_S,
    MIN_DELAY_S,
    Verdict,
    delay_s,
    is_instance_fault,
    is_reply_lost,
    judge,
    retry_after_s,
    was_never_sent,
)
from pdproxy.errors import (
    ClientStalled,
    EngineAnswered,
    InvalidRequest,
    NoInstance,
    Overloaded,
    PDProxyError,
    RecomputeUnsupported,
    UpstreamError,
    UpstreamLost,
    UpstreamProtocol,
    UpstreamTimeout,
    UpstreamUnreachable,
)


def answered(status, **headers):
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return EngineAnswered(status, pairs, b"{}")


def timeout(phase):
    return UpstreamTimeout("x", phase=phase)


GIVE_UP, ELSEWHERE, FRESH = Verdict.GIVE_UP, Verdict.ELSEWHERE, Verdict.FRESH_PREFILL
BUSY_P, BUSY_D = Verdict.ONLY_ELSEWHERE, Verdict.FRESH_PREFILL_ONLY_ELSEWHERE

# What happened, how the decode leg goes on, how the prefill leg does, whose fault it is.
RULES = [
    # Certainly not executed: the handle is still good.
    pytest.param(UpstreamUnreachable("x"), ELSEWHERE, ELSEWHERE, True, id="refused"),
    pytest.param(timeout("connect"), ELSEWHERE, ELSEWHERE, True, id="connect-timeout"),
    # It may have been executed: the handle may be spent.
    pytest.param(UpstreamLost("x"), FRESH, ELSEWHERE, True, id="lost"),
    pytest.param(UpstreamProtocol("x"), FRESH, ELSEWHERE, True, id="no-http"),
    pytest.param(timeout("head"), FRESH, ELSEWHERE, True, id="head-timeout"),
    pytest.param(timeout("body"), FRESH, ELSEWHERE, True, id="body-timeout"),
    pytest.param(timeout("first_token"), FRESH, ELSEWHERE, True, id="first-token-timeout"),
    *(
        pytest.param(answered(status), FRESH, ELSEWHERE, True, id=str(status))
        for status in (500, 501, 502, 503, 504, 599)
    ),
    pytest.param(answered(408), FRESH, ELSEWHERE, False, id="408"),
    # Not now: another one at once, and never this one again.
    pytest.param(answered(429), BUSY_D, BUSY_P, False, id="429"),
    pytest.param(answered(429, retry_after="7"), BUSY_D, BUSY_P, False, id="429-retry-after"),
    pytest.param(answered(503, retry_after="7"), BUSY_D, BUSY_P, False, id="503-retry-after"),
    pytest.param(answered(500, retry_after="7"), FRESH, ELSEWHERE, True, id="500-retry-after"),
    # The client's fault, or nobody's: no engine would say otherwise.
    *(
        pytest.param(answered(status), GIVE_UP, GIVE_UP, False, id=str(status))
        for status in (301, 400, 401, 403, 404, 405, 409, 413, 415, 422, 499)
    ),
    *(
        pytest.param(error, GIVE_UP, GIVE_UP, False, id=type(error).__name__)
        for error in (
            InvalidRequest("x"),
            ClientStalled("x"),
            NoInstance("x"),
            Overloaded("x"),
            RecomputeUnsupported("x"),
            PDProxyError("x"),
        )
    ),
]


@pytest.mark.case("C06", "C46", "C74")
@pytest.mark.parametrize(("error", "decode", "prefill", "is_fault"), RULES)
def test_rule(error, decode, prefill, is_fault):
    assert judge(Role.DECODE, error) is decode
    assert judge(Role.PREFILL, error) is prefill
    assert is_instance_fault(error) is is_fault


@pytest.mark.parametrize(("error", "decode", "prefill", "is_fault"), RULES)
def test_handle_goes_to_another_decoder_only_if_the_first_did_not_get_it(
    error, decode, prefill, is_fault
):
    assert (decode is ELSEWHERE) is was_never_sent(error)


def test_header_names_are_compared_as_the_client_gives_them():
    assert judge(Role.PREFILL, EngineAnswered(503, [("retry-after", "1")], b"")) is BUSY_P


@pytest.mark.case("C73")
@pytest.mark.parametrize("base_s", [0.0, 0.001, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("attempt", [1, 2, 3, 10, 60])
def test_delay_keeps_its_bounds(base_s, attempt):
    delays = [delay_s(attempt, base_s, random.Random(seed)) for seed in range(50)]

    assert min(delays) >= MIN_DELAY_S
    assert max(delays) <= MAX_DELAY_S


def test_delay_doubles_and_scatters_above_it():
    rng = random.Random(7)
    delays = {attempt: [delay_s(attempt, 0.2, rng) for _ in range(200)] for attempt in (1, 2, 3)}

    for attempt, seen in delays.items():
        middle = 0.2 * 2 ** (attempt - 1)
        assert min(seen) >= middle
        assert max(seen) <= middle * (1 + JITTER)
        assert max(seen) - min(seen) > middle * JITTER / 2


@pytest.mark.case("C73")
@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        (answered(503, retry_after="3"), 3.0),
        (answered(429, retry_after="3"), 3.0),
        (answered(429, retry_after="86400"), MAX_RETRY_AFTER_S),
        (answered(429, retry_after="-1"), 0.0),
        (answered(429, retry_after="Fri, 31 Dec 1999 23:59:59 GMT"), 0.0),
        (answered(429), 0.0),
        (answered(500, retry_after="3"), 0.0),
        (UpstreamLost("x"), 0.0),
    ],
)
def test_busy_engine_is_left_alone_for_the_time_it_names(error, pause_s):
    assert retry_after_s(error) == pause_s


@pytest.mark.parametrize(("error", "decode", "prefill", "is_fault"), RULES)
def test_reply_is_lost_if_the_request_was_sent_and_not_answered(error, decode, prefill, is_fault):
    is_lost = isinstance(error, UpstreamError) and not was_never_sent(error)
    assert is_reply_lost(error) is is_lost
