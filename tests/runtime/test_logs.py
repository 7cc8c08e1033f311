"""The log's two formats, and how its lines reach standard error."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import datetime

import pytest
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_protocol import RequestPayloadError

from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account
from pdproxy.runtime.access_line import AccessLines
from pdproxy.runtime.logs import (
    CLIENT_FAULTS,
    TEXT_FORMAT,
    WRITE_CHARACTERS,
    JSONFormatter,
    LineHandler,
    TextFormatter,
    setup_logging,
)


def record(message: str, *args: object, **more) -> logging.LogRecord:
    return logging.LogRecord("pdproxy.x", logging.ERROR, __file__, 1, message, args, None, **more)


def test_json_line_holds_a_traceback_in_one_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = record("it failed: %s", "so\nit did")
        made.exc_info = sys.exc_info()

    line = JSONFormatter().format(made)

    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed: so\nit did"
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_json_line_has_its_time_in_milliseconds():
    made = record("it failed")
    made.created = 1_700_000_000.0625

    shown = json.loads(JSONFormatter().format(made))["time"]

    assert shown.partition(".")[2].startswith("062")
    assert datetime.fromisoformat(shown).timestamp() == 1_700_000_000.062


def test_json_line_holds_lone_surrogates():
    assert json.loads(JSONFormatter().format(record("a\ud800")))["message"] == "a\ud800"


class Pieces(io.StringIO):
    """Remembers what was written in one piece."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):  # type: ignore[explicit-override] # typing has it from 3.12
        self.pieces.append(text)
        return len(text)


@pytest.mark.parametrize("id_characters", [1, 100, WRITE_CHARACTERS])
@pytest.mark.parametrize("formatter", [JSONFormatter, TextFormatter])
def test_access_lines_are_written_many_at_once_and_each_in_one_piece(formatter, id_characters):
    accounts = [Account("x" * id_characters, "/v1", "c", Timeline(0.0)) for _ in range(50)]
    made = record("")
    made.msg = AccessLines(accounts, 0.0)
    handler = LineHandler(stream := Pieces())
    handler.setFormatter(formatter())

    handler.emit(made)

    assert "".join(stream.pieces) == handler.format(made) + "\n"
    assert all(piece.endswith("\n") for piece in stream.pieces)
    for piece in stream.pieces:
        assert len(piece) <= WRITE_CHARACTERS or piece.count("\n") == 1
    if id_characters < WRITE_CHARACTERS:
        assert len(stream.pieces) < 20


def test_stream_that_takes_nothing_ends_no_request(capsys):
    made = record("")
    made.msg = AccessLines([Account("x", "/v1", "c", Timeline(0.0))], 0.0)
    handler = LineHandler(closed := io.StringIO())
    closed.close()

    handler.emit(made)

    assert "Logging error" in capsys.readouterr().err


@pytest.mark.parametrize(("log_format", "kind"), [("json", JSONFormatter), ("text", TextFormatter)])
def test_log_goes_to_standard_error_in_the_chosen_format(log_format, kind):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    library_level = logging.getLogger("aiohttp").level
    try:
        setup_logging("DEBUG", log_format)
        (handler,) = root.handlers

        assert isinstance(handler, logging.StreamHandler)
        assert handler.stream is sys.stderr
        assert type(handler.formatter) is kind
        assert logging.getLogger("aiohttp").level == logging.WARNING
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("aiohttp").setLevel(library_level)
        logging.getLogger("asyncio").setLevel(logging.NOTSET)


def library_record(fault: Exception) -> logging.LogRecord:
    """Return what the library logs when it fails to handle a request."""
    trace = (type(fault), fault, None)
    text = "Error handling request from %s"
    return logging.LogRecord("aiohttp.server", logging.ERROR, "f", 1, text, ("10.0.0.1",), trace)


@pytest.mark.parametrize(
    "fault",
    [BadHttpMessage("X-Key: secret\x01"), RequestPayloadError("secret")],
    ids=["head", "body"],
)
def test_request_that_is_no_http_is_one_line_that_quotes_nothing_of_it(fault):
    record = library_record(fault)

    assert CLIENT_FAULTS.filter(record)

    line = logging.Formatter(TEXT_FORMAT).format(record)
    assert line.endswith(
        f"WARNING aiohttp.server: Error handling request from 10.0.0.1: {type(fault).__name__}"
    )
    assert "secret" not in line


def test_bug_in_a_handler_keeps_its_traceback():
    record = library_record(ValueError("a bug"))

    assert CLIENT_FAULTS.filter(record)

    assert "ValueError: a bug" in logging.Formatter(TEXT_FORMAT).format(record)


def test_the_librarys_server_log_is_filtered():
    root, server = logging.getLogger(), logging.getLogger("aiohttp.server")
    before, level = root.handlers[:], root.level
    try:
        setup_logging("INFO", "text")

        assert CLIENT_FAULTS in server.filters
    finally:
        server.removeFilter(CLIENT_FAULTS)
        root.handlers[:] = before
        root.setLevel(level)
        for library in ("aiohttp", "asyncio"):
            logging.getLogger(library).setLevel(logging.NOTSET)
