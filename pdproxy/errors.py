"""Every deliberate error of pdproxy: status, type and code, and its OpenAI-shaped body.

Rule: client-visible texts never hold an engine's address, a file path or a traceback. What an
operator needs beyond that travels in `detail`, which is logged and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import orjson


class PDProxyError(Exception):
    """Base of all deliberate errors.

    Attributes:
        status: HTTP status for the client if nothing was sent yet.
        type: OpenAI error type, such as `invalid_request_error`.
        code: short machine-readable code.
        message: text for the client.
        detail: text for the log only.
        quote: an engine's own words, for the client only: they may hold the prompt.
        is_told: the client has been told already, by the engine's own error event.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, detail: str = "", quote: str = "", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.quote = quote
        self.param = param
        self.is_told = False

    def to_openai(self) -> dict[str, object]:
        """Return `{"error": {"message", "type", "param", "code"}}`."""
        error = {
            "message": f"{self.message}: {self.quote}" if self.quote else self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def untraced(error: PDProxyError) -> PDProxyError:
    """Return an error, and its causes, without tracebacks.

    An error that is kept holds all that was on the stack: requests and their bodies. If it is kept
    by something that was there itself, nothing but a collection of garbage frees them.
    """
    held: BaseException | None = error
    while held is not None:
        held.__traceback__ = None
        held = held.__cause__ or held.__context__
    return error


# --- the client's fault


class InvalidRequest(PDProxyError):
    """The request cannot be understood; no engine was called."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthorized(PDProxyError):
    """The API key or the admin token is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(PDProxyError):
    """The caller may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(PDProxyError):
    """No such path."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(PDProxyError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class HeaderTimeout(PDProxyError):
    """The client did not send the head of its request in time."""

    status = 408
    type = "timeout_error"
    code = "header_timeout"


class BodyTimeout(PDProxyError):
    """The client did not send its body in time."""

    status = 408
    type = "timeout_error"
    code = "body_timeout"


class BodyTooLarge(PDProxyError):
    """The body is over the configured limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedEncoding(PDProxyError):
    """The body is compressed in a way that is not known here."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class ClientStalled(PDProxyError):
    """The client did not read what it was sent for too long; its stream is cut."""

    status = 408
    type = "timeout_error"
    code = "client_stalled"


class LoopDetected(PDProxyError):
    """The request came back to this proxy: one of its instances is the proxy itself."""

    status = 508
    type = "server_error"
    code = "loop_detected"


# --- the service's state


class NoInstance(PDProxyError):
    """No instance of a role can take a request now."""

    status = 503
    type = "service_unavailable"
    code = "no_instance"
    retry_after_s: ClassVar[int] = 1


class ShuttingDown(PDProxyError):
    """The proxy ends, and the request has had all the time there was; another proxy may take it."""

    status = 503
    type = "service_unavailable"
    code = "shutting_down"
    retry_after_s: ClassVar[int] = 1


class Overloaded(PDProxyError):
    """The proxy is at one of its own limits."""

    status = 503
    type = "service_unavailable"
    code = "overloaded"
    retry_after_s: ClassVar[int] = 1


class QueueFull(Overloaded):
    """As many requests wait as may; this one was not begun."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class QueueTimeout(Overloaded):
    """The request waited for its turn too long; it was not begun."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"


class SupervisorSilent(PDProxyError):
    """The process that owns the instances does not answer this worker."""

    status = 503
    type = "service_unavailable"
    code = "supervisor_silent"
    retry_after_s: ClassVar[int] = 1


# --- upstream: what an engine or the way to it did; raised by `upstream` only


class UpstreamError(PDProxyError):
    """An attempt on an engine failed without an HTTP answer of its own."""

    status = 502
    type = "upstream_error"
    code = "upstream_error"
    reason: ClassVar[str] = "error"  # label value in metrics, from a closed set


class UpstreamUnreachable(UpstreamError):
    """Refused, no route, no such name, connect timeout: certainly not executed."""

    code = "upstream_unreachable"
    reason = "connect"


class UpstreamLost(UpstreamError):
    """The connection broke after the request was (partly) sent: it may have been executed."""

    code = "upstream_lost"
    reason = "lost"


class UpstreamCut(UpstreamError):
    """The proxy itself ended the exchange: the time that its instance had for draining is over."""

    code = "upstream_drained"
    reason = "drained"


class UpstreamProtocol(UpstreamError):
    """The engine did not speak HTTP/1.1 as it should."""

    code = "upstream_protocol"
    reason = "protocol"


class UpstreamTimeout(UpstreamError):
    """The engine was silent for too long; `phase` says what was awaited."""

    status = 504
    type = "timeout_error"
    code = "upstream_timeout"
    reason = "timeout"

    def __init__(self, message: str, *, phase: str, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.phase = phase


class EngineAnswered(PDProxyError):
    """An engine answered with an error status; its answer is the client's if no retry helps.

    `headers` are the engine's, lower-case names, hop-by-hop ones included.
    """

    code = "engine_error"
    type = "engine_error"

    def __init__(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        super().__init__(f"the engine answered {status}", quote=_words(body))
        self.engine_status = status
        self.headers = tuple(headers)
        self.body = body


def _words(body: bytes) -> str:
    """Return the message in an engine's error answer, or an empty text."""
    try:
        answer = orjson.loads(body)
    except ValueError:
        return ""
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


class RecomputeUnsupported(PDProxyError):
    """A decoder ran out of KV cache and the answer cannot be continued."""

    status = 503
    type = "service_unavailable"
    code = "kv_cache_exhausted"


class Recomputed(RecomputeUnsupported):
    """A decoder gave the answer back; another round may go on with it."""


# --- the operator's fault


class ConfigError(PDProxyError):
    """One or more faults of the configuration; `faults` has a line for each."""

    code = "config_error"

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
