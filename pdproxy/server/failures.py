"""Failures as OpenAI errors: which status, body and headers a client gets for which error."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from pdproxy.core.headers import HeaderList, to_client
from pdproxy.core.jsonfields import decode, encode
from pdproxy.dispatch.account import Outcome
from pdproxy.errors import (
    EngineAnswered,
    NoInstance,
    Overloaded,
    PDProxyError,
    RecomputeUnsupported,
    ShuttingDown,
    SupervisorSilent,
    UpstreamError,
)

FIRST_SERVER_ERROR = 500
TOO_MANY_REQUESTS = 429
JSON_HEADERS: HeaderList = [("content-type", "application/json"), ("server", "pdproxy")]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told."""

    status: int
    headers: HeaderList
    body: bytes


def to_failure(error: PDProxyError) -> Failure:
    """Return the answer for an error before anything was sent.

    An engine's own answer passes with status, headers and body; if its body is empty or no JSON,
    an OpenAI-shaped one is made, since clients parse it.
    """
    if isinstance(error, EngineAnswered):
        headers = to_client(error.headers)
        if _is_json(error.body):
            return Failure(error.engine_status, headers, error.body)
        kept = [p for p in headers if p[0] != "content-type"]
        return Failure(error.engine_status, kept + JSON_HEADERS, error_body(error))
    headers = list(JSON_HEADERS)
    if isinstance(error, NoInstance | Overloaded | ShuttingDown | SupervisorSilent):
        headers.append(("retry-after", str(error.retry_after_s)))
    return Failure(error.status, headers, error_body(error))


def closing_answer(error: PDProxyError) -> bytes:
    """Return a whole answer as it goes onto the wire, where no library writes it."""
    failure = to_failure(error)
    lines = [f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in failure.headers]
    lines.append(f"content-length: {len(failure.body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + failure.body


def _is_json(body: bytes) -> bool:
    try:
        decode(body)
    except ValueError:
        return False
    return True


def error_body(error: PDProxyError) -> bytes:
    """Return `{"error": {...}}` as bytes, as an answer or as the data of an error event."""
    return encode(error.to_openai())


def outcome_of(error: PDProxyError) -> Outcome:
    """Return whose fault it was."""
    if isinstance(error, EngineAnswered):
        is_clients = error.engine_status < FIRST_SERVER_ERROR
        is_clients = is_clients and error.engine_status != TOO_MANY_REQUESTS
        return Outcome.CLIENT_ERROR if is_clients else Outcome.ENGINE_ERROR
    if isinstance(error, UpstreamError | RecomputeUnsupported):
        return Outcome.ENGINE_ERROR
    if isinstance(error, NoInstance | Overloaded):
        return Outcome.REJECTED
    return Outcome.CLIENT_ERROR if error.status < FIRST_SERVER_ERROR else Outcome.PROXY_ERROR
