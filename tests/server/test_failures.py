import json

import pytest

from pdproxy.dispatch.account import Outcome
from pdproxy.errors import (
    BodyTooLarge,
    ClientStalled,
    EngineAnswered,
    InvalidRequest,
    LoopDetected,
    NoInstance,
    Overloaded,
    PDProxyError,
    RecomputeUnsupported,
    Unauthorized,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from pdproxy.server.failures import error_body, outcome_of, to_failure

HEADERS = [("content-type", "text/html"), ("retry-after", "7"), ("connection", "close")]


@pytest.mark.case("C01", "C03")
@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "x"}}', b'{"detail":"y"}', b"[]"], ids=["error", "detail", ""]
)
def test_engines_own_json_passes_as_it_is(body):
    failure = to_failure(EngineAnswered(429, HEADERS, body))

    assert (failure.status, failure.body) == (429, body)
    assert failure.headers == [("content-type", "text/html"), ("retry-after", "7")]


@pytest.mark.parametrize("body", [b"", b"<html>502", b"Internal Server Error", b"{", b"\xff"])
def test_answer_that_is_no_json_becomes_an_openai_error(body):
    failure = to_failure(EngineAnswered(502, HEADERS, body))

    assert failure.status == 502
    assert json.loads(failure.body)["error"]["message"] == "the engine answered 502"
    assert ("content-type", "application/json") in failure.headers
    assert ("retry-after", "7") in failure.headers
    assert len([name for name, _ in failure.headers if name == "content-type"]) == 1


@pytest.mark.case("C02", "C90")
def test_detail_stays_inside():
    error = UpstreamUnreachable("the engine could not be reached", detail="10.0.0.1:8100")

    failure = to_failure(error)

    assert failure.status == 502
    assert b"10.0.0.1" not in failure.body
    assert json.loads(failure.body) == error.to_openai() == json.loads(error_body(error))


@pytest.mark.parametrize("kind", [NoInstance, Overloaded])
def test_state_of_the_service_says_when_to_come_back(kind):
    failure = to_failure(kind("x"))

    assert failure.status == 503
    assert ("retry-after", "1") in failure.headers


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        pytest.param(EngineAnswered(400, [], b""), Outcome.CLIENT_ERROR, id="400"),
        pytest.param(EngineAnswered(429, [], b""), Outcome.ENGINE_ERROR, id="429"),
        pytest.param(EngineAnswered(500, [], b""), Outcome.ENGINE_ERROR, id="500"),
        pytest.param(UpstreamLost("x"), Outcome.ENGINE_ERROR, id="lost"),
        pytest.param(UpstreamTimeout("x", phase="head"), Outcome.ENGINE_ERROR, id="timeout"),
        pytest.param(RecomputeUnsupported("x"), Outcome.ENGINE_ERROR, id="out-of-kv"),
        pytest.param(NoInstance("x"), Outcome.REJECTED, id="no-instance"),
        pytest.param(Overloaded("x"), Outcome.REJECTED, id="overloaded"),
        pytest.param(InvalidRequest("x"), Outcome.CLIENT_ERROR, id="invalid"),
        pytest.param(Unauthorized("x"), Outcome.CLIENT_ERROR, id="key"),
        pytest.param(BodyTooLarge("x"), Outcome.CLIENT_ERROR, id="too-large"),
        pytest.param(ClientStalled("x"), Outcome.CLIENT_ERROR, id="stalled"),
        pytest.param(LoopDetected("x"), Outcome.PROXY_ERROR, id="loop"),
        pytest.param(PDProxyError("x"), Outcome.PROXY_ERROR, id="bug"),
    ],
)
def test_outcome_says_whose_fault_it_was(error, outcome):
    assert outcome_of(error) is outcome
