"""The engine's answers against recorded answers of a real vLLM: keys, order, types, statuses."""

from dataclasses import replace

import aiohttp
import orjson
import pytest

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.sim.clients import Answer, prefill
from tests.sim.shapes import Capture, load, shape, stream_shapes

LIKE_CAPTURED = SimConfig(
    model="tiny", root="/lab/model", max_model_len=4096, prompt_tokens_details=False, eos_odds=10**9
)
WHOLE = [
    "chat-plain.1-prefill",
    "chat-plain.2-decode",
    "chat-n2.1-prefill",
    "chat-n2.2-decode",
    "chat-logprobs.2-decode",
    "chat-return-token-ids.2-decode",
    "chat-tools-auto.2-decode",
    "chat-json-schema.2-decode",
    "completions-plain.1-prefill",
    "completions-plain.2-decode",
    "completions-n2.2-decode",
    "completions-token-prompt.2-decode",
    "completions-list-prompt.1-prefill",
    "completions-echo.2-decode",
    "beam-search.prefill",
    "ok-no-model-field",
    "ok-unknown-field",
    "responses",
    "responses-pd.1-prefill",
    "anthropic-messages",
    "anthropic-pd.1-prefill",
]
STREAMS = [
    "chat-stream-usage.2-decode",
    "chat-stream-nousage.2-decode",
    "chat-stream-continuous-usage.2-decode",
    "chat-n2-stream.2-decode",
    "chat-logprobs-stream.2-decode",
    "chat-return-token-ids-stream.2-decode",
    "completions-stream-usage.2-decode",
    "completions-logprobs-stream.2-decode",
    "completions-return-token-ids-stream.2-decode",
    "responses-stream",
    "anthropic-pd-stream.2-decode",
]
# Their messages are alike word for word as well.
ERRORS = [
    "error-bad-kv-params-type",
    "error-cache-salt-empty",
    "error-dp-rank-header",
    "error-empty-body",
    "error-malformed-json",
    "error-max-tokens-too-big",
    "error-max-tokens-zero",
    "error-method",
    "error-missing-messages",
    "error-missing-prompt",
    "error-no-content-type",
    "error-stream-options-without-stream",
    "error-temperature-range",
    "error-too-long.decode",
    "error-unknown-model.decode",
    "error-unknown-path",
    "error-wrong-type",
    "chat-stop-min-tokens.1-prefill",
    "completions-min-tokens.1-prefill",
    "chat-render",
    "abort-requests-empty",
]
OPERATIONS = [
    "get-models.decode",
    "get-health.decode",
    "get-version",
    "get-load.decode",
    "get-ping",
    "post-ping",
    "tokenize-chat",
    "tokenize-completion",
    "detokenize",
]


@pytest.fixture
async def prefiller():
    async with in_process(LIKE_CAPTURED) as sim:
        yield sim


@pytest.fixture
async def decoder():
    async with in_process(LIKE_CAPTURED) as sim:
        yield sim


async def replay(session: aiohttp.ClientSession, url: str, capture: Capture, body=None) -> Answer:
    """Send a recorded request; `body` takes the place of the recorded one."""
    sent = capture.sent if body is None else body
    data = None if sent is None else sent.encode() if isinstance(sent, str) else orjson.dumps(sent)
    async with session.request(
        capture.method, url + capture.path, data=data, headers=capture.sent_headers
    ) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, headers, await response.read())


async def with_own_handle(session, prefiller, capture: Capture):
    """The recorded body, with a handle of our prefiller in place of the recorded one."""
    body = capture.sent
    if (body.get("kv_transfer_params") or {}).get("do_remote_prefill") is not True:
        return body
    handle = await prefill(session, prefiller, capture.path, body)
    return body | {"kv_transfer_params": handle}


def check_head(answer: Answer, capture: Capture) -> None:
    assert answer.status == capture.status
    for name, value in capture.headers.items():
        assert answer.headers.get(name) == value, name


@pytest.mark.parametrize("name", WHOLE)
async def test_whole_answers_have_the_recorded_fields(session, prefiller, decoder, name):
    capture = load(name)
    body = await with_own_handle(session, prefiller, capture)

    answer = await replay(session, decoder.url, capture, body)

    check_head(answer, capture)
    got, wanted = answer.json, capture.json
    if name == "chat-json-schema.2-decode":
        # The real, random model never closes its document.
        got["choices"][0]["finish_reason"] = "length"
    assert shape(got) == shape(wanted)


@pytest.mark.parametrize("name", STREAMS)
async def test_streams_have_the_recorded_events(session, prefiller, decoder, name):
    capture = load(name)
    body = await with_own_handle(session, prefiller, capture)

    answer = await replay(session, decoder.url, capture, body)

    check_head(answer, capture)
    assert stream_shapes(answer.raw) == stream_shapes(capture.body)


@pytest.mark.parametrize("name", ERRORS)
async def test_errors_are_the_recorded_ones(session, decoder, name):
    capture = load(name)

    answer = await replay(session, decoder.url, capture)

    check_head(answer, capture)
    assert answer.json == capture.json
    assert shape(answer.json) == shape(capture.json)


@pytest.mark.parametrize("name", OPERATIONS)
async def test_other_paths_answer_as_recorded(session, decoder, name):
    capture = load(name)

    answer = await replay(session, decoder.url, capture)

    check_head(answer, capture)
    if capture.body:
        assert shape(answer.json) == shape(capture.json)
    else:
        assert answer.raw == b""


@pytest.mark.parametrize("name", ["ok-load-metrics-json", "ok-load-metrics-text"])
async def test_load_report_comes_in_a_header_when_asked_for(session, decoder, name):
    capture = load(name)

    answer = await replay(session, decoder.url, capture)

    check_head(answer, capture)


async def test_streamed_tool_calls_have_the_recorded_events(session, prefiller, decoder):
    capture = load("chat-tools-required-stream.2-decode")
    body = await with_own_handle(session, prefiller, capture)

    answer = await replay(session, decoder.url, capture, body | {"max_tokens": 30})

    check_head(answer, capture)
    assert stream_shapes(answer.raw) == stream_shapes(capture.body)


async def test_a_tool_call_cut_off_stays_raw_text_when_not_streamed(session, prefiller, decoder):
    capture = load("chat-tools-named.2-decode")
    body = await with_own_handle(session, prefiller, capture)

    answer = await replay(session, decoder.url, capture, body | {"max_tokens": 30})

    assert shape(answer.json) == shape(capture.json)
    assert answer.text.startswith('<tool_call>\n{"name": "get_weather", "arguments": {')


async def test_dead_prefiller_gives_role_then_error_then_done(session, decoder):
    capture = load("dead-prefiller-unknown-chat-stream.fail-policy")
    body = capture.sent | {
        "kv_transfer_params": capture.sent["kv_transfer_params"]
        | {
            # A 91-token prompt takes three blocks there and more here.
            "remote_block_ids": [list(range(50))],
            "remote_port": 1,
        }
    }

    answer = await replay(session, decoder.url, capture, body)

    check_head(answer, capture)
    assert stream_shapes(answer.raw) == stream_shapes(capture.body)
    event = b'data: {"error": {"message": "Internal server error", "type"'
    assert event in answer.raw


async def test_request_id_header_and_answer_id_follow_the_request(session):
    capture = load("request-id-headers-enabled")
    async with in_process(SimConfig(model="tiny", request_id_headers=True)) as sim:
        answer = await replay(session, sim.url, capture)

    assert answer.headers["x-request-id"] == "my-id-1"
    assert answer.json["id"] == capture.json["id"] == "cmpl-my-id-1"


async def test_cached_tokens_are_reported_and_travel_with_the_handle(session):
    capture = load("chat-plain.2-decode")
    config = SimConfig(model="tiny")
    async with in_process(config) as prefiller, in_process(config) as decoder:
        await with_own_handle(session, prefiller, capture)
        body = await with_own_handle(session, prefiller, capture)
        cached = body["kv_transfer_params"]["remote_prefill_cached_tokens"]

        answer = await replay(session, decoder.url, capture, body)

    assert cached > 0
    assert cached % config.block_size == 0
    assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


@pytest.mark.parametrize(
    "name",
    [
        "scaleout-generate",
        "scaleout-generate-prefill",
        "scaleout-chat-render",
        "scaleout-completions-render",
    ],
)
async def test_scale_out_answers_have_the_recorded_fields(session, name):
    capture = load(name)
    async with in_process(replace(LIKE_CAPTURED, scale_out=True)) as sim:
        answer = await replay(session, sim.url, capture)

    check_head(answer, capture)
    assert shape(answer.json) == shape(capture.json)
