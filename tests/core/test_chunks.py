import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.core import chunks
from pdproxy.core.chunks import ChunkFacts, Usage, is_plain, read_body, read_event
from pdproxy.core.jsonfields import join_object, split_object
from pdproxy.core.sse import DONE, data_of, encode_data, split_block
from pdproxy.errors import UpstreamLost

CAPTURES = Path(__file__).parent / "captures"


def capture(name):
    return (CAPTURES / name).read_bytes()


def event_of(value, **options):
    return encode_data(json.dumps(value, **options).encode())


def chunk(*choices, **fields):
    return {"id": "cmpl-1", "object": "text_completion", "choices": list(choices), **fields}


def payload(event):
    return json.loads(data_of(event))


def is_notable(facts):
    return bool(
        facts.finished
        or facts.recomputed
        or facts.usage is not None
        or facts.error is not None
        or facts.is_done
        or facts.has_internal
    )


# --- is_plain


@pytest.mark.parametrize("path", sorted(CAPTURES.glob("*.sse")), ids=lambda path: path.stem)
def test_real_events_are_plain_exactly_if_they_only_bring_output(path):
    for event in split_block(path.read_bytes()):
        assert is_plain(event) == (not is_notable(read_event(event)))


def test_a_block_is_plain_if_all_its_events_are():
    events = split_block(capture("completions-stream-usage.sse"))
    plain = b"".join(event for event in events if is_plain(event))

    assert is_plain(plain)
    assert is_plain(plain.replace(b"data: ", b"data:"))
    for event in events:
        if not is_plain(event):
            assert not is_plain(plain + event)
            assert not is_plain(event + plain)
            assert not is_plain(plain + event + plain)


@pytest.mark.parametrize(
    "text",
    [
        'an "error" and a "usage":{} and "finish_reason":"stop"',
        "[DONE]",
        "recomputed",
        '\n\ndata: [DONE]\n\n"',
        "\\",
        'tail\\"',
    ],
)
def test_what_text_says_does_not_matter(text):
    event = event_of(chunk({"index": 0, "text": text, "finish_reason": None}))

    assert is_plain(event)
    assert not is_notable(read_event(event))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"choices":[{"finish_reason" : \t"stop"}]}', id="spaces"),
        pytest.param(b'{"choices":[{"finish\\u005freason":"stop"}]}', id="escaped-key"),
        pytest.param(b'{"choices":[{"finish_reason":null,"finish_reason":"stop"}]}', id="twice"),
        pytest.param(b'{"usage":null,"\\u0075sage":{},"choices":[]}', id="escaped-twice"),
        pytest.param(b'{"choices":[{"index":0},{"stop_reason":"recomputed"}]}', id="second-choice"),
        pytest.param(b'{"choices":[{"index":0,\ndata: "finish_reason":"stop"}]}', id="two-lines"),
        pytest.param(b'{"error":"x"}', id="error-text"),
        pytest.param(b'{"kv_transfer_params":{}}', id="handle"),
        pytest.param(b'{"ec_transfer_params":[]}', id="encoder-handle"),
        pytest.param(b" [DONE]", id="done"),
        pytest.param(b"\t[DONE] ", id="done-with-tab"),
    ],
)
def test_unusual_spellings_are_not_plain(data):
    event = b"data:" + data + b"\n\n"

    assert not is_plain(event)
    assert is_notable(read_event(event))


_anything = st.recursive(
    st.sampled_from([None, True, 0, 154829, "", "recomputed", "stop", "[DONE]", 'a"\\', "é🙂"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["error", "usage", "text", "stop_reason"]), inner),
    ),
    max_leaves=4,
)
_rarely_anything = st.one_of(*[st.none()] * 9, _anything)
_choice = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2),
        "text": st.text(max_size=4),
        "delta": _anything,
        "finish_reason": _rarely_anything,
        "stop_reason": _rarely_anything,
        "logprobs": _anything,
    },
)
_chunk = st.fixed_dictionaries(
    {"choices": st.lists(_choice, max_size=2)},
    optional={
        "id": st.text(max_size=4),
        "usage": _rarely_anything,
        "error": _rarely_anything,
        "kv_transfer_params": _rarely_anything,
        "ec_transfer_params": _rarely_anything,
        "prompt_logprobs": _anything,
    },
)


@st.composite
def _json_text(draw):
    value = draw(st.one_of(_chunk, _chunk, _chunk, _anything))
    if isinstance(value, dict):
        value = dict(draw(st.permutations(list(value.items()))))
    space = st.sampled_from(["", " ", "\t", "  "])
    separators = (draw(space) + "," + draw(space), draw(space) + ":" + draw(space))
    indent = draw(st.sampled_from([None, None, 1]))
    ascii_only = draw(st.booleans())
    text = json.dumps(value, separators=separators, indent=indent, ensure_ascii=ascii_only)
    if draw(st.booleans()):
        text = text.replace("_reason", "\\u005freason").replace('"error', '"\\u0065rror')
    return text.encode("utf-8", "replace")


_ODD_EVENTS = [
    DONE,
    b"data\n\n",
    b"event: e\ndata: {}\n\n",
    b'data: {"a":"\n\n',
    b'data: "}\n\n',
    b"data: {}\n}\n\n",
    b'data: {\n"error":1}\n\n',
]
_event = st.one_of(
    _json_text().map(encode_data),
    _json_text().map(encode_data).map(lambda event: event.replace(b"data: ", b"data:")),
    _json_text().map(encode_data),
    st.sampled_from(_ODD_EVENTS),
)


@settings(max_examples=600)
@given(st.lists(_event, min_size=1, max_size=2))
def test_plain_never_hides_anything_notable(events):
    facts = [read_event(event) for event in events]

    if is_plain(b"".join(events)):
        assert not any(is_notable(fact) for fact in facts)


@given(st.binary(max_size=80))
def test_arbitrary_data_is_never_an_error(data):
    event = b"data: " + data.replace(b"\n", b"").replace(b"\r", b"") + b"\n\n"

    assert is_plain(event) in (True, False)
    assert isinstance(read_event(event), ChunkFacts)
    assert chunks.with_cached_tokens(event, 1) is event or b"cached_tokens" in data
    assert chunks.without_internal(event) is event
    assert chunks.without_recomputed(event, {0}) is event


# --- read_event, read_body


def test_facts_of_a_real_chat_stream():
    events = split_block(capture("chat-stream-usage.sse"))
    role, first, *_, last, usage, done = [read_event(event) for event in events]

    assert role == ChunkFacts(indexes=frozenset({0}))
    assert first == ChunkFacts(indexes=frozenset({0}), has_content=True)
    assert last == ChunkFacts(indexes=frozenset({0}), has_content=True, finished={0: "length"})
    assert usage == ChunkFacts(usage=Usage(91, 12, None))
    assert done == ChunkFacts(is_done=True)


def test_facts_of_a_real_completion_stream():
    facts = [read_event(event) for event in split_block(capture("completions-stream-usage.sse"))]

    assert [fact.has_content for fact in facts] == [True] * 10 + [False, True, False, False]
    assert facts[-3].finished == {0: "length"}
    assert facts[-2].usage == Usage(58, 12, None)


def test_facts_of_whole_answers():
    assert read_body(split_object(capture("completions-n2.json"))) == ChunkFacts(
        finished={0: "length", 1: "length"},
        usage=Usage(58, 24, None),
        has_content=True,
        indexes=frozenset({0, 1}),
    )
    prefill = read_body(split_object(capture("chat-prefill.json")))
    assert prefill.has_internal
    assert prefill.usage == Usage(91, 1, None)


def test_both_choices_of_a_real_stream_end():
    ended: dict[int, str] = {}
    for event in split_block(capture("chat-n2-stream.sse")):
        ended |= read_event(event).finished

    assert ended == {0: "length", 1: "length"}


def test_tool_calls_are_content():
    facts = [read_event(event) for event in split_block(capture("chat-tools-required-stream.sse"))]

    assert [fact.has_content for fact in facts] == [False] + [True] * 35 + [False, False]


def test_a_failed_kv_load_is_an_error_event():
    _, error, _ = split_block(capture("chat-failed-kv-load.sse"))

    facts = read_event(error)

    assert facts.error is not None
    assert json.loads(facts.error)["type"] == "InternalServerError"


@pytest.mark.parametrize(
    ("choice", "has_content"),
    [
        ({"text": "x"}, True),
        ({"text": ""}, False),
        ({"delta": {"content": "x"}}, True),
        ({"delta": {"content": ""}}, False),
        ({"delta": {"content": None}}, False),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"reasoning": "x"}}, True),
        ({"delta": {"reasoning_content": "x"}}, True),
        ({"delta": {"tool_calls": []}}, False),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {"refusal": "no"}}, True),
        ({"message": {"content": "x"}}, True),
        ({"delta": "x"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_content_is_generated_output(choice, has_content):
    assert read_event(event_of(chunk(choice))).has_content is has_content


@pytest.mark.case("C05")
@pytest.mark.parametrize("reason", ["error", "abort"])
def test_failed_generations_show_as_they_are(reason):
    answer = chunk({"index": 0, "message": {"role": "assistant"}, "finish_reason": reason})

    expected = {0: reason}

    assert read_event(event_of(answer)).finished == expected
    assert read_body(split_object(json.dumps(answer).encode())).finished == expected
    assert not is_plain(event_of(answer))


@pytest.mark.case("C23")
@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"choices": []}, id="empty"),
        pytest.param({"choices": None}, id="null"),
        pytest.param({}, id="missing"),
        pytest.param({"choices": "x"}, id="text"),
        pytest.param({"choices": {"0": {"finish_reason": "stop"}}}, id="object"),
        pytest.param({"choices": [None, 1, "x", [], True]}, id="not-objects"),
        pytest.param([], id="list"),
        pytest.param(None, id="null-chunk"),
        pytest.param("x", id="text-chunk"),
        pytest.param({"usage": None, "error": None}, id="nulls"),
        pytest.param({"usage": []}, id="usage-list"),
    ],
)
def test_events_without_usable_choices_say_nothing(value):
    assert read_event(event_of(value)) == ChunkFacts()


def test_data_that_is_not_json_says_nothing():
    for data in (b"", b"{", b"hello", b'{"a":"\xff"}', b"[" * 100_000):
        assert read_event(encode_data(data)) == ChunkFacts()


def test_a_stray_nan_does_not_hide_the_end():
    event = b'data: {"choices":[{"index":1,"logprobs":NaN,"finish_reason":"stop"}]}\n\n'

    assert read_event(event).finished == {1: "stop"}


def test_a_choice_without_an_index_has_its_position():
    event = event_of(chunk({"finish_reason": "stop"}, {"index": None, "finish_reason": "length"}))

    assert read_event(event).finished == {0: "stop", 1: "length"}


def test_an_empty_finish_reason_is_none():
    assert read_event(event_of(chunk({"index": 0, "finish_reason": ""}))).finished == {}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({}, Usage(0, 0, None)),
        ({"prompt_tokens": 7, "completion_tokens": None}, Usage(7, 0, None)),
        ({"prompt_tokens": "7", "prompt_tokens_details": None}, Usage(0, 0, None)),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, Usage(0, 0, 0)),
        ({"prompt_tokens_details": {"cached_tokens": None}}, Usage(0, 0, None)),
        ({"prompt_tokens_details": {"cached_tokens": 64}}, Usage(0, 0, 64)),
        ({"prompt_tokens_details": []}, Usage(0, 0, None)),
        ({"prompt_tokens": -7, "completion_tokens": True}, Usage(0, 0, None)),
        ({"prompt_tokens": 10**400, "completion_tokens": 2**53 + 1}, Usage(0, 0, None)),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, Usage(0, 0, None)),
    ],
    ids=str,
)
def test_usage_tells_what_is_known(usage, expected):
    assert read_event(event_of({"usage": usage})).usage == expected


@pytest.mark.case("C29")
def test_each_choice_is_judged_by_itself():
    event = event_of(
        chunk(
            {"index": 1, "text": "x", "finish_reason": "stop", "stop_reason": "recomputed"},
            {"index": 0, "text": "y", "finish_reason": "length", "stop_reason": None},
        )
    )

    facts = read_event(event)

    assert facts.recomputed == {1}
    assert facts.finished == {0: "length"}
    assert facts.indexes == {0, 1}


@pytest.mark.case("C40")
def test_the_clients_own_stop_is_an_ordinary_end():
    event = event_of(chunk({"index": 0, "finish_reason": "stop", "stop_reason": "recomputed"}))

    facts = read_event(event, user_stops=frozenset({"recomputed"}))

    assert facts.recomputed == frozenset()
    assert facts.finished == {0: "stop"}


# --- cached tokens

DETAILS = [
    pytest.param({"cached_tokens": 4608, "audio_tokens": 0}, id="another-figure"),
    pytest.param({"audio_tokens": 0}, id="no-figure"),
    pytest.param({"cached_tokens": None}, id="null-figure"),
    pytest.param(None, id="null-details"),
    pytest.param([], id="odd-details"),
    pytest.param(..., id="no-details"),
]


@pytest.mark.case("C14")
@pytest.mark.parametrize("details", DETAILS)
@pytest.mark.parametrize("figure", [0, 3072])
def test_the_prefillers_figure_replaces_the_decoders(details, figure):
    usage = {"prompt_tokens": 5000, "x": 1.50, "completion_tokens": 7, "total_tokens": 5007}
    if details is not ...:
        usage["prompt_tokens_details"] = details
    answer = {"id": "x", "choices": [], "usage": usage, "other": {"usage": {}}}
    body = json.dumps(answer).encode()

    new_body = chunks.with_cached_tokens(body, figure)
    new_event = chunks.with_cached_tokens(encode_data(body), figure)

    kept = details if isinstance(details, dict) else {}
    expected = {**usage, "prompt_tokens_details": {**kept, "cached_tokens": figure}}
    assert json.loads(new_body) == {**answer, "usage": expected}
    assert list(json.loads(new_body)) == list(answer)
    assert list(json.loads(new_body)["usage"]) == list(expected)
    assert new_event == encode_data(new_body)


@pytest.mark.case("C14")
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(
            b'data:{"usage" : {"prompt_tokens_details":{ "cached_tokens" : 64}} }\n\n', id="equal"
        ),
        pytest.param(b'data: {"usage":null}\n\n', id="null-usage"),
        pytest.param(b'data: {"choices":[]}\n\n', id="no-usage"),
        pytest.param(b'data: {"usage":7}\n\n', id="odd-usage"),
        pytest.param(DONE, id="done"),
        pytest.param(b"data: {\n\n", id="not-json"),
    ],
)
def test_an_event_without_change_is_the_same_object(event):
    assert chunks.with_cached_tokens(event, 64) is event


@pytest.mark.case("C14")
def test_no_usage_is_invented_in_a_body():
    body = b'{ "choices" : [] }'

    assert chunks.with_cached_tokens(body, 64) is body


def test_an_edit_leaves_the_spelling_of_all_other_values():
    event = (
        b'event: chunk\ndata:{"id":"\\u00e9\\/","choices":[ {"logprob":-1.50e-09} ],'
        b'"n":123456789012345678901234567890,'
        b'"usage":{"prompt_tokens":7,"x":1.0E1}}\nid: 4\n\n'
    )

    edited = chunks.with_cached_tokens(event, 0)

    assert edited == (
        b'event: chunk\nid: 4\ndata: {"id":"\\u00e9\\/","choices":[ {"logprob":-1.50e-09} ],'
        b'"n":123456789012345678901234567890,'
        b'"usage":{"prompt_tokens":7,"x":1.0E1,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
    )


@pytest.mark.case("C30")
def test_every_usage_of_a_continuous_stream_gets_the_figure():
    for event in split_block(capture("chat-stream-continuous-usage.sse"))[:-1]:
        before = read_event(event).usage
        after = read_event(chunks.with_cached_tokens(event, 48)).usage

        assert before is not None
        assert after == Usage(before.prompt_tokens, before.completion_tokens, 48)


# --- internal fields


def test_handles_are_stripped_and_nulls_stay():
    body = capture("chat-prefill.json")
    fields = split_object(body)

    stripped = chunks.strip_internal(fields)

    assert list(stripped) == [name for name in fields if name != "kv_transfer_params"]
    assert b'"ec_transfer_params":null' in join_object(stripped)
    assert chunks.without_internal(body) == join_object(stripped)


def test_a_body_without_handles_is_the_same_object():
    body = capture("chat-decode.json")
    fields = split_object(body)

    assert chunks.strip_internal(fields) is fields
    assert chunks.without_internal(body) is body


def test_an_event_loses_its_handle_only():
    event = b'data: {"choices":[ ],"kv_transfer_params":{"a":1},"ec_transfer_params":[]}\n\n'

    assert chunks.without_internal(event) == b'data: {"choices":[ ]}\n\n'


# --- undoing a recomputed end


def recomputed(index, **fields):
    return {
        "index": index,
        **fields,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "recomputed",
        "token_ids": None,
    }


def test_an_end_without_output_vanishes():
    completion = event_of(chunk(recomputed(0, text="")))
    chat = event_of(chunk(recomputed(0, delta={"content": "", "reasoning": None})))
    both = event_of(chunk(recomputed(0, delta={}), recomputed(1, delta={})))

    assert chunks.without_recomputed(completion, {0}) == b""
    assert chunks.without_recomputed(chat, {0}) == b""
    assert chunks.without_recomputed(both, {0, 1}) == b""


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x"},
        {"delta": {"content": "x"}},
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"text": "", "prompt_token_ids": [1]},
    ],
    ids=str,
)
def test_output_of_the_last_event_stays(fields):
    event = event_of(chunk(recomputed(0, **fields)))

    edited = payload(chunks.without_recomputed(event, {0}))

    assert edited == chunk({**recomputed(0, **fields), "finish_reason": None, "stop_reason": None})


@pytest.mark.case("C29")
def test_other_choices_keep_their_end():
    ended = {"index": 1, "text": "", "finish_reason": "length", "stop_reason": None}
    event = event_of(chunk(recomputed(0, text=""), ended))

    choices = payload(chunks.without_recomputed(event, {0}))["choices"]

    assert choices[0]["finish_reason"] is None
    assert choices[0]["stop_reason"] is None
    assert choices[1] == ended


def test_usage_in_the_last_event_stays():
    event = event_of(chunk(recomputed(0, text=""), usage={"prompt_tokens": 7}))

    assert payload(chunks.without_recomputed(event, {0}))["usage"] == {"prompt_tokens": 7}


def test_missing_fields_are_not_added():
    event = event_of(chunk({"index": 0, "text": "x", "stop_reason": "recomputed"}))

    edited = payload(chunks.without_recomputed(event, {0}))

    assert edited["choices"] == [{"index": 0, "text": "x", "stop_reason": None}]


def test_an_event_of_other_choices_is_the_same_object():
    event = event_of(chunk({"index": 1, "text": "x"}))

    assert chunks.without_recomputed(event, {0}) is event
    assert chunks.without_recomputed(DONE, {0}) is DONE


def test_an_event_no_client_could_read_is_dropped_rather_than_shown():
    event = b'data: {"choices":[{"index":0,"text":"x","stop_reason":"recomputed","p":NaN}]}\n\n'

    assert chunks.without_recomputed(event, {0}) == b""


# --- errors


def test_error_events_are_openai_shaped():
    event = chunks.error_event(UpstreamLost("the decoder went away", detail="10.0.0.7:8100"))

    assert event == (
        b'data: {"error":{"message":"the decoder went away","type":"upstream_error",'
        b'"param":null,"code":"upstream_lost"}}\n\n'
    )
    assert read_event(event).error is not None
    assert not is_plain(event)
