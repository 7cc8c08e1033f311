"""What the access line says, in one piece whatever a client sends."""

from __future__ import annotations

import json
import logging
import re

import pytest

from pdproxy.core.policy import Reason
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.access_line import (
    MAX_MODEL_CHARACTERS,
    access_fields,
    access_text,
    log_access,
)
from pdproxy.runtime.logs import JSONFormatter, TextFormatter

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
        log_access([logged], 11.5)
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
    assert split(text) == {name: as_text(value) for name, value in expected.items()}
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

    log_access([account()], 11.5)

    assert not caplog.records


@pytest.fixture
def record(caplog):
    """Log three requests together; return the record of their lines."""
    caplog.set_level(logging.INFO, logger="pdproxy.access")
    log_access([account(request_id=f"r-{number}") for number in range(3)], 12.25)
    (made,) = caplog.records
    made.created = 1_700_000_000.5
    return made


def test_lines_logged_together_are_those_of_each(record):
    texts = record.getMessage().splitlines()

    assert [split(text)["request_id"] for text in texts] == ["r-0", "r-1", "r-2"]
    assert len({text.replace(f"r-{number}", "") for number, text in enumerate(texts)}) == 1


@pytest.mark.parametrize("worker", [None, 3])
def test_text_lines_look_as_any_other_with_the_time_at_which_the_request_ended(record, worker):
    lines = TextFormatter(worker).format(record).splitlines()

    single = logging.LogRecord("pdproxy.access", logging.INFO, "f", 1, "%s", ("text",), None)
    single.created, single.msecs = 1_699_999_999.75, 750.0  # they ended 0.75 s before
    for line, text in zip(lines, record.getMessage().splitlines(), strict=True):
        assert line == TextFormatter(worker).format(single).replace("text", text)


def test_json_lines_are_an_object_each_with_the_time_at_which_the_request_ended(record):
    lines = [json.loads(line) for line in JSONFormatter(3).format(record).splitlines()]

    single = logging.LogRecord("pdproxy.access", logging.INFO, "f", 1, "text", (), None)
    single.created = 1_699_999_999.75
    expected = json.loads(JSONFormatter(3).format(single))
    for line, text in zip(lines, record.getMessage().splitlines(), strict=True):
        assert {**line, "message": "text"} == {**line, **expected}
        assert line["message"] == text
        assert list(line)[:5] == ["time", "level", "logger", "message", "worker"]


FAILED = {"outcome": Outcome.ENGINE_ERROR, "status": 502, "why": "it is gone"}


def as_text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="streamed"),
        pytest.param({"is_stream": False}, id="whole"),
        pytest.param({"rounds": 3, "prefill_attempts": 2, "decode_attempts": 4}, id="rounds"),
        pytest.param({"rounds": 3, "cuts": ["D:1/lost", "[::1]:2/drained"]}, id="cuts"),
        pytest.param({**FAILED, "finish_reasons": [], "output_tokens": None}, id="failed"),
        pytest.param({"finish_reasons": ["stop"], "output_tokens": 0, "model": ""}, id="empty"),
        pytest.param({"timeline": Timeline(0.0), "prefiller": ""}, id="early"),
    ],
)
def test_text_says_what_the_fields_say(fields):
    made = account(**fields)

    shown = {name: value.strip('"') for name, value in split(access_text(made)).items()}

    assert shown == {name: as_text(value) for name, value in access_fields(made).items()}
    assert list(shown) == list(access_fields(made))
