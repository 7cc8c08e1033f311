"""The access line and the log's two formats."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_protocol import RequestPayloadError

from pdproxy.core.policy import Reason
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.logs import (
    CLIENT_FAULTS,
    MAX_MODEL_CHARACTERS,
    TEXT_FORMAT,
    JSONFormatter,
    access_fields,
    log_access,
    setup_logging,
)

# A name, "=", and a value that is quoted or holds no space.
FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^ "]+)(?: |$)')


def account(**fields) -> Account:
    timeline = Timeline(9.0)
    timeline.mark_received(10.0)
    timeline.mark_prefill_started(10.125)
    timeline.mark_content(10.25)
    timeline.mark_content(11.25)
    timeline.mark_finished(11.5)
    given = {
        "request_id": "r-1",
        "endpoint": "/v1/completions",
        "client": "10.0.0.1",
        "timeline": timeline,
        "model": "llama",
        "is_stream": True,
        "prefiller": "p:1",
        "decoder": "d:1",
        "prefiller_reason": Reason.POLICY,
        "decoder_reason": Reason.OTHERS_FAILED,
        "prefill_attempts": 1,
        "decode_attempts": 2,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 5,
        "finish_reasons": ["stop", "length", "stop"],
        "status": 200,
    }
    return Account(**{**given, **fields})


@pytest.fixture
def lines(caplog):
    """Log an account and return the access line as text and as JSON."""
    caplog.set_level(logging.INFO, logger="pdproxy.access")

    def write(logged: Account) -> tuple[str, dict[str, object]]:
        caplog.clear()
        log_access(logged)
        (record,) = caplog.records
        return record.getMessage(), json.loads(JSONFormatter().format(record))

    return write


def split(line: str) -> dict[str, str]:
    found = FIELD.findall(line)
    assert sum(len(name) + len(value) + 2 for name, value in found) == len(line) + 1, line
    return dict(found)


def test_access_line_says_what_happened(lines):
    text, as_json = lines(account())

    expected = {
        "request_id": "r-1",
        "client": "10.0.0.1",
        "endpoint": "/v1/completions",
        "model": "llama",
        "stream": True,
        "status": 200,
        "outcome": "success",
        "prefiller": "p:1",
        "decoder": "d:1",
        "prefiller_reason": "policy",
        "decoder_reason": "others_failed",
        "decode_attempts": 2,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 5,
        "finish": "length,stop",
        "queue_s": 0.125,
        "ttft_s": 0.25,
        "tpot_s": 0.25,
        "total_s": 1.5,
    }
    assert {name: as_json[name] for name in expected} == expected
    assert split(text) == {name: str(value) for name, value in expected.items()}
    assert as_json["level"] == "INFO"
    assert as_json["logger"] == "pdproxy.access"
    assert as_json["message"] == text


def test_unknown_things_are_left_out():
    bare = Account("r", "passthrough", "", Timeline(0.0))

    assert access_fields(bare).keys() == {"request_id", "client", "endpoint", "status", "outcome"}


def test_reason_stands_in_the_line_of_a_failure_only():
    failed = account()
    failed.fail(Outcome.ENGINE_ERROR, "the engine closed the connection")

    assert access_fields(failed)["why"] == "the engine closed the connection"
    assert "why" not in access_fields(account(why="x"))


@pytest.mark.case("C90")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("my model", id="space"),
        pytest.param('say "hi"', id="quote"),
        pytest.param("a=b", id="equals"),
        pytest.param("a\nb\r\x1b[31m", id="control"),
        pytest.param("\u00e9\u4e2d", id="letters"),
        pytest.param("\u2028\u202e", id="invisible"),
        pytest.param("a\ud800", id="lone-surrogate"),
        pytest.param("x" * 10_000, id="long"),
    ],
)
def test_any_model_name_keeps_the_line_in_one_piece(lines, model):
    text, as_json = lines(account(model=model))

    assert text.isprintable()
    shown = split(text)["model"]
    value = json.loads(shown) if shown.startswith('"') else shown
    assert value == as_json["model"] == model[:MAX_MODEL_CHARACTERS]
    text.encode("utf-8", "surrogateescape")


def test_nothing_is_formatted_below_the_level(caplog):
    caplog.set_level(logging.WARNING, logger="pdproxy.access")

    log_access(account())

    assert not caplog.records


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


def test_json_line_holds_lone_surrogates():
    assert json.loads(JSONFormatter().format(record("a\ud800")))["message"] == "a\ud800"


@pytest.mark.parametrize(("log_format", "kind"), [("json", JSONFormatter), ("text", None)])
def test_log_goes_to_standard_error_in_the_chosen_format(log_format, kind):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    library_level = logging.getLogger("aiohttp").level
    try:
        setup_logging("DEBUG", log_format)
        (handler,) = root.handlers

        assert isinstance(handler, logging.StreamHandler)
        assert handler.stream is sys.stderr
        assert type(handler.formatter) is (kind or logging.Formatter)
        assert kind or handler.formatter._fmt == TEXT_FORMAT
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
