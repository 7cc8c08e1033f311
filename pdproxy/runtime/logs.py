"""Logs: text for people or one JSON object a line, of access lines several in one write."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pdproxy.core.jsonfields import encode
from pdproxy.runtime.access_line import ACCESS, AccessLines, access_fields, access_text

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# A pipe takes 4096 bytes in one piece, also between what other workers write. Few are not ASCII.
WRITE_CHARACTERS = 3800
# A place for the milliseconds is left in both.
TEXT_TIME, JSON_TIME = "%Y-%m-%d %H:%M:%S,%%03d", "%Y-%m-%dT%H:%M:%S.%%03d%z"


def setup_logging(level: str, log_format: str, worker: int | None = None) -> None:
    """Send the program's log to standard error; each line of one of several workers names it."""
    handler = LineHandler(sys.stderr)
    made = JSONFormatter(worker) if log_format == "json" else TextFormatter(worker)
    handler.setFormatter(made)
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


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes many access lines at once, but none in two pieces."""

    def emit(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, record: logging.LogRecord
    ) -> None:
        """Write a record."""
        if not isinstance(record.msg, AccessLines):
            super().emit(record)
            return
        try:
            left = self.format(record) + self.terminator
            while left:
                end = len(left)
                if end > WRITE_CHARACTERS:
                    end = left.rfind("\n", 0, WRITE_CHARACTERS) + 1 or left.index("\n") + 1
                self.stream.write(left[:end])
                self.flush()
                left = left[end:]
        except Exception:  # noqa: BLE001 - as the library does: a log must not end a request
            self.handleError(record)


class _Times:
    """Shows times with milliseconds; makes the rest of the text once a second."""

    def __init__(self, time_format: str) -> None:
        self._format = time_format
        self._second = -1
        self._shown = ""

    def shown(self, at_s: float) -> str:
        second = int(at_s)
        if second != self._second:
            self._second = second
            self._shown = time.strftime(self._format, time.localtime(second))
        return self._shown % (at_s % 1 * 1000)


class TextFormatter(logging.Formatter):
    """Lines for people."""

    def __init__(self, worker: int | None = None) -> None:
        """Make a formatter; each line of one of several workers names it."""
        name = "%(name)s" if worker is None else f"w{worker} %(name)s"
        shown = TEXT_FORMAT.replace("%(name)s", name)
        super().__init__(shown)
        parts = {"levelname": "INFO", "name": ACCESS.name, "message": "%s"}
        self._access = shown % {"asctime": "%s", **parts}
        self._times = _Times(TEXT_TIME)

    def format(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, record: logging.LogRecord
    ) -> str:
        """Return the line, or the lines of several requests."""
        lines: object = record.msg
        if not isinstance(lines, AccessLines):
            return super().format(record)
        line, shown = self._access, self._times.shown
        return "\n".join(
            [
                line % (shown(at_s), access_text(account))
                for at_s, account in lines.each(record.created)
            ]
        )


class JSONFormatter(logging.Formatter):
    """One JSON object a line; the fields of the access line stand beside its message."""

    def __init__(self, worker: int | None = None) -> None:
        """Make a formatter; each line of one of several workers names it."""
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}
        self._times = _Times(JSON_TIME)

    def format(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, record: logging.LogRecord
    ) -> str:
        """Return the line, or the lines of several requests."""
        lines: object = record.msg
        if isinstance(lines, AccessLines):
            each = lines.each(record.created)
            return "\n".join(
                [self._line(record, at_s, access_text(a), access_fields(a)) for at_s, a in each]
            )
        more = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return self._line(record, record.created, record.getMessage(), more)

    def _line(
        self, record: logging.LogRecord, at_s: float, message: str, more: Mapping[str, object]
    ) -> str:
        line = {
            "time": self._times.shown(at_s),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        return encode({**line, **self._worker, **more}).decode()
