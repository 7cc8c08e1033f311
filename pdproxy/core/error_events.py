"""An engine's error event, read as the answer it stands for."""

from __future__ import annotations

from pdproxy.core.jsonfields import JsonFields, Raw, decode, join_object
from pdproxy.errors import EngineAnswered

MIN_ERROR_STATUS = 400
MAX_ERROR_STATUS = 599
DEFAULT_ERROR_STATUS = 502


def refuse_error(fields: JsonFields) -> None:
    """Raise if a whole answer with status 200 is an error and nothing else.

    Raises:
        EngineAnswered: what it stands for.
    """
    error = fields.get("error")
    if "choices" not in fields and error is not None and decode(error) is not None:
        raise engine_error(error)


def engine_error(error: bytes) -> EngineAnswered:
    """Return an error event that came before any output as the answer it stands for.

    `error` is the raw value of the event's `error`, such as
    `{"message": "...", "type": "InternalServerError", "param": null, "code": 500}`.
    """
    plain = decode(error)
    code = plain.get("code") if isinstance(plain, dict) else None
    is_status = isinstance(code, int) and MIN_ERROR_STATUS <= code <= MAX_ERROR_STATUS
    status = code if isinstance(code, int) and is_status else DEFAULT_ERROR_STATUS
    headers = [("content-type", "application/json")]
    return EngineAnswered(status, headers, join_object({"error": Raw(error)}))
