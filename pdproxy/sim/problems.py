"""Failures as vLLM reports them: a status and a body `{"error": {...}}` or `{"detail": ...}`.

Source: vLLM 0.32, recorded error answers of a real engine.
"""

import orjson

_BAD_REQUEST, _NOT_FOUND, _FORBIDDEN, _UNAUTHORIZED = 400, 404, 403, 401
_SERVER_ERROR, _UNAVAILABLE = 500, 503


class Problem(Exception):
    """A request that ends in an error answer.

    Attributes:
        status: HTTP status, which is also the body's `code`.
        kind: The body's `type`.
    """

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def to_json(self) -> bytes:
        """The error body: `{"error":{"message":"..","type":"..","param":null,"code":400}}`."""
        return orjson.dumps({"error": self._fields()})

    def to_event(self) -> bytes:
        """The same as an SSE event; here vLLM writes a space after `:` and `,`."""
        fields = ", ".join(
            f'"{name}": {orjson.dumps(value).decode()}' for name, value in self._fields().items()
        )
        return f'data: {{"error": {{{fields}}}}}\n\n'.encode()

    def _fields(self) -> dict[str, object]:
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }


def bad_request(message: str, param: str | None = None, value: object = None) -> Problem:
    """A well-formed request that asks for something impossible."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return Problem(_BAD_REQUEST, message, "BadRequestError", param)


def malformed(
    kind: str, where: str, message: str, shown: str, context: str | None = None
) -> Problem:
    """A body that does not fit the schema.

    Args:
        kind: Such as `missing` or `int_parsing`.
        where: Such as `body.max_tokens`.
        message: What is wrong.
        shown: The wrong input, or a short description of it.
        context: What the parser said.
    """
    line = f"'type': '{kind}', 'loc': '{where}', 'msg': '{message}', 'input': '{shown}'"
    if context is not None:
        line += f", 'ctx': {{'error': '{context}'}}"
    return Problem(_BAD_REQUEST, f"1 validation error:\n  {{{line}}}", "Bad Request", where)


def unsupported_media() -> Problem:
    """A body that is not declared as JSON; vLLM answers 400, not 415."""
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return Problem(_BAD_REQUEST, message, "Bad Request")


def unknown_model(name: str, served: str) -> Problem:
    """The request names a model that this engine does not serve."""
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return Problem(_NOT_FOUND, message, "NotFoundError", "model")


def scale_out_disabled() -> Problem:
    """An endpoint that exists only with `scale_out`."""
    message = (
        "Scale-out endpoints are disabled. "
        "Restart vllm serve with --enable-scale-out to enable them."
    )
    return Problem(_FORBIDDEN, message, "PermissionDeniedError")


def unauthorized() -> Problem:
    """No or a wrong bearer token."""
    return Problem(_UNAUTHORIZED, "Unauthorized", "Unauthorized")


def load_failed() -> Problem:
    """The KV blocks could not be pulled and the policy is to fail."""
    return Problem(_SERVER_ERROR, "Internal server error", "InternalServerError")


def engine_dead() -> Problem:
    """The engine core has crashed."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return Problem(_SERVER_ERROR, message, "InternalServerError")


def queue_full(limit: int) -> Problem:
    """More requests wait than the engine admits."""
    message = f"The engine already has {limit} waiting requests. Please try again later."
    return Problem(_UNAVAILABLE, message, "ServiceUnavailableError")


def injected(status: int) -> Problem:
    """A failure that a test asked for."""
    kinds = {429: "RateLimitError", _UNAVAILABLE: "ServiceUnavailableError"}
    return Problem(status, "Injected failure.", kinds.get(status, "InternalServerError"))
