"""Logs: text for people or one JSON object a line; one access line per request.

Rule: nothing that a client sent but its request id, its address and the model's name, and no key.
"""

from __future__ import annotations

import logging
import re
import sys

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pdproxy.core.jsonfields import encode
from pdproxy.dispatch.account import Account, Outcome

ACCESS = logging.getLogger("pdproxy.access")
TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
MAX_MODEL_CHARACTERS = 64
# Most values: ASCII that is visible, without quotes and "=".
_BARE = re.compile(r"[!#-<>-~]+").fullmatch


def setup_logging(level: str, log_format: str, worker: int | None = None) -> None:
    """Send the program's log to standard error; each line of one of several workers names it."""
    handler = logging.StreamHandler(sys.stderr)
    shown = TEXT_FORMAT if worker is None else TEXT_FORMAT.replace("%(name)", f"w{worker} %(name)")
    text = logging.Formatter(shown)
    handler.setFormatter(JSONFormatter(worker) if log_format == "json" else text)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Asked for each record, and shown by neither format.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # What libraries say below a warning is about their insides.
    for library in ("aiohttp", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(CLIENT_FAULTS)


class _ClientFaults(logging.Filter):
    """Shortens what the library says of requests that are no HTTP to one line.

    Its traceback is no fault of this program, and quotes the request: keys, prompts.
    """

    def filter(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, record: logging.LogRecord
    ) -> bool:
        """Let every record pass."""
        fault = record.exc_info[1] if record.exc_info else None
        if isinstance(fault, HttpProcessingError | RequestPayloadError):
            record.msg, record.args = "%s: %s", (record.getMessage(), type(fault).__name__)
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True


CLIENT_FAULTS = _ClientFaults()


class JSONFormatter(logging.Formatter):
    """One JSON object a line; the fields of the access line stand beside its message."""

    def __init__(self, worker: int | None = None) -> None:
        """Make a formatter; each line of one of several workers names it."""
        super().__init__()
        self._worker = worker

    def format(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, record: logging.LogRecord
    ) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._worker is not None:
            line["worker"] = self._worker
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return encode(line).decode()


def log_access(account: Account) -> None:
    """Write the access line of a request that has ended."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    fields = access_fields(account)
    text = " ".join([f"{name}={_shown(value)}" for name, value in fields.items()])
    # Made here, since the logger would look for the calling line, which costs as much again.
    record = ACCESS.makeRecord(
        ACCESS.name, logging.INFO, __file__, 0, text, (), None, extra={"fields": fields}
    )
    ACCESS.handle(record)


def access_fields(account: Account) -> dict[str, object]:
    """Return what the access line says; what is not known is left out."""
    timeline = account.timeline
    tpot_s = None
    if account.is_stream and account.output_tokens is not None:
        tpot_s = timeline.tpot_s(account.output_tokens)
    fields: dict[str, object | None] = {
        "request_id": account.request_id,
        "client": account.client,
        "endpoint": account.endpoint,
        "model": account.model[:MAX_MODEL_CHARACTERS] or None,
        "stream": account.is_stream or None,
        "status": account.status,
        "outcome": account.outcome.value,
        "prefiller": account.prefiller or None,
        "decoder": account.decoder or None,
        "prefiller_reason": account.prefiller_reason,
        "decoder_reason": account.decoder_reason,
        "prefill_attempts": _if_many(account.prefill_attempts),
        "decode_attempts": _if_many(account.decode_attempts),
        "rounds": _if_many(account.rounds),
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": account.output_tokens,
        "finish": ",".join(sorted(set(account.finish_reasons))) or None,
        "queue_s": _rounded(timeline.queue_s),
        "ttft_s": _rounded(timeline.ttft_s if account.is_stream else None),
        "tpot_s": _rounded(tpot_s),
        "total_s": _rounded(timeline.total_s),
        "why": account.why or None if account.outcome is not Outcome.SUCCESS else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _if_many(count: int) -> int | None:
    return count if count > 1 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _shown(value: object) -> str:
    """Quote what holds spaces or control characters, so that the line splits at spaces."""
    if not isinstance(value, str):
        return str(value)
    text = str(value)
    if _BARE(text):
        return text
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    quoted = encode(text).decode()
    return "".join(c if c.isprintable() else _escaped(c) for c in quoted)


def _escaped(character: str) -> str:
    """Return a character as JSON escapes, such as a line separator that JSON lets stand."""
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
