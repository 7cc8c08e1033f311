import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.api import (
    INTERNAL_FIELDS,
    MAX_CHOICES,
    Api,
    GenerateRequest,
    parse_generate,
    parse_object,
    without_internal,
)
from pdproxy.core.jsonfields import Raw, join_object
from pdproxy.errors import InvalidRequest
from tests.properties import UNHURRIED

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
READ_FIELDS = (
    "model",
    "prompt",
    "messages",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "echo",
    "logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "top_logprobs",
    "stop",
    "tools",
    "vllm_xargs",
)
PARTS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("type", "text", "image_url", "role", "content"), JSON)
)

BODIES = st.dictionaries(st.sampled_from(READ_FIELDS) | st.text(max_size=8), JSON, max_size=8)


def parse(api: Api, body: object) -> GenerateRequest:
    return parse_generate(api, body if isinstance(body, bytes) else json.dumps(body).encode())


def completion(**fields):
    return parse(Api.COMPLETIONS, {"model": "m", "prompt": "hi", **fields})


def chat(**fields):
    return parse(Api.CHAT, {"model": "m", "messages": [], **fields})


# --- leniency: engines judge, not the proxy


@UNHURRIED
@given(api=st.sampled_from(Api), body=BODIES)
def test_any_object_is_read(api, body):
    try:
        encoded = json.dumps(body, allow_nan=False).encode()
    except ValueError:  # NaN and the infinities are no JSON
        encoded = b"{}"

    request = parse_generate(api, encoded)

    assert 1 <= request.choices <= MAX_CHOICES
    assert request.text_bytes >= 0
    assert request.media_tokens >= 0
    assert json.loads(join_object(request.fields)).keys() <= json.loads(encoded).keys()


@UNHURRIED
@given(parts=st.lists(PARTS | JSON, max_size=4))
def test_any_content_parts_are_measured(parts):
    parts = [*parts, {"type": "image_url"}]
    try:
        encoded = json.dumps({"messages": [{"content": parts}]}, allow_nan=False).encode()
    except ValueError:
        return

    assert parse_generate(Api.CHAT, encoded).media_tokens > 0


@pytest.mark.case("C04")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'"hi"', id="string"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"a": "\xff"}', id="not-utf-8"),
        pytest.param(b'{"a": 1} x', id="rest"),
        pytest.param(b'{"a": NaN}', id="nan"),
        pytest.param(b'{"a":' * 100_000, id="deep"),
    ],
)
def test_no_object_is_an_invalid_request(body):
    with pytest.raises(InvalidRequest):
        parse_object(body)


@pytest.mark.case("C04")
def test_byte_order_mark_is_no_part_of_the_body():
    assert parse(Api.CHAT, b'\xef\xbb\xbf{"model": "m"}').model == "m"


def test_deeply_nested_parts_are_measured():
    parts = b"[" * 600 + b"]" * 600
    body = b'{"messages": [{"content": [{"type": "image_url"}, %b, "abc"]}]}' % parts

    assert parse(Api.CHAT, body).text_bytes == 3


# --- what it says


def test_values_nobody_edits_keep_their_spelling():
    body = b'{"seed":9223372036854775807,"top_p":1e-9,"x":1.50,"y":"\\u00e9","z":{"b" : 1}}'

    request = parse(Api.CHAT, body)

    assert join_object(request.fields) == body


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param('"llama"', "llama", id="text"),
        pytest.param("null", "", id="null"),
        pytest.param("7", "", id="number"),
        pytest.param('{"a": 1}', "", id="object"),
        pytest.param('"\\ud83d\\ude00"', "\N{GRINNING FACE}", id="surrogate-pair"),
        # It goes into logs and metrics, which are UTF-8.
        pytest.param('"a\\ud800b"', "a?b", id="lone-surrogate"),
    ],
)
def test_model_is_text_that_can_be_written_anywhere(model, expected):
    assert parse(Api.CHAT, b'{"model": %b}' % model.encode()).model == expected


@pytest.mark.parametrize(
    ("n", "choices"),
    [
        pytest.param("3", 3, id="three"),
        pytest.param("0", 1, id="zero"),
        pytest.param("-2", 1, id="negative"),
        pytest.param("null", 1, id="null"),
        pytest.param('"2"', 1, id="text"),
        pytest.param("true", 1, id="boolean"),
        pytest.param("1" + "0" * 30, MAX_CHOICES, id="huge"),
        pytest.param("9" * 5000, 1, id="too-long-to-convert"),
    ],
)
def test_choices_are_bounded(n, choices):
    assert parse(Api.COMPLETIONS, b'{"prompt": "x", "n": %b}' % n.encode()).choices == choices


@pytest.mark.parametrize(
    ("api", "fields", "limit"),
    [
        pytest.param(Api.CHAT, {}, None, id="chat-none"),
        pytest.param(Api.COMPLETIONS, {}, 16, id="completions-default"),
        pytest.param(Api.CHAT, {"max_tokens": 5}, 5, id="old-name"),
        pytest.param(Api.CHAT, {"max_completion_tokens": 7}, 7, id="new-name"),
        pytest.param(Api.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7, id="new-wins"),
        pytest.param(Api.CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5, id="null"),
        pytest.param(Api.COMPLETIONS, {"max_tokens": None}, 16, id="completions-null"),
        pytest.param(Api.COMPLETIONS, {"max_tokens": 0}, 0, id="zero"),
        pytest.param(Api.CHAT, {"max_tokens": "9"}, None, id="text"),
        pytest.param(Api.CHAT, {"max_tokens": True}, None, id="boolean"),
    ],
)
def test_output_limit_is_the_one_the_engine_applies(api, fields, limit):
    assert parse(api, fields).max_output_tokens == limit


@pytest.mark.parametrize(
    ("stream", "expected"), [("true", True), ("false", False), ("null", False), ("[1]", False)]
)
def test_stream_is_wanted_when_true(stream, expected):
    assert parse(Api.CHAT, b'{"stream": %b}' % stream.encode()).wants_stream is expected


@pytest.mark.parametrize(
    ("stop", "stops"),
    [
        pytest.param("x", {"x"}, id="one"),
        pytest.param(["a", "b", 3, None], {"a", "b"}, id="list"),
        pytest.param(None, set(), id="null"),
        pytest.param({"a": 1}, set(), id="object"),
    ],
)
def test_stops_are_the_strings_among_them(stop, stops):
    assert chat(stop=stop).stops == stops


# --- the prompt


def test_prompt_text_is_measured_by_its_bytes():
    assert completion(prompt="abcd").text_bytes == len(b'"abcd"')


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        pytest.param([7], 1, id="one"),
        pytest.param([1, 2, 3], 3, id="three"),
        pytest.param([[1, 2, 3]], 3, id="list-of-one"),
        pytest.param("text", None, id="text"),
        pytest.param([], None, id="none"),
    ],
)
def test_token_ids_are_counted_exactly(prompt, tokens):
    request = completion(prompt=prompt)

    assert request.prompt_tokens == tokens
    assert request.prompts == ()
    assert tokens is None or request.text_bytes == 0


def test_messages_and_what_templates_render_are_text():
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]

    bare = parse(Api.CHAT, {"messages": messages})
    with_tools = parse(Api.CHAT, {"messages": messages, "tools": tools})

    assert bare.text_bytes == len(json.dumps(messages))
    assert with_tools.text_bytes == bare.text_bytes + len(json.dumps(tools))


LISTS = [
    pytest.param(b'["a", "b"]', [b'"a"', b'"b"'], id="texts"),
    pytest.param(b"[[1, 2], [3]]", [b"[1, 2]", b"[3]"], id="token-ids"),
    pytest.param(b"[" + b" " * 500 + b'"a","b"]', [b'"a"', b'"b"'], id="behind-white-space"),
    pytest.param(b'\t["a"\n,\t"b"]', [b'"a"', b'"b"'], id="white-space"),
    pytest.param(b'["\\ud800", "b"]', [b'"\\ud800"', b'"b"'], id="lone-surrogate"),
]


@pytest.mark.parametrize(("prompt", "singles"), LISTS)
def test_list_of_prompts_is_split(prompt, singles):
    request = parse(Api.COMPLETIONS, b'{"model": "m", "n": 2, "prompt":%b}' % prompt)

    assert [bytes(single.fields["prompt"]) for single in request.singles()] == singles
    assert {single.choices for single in request.singles()} == {2}
    assert {single.prompts for single in request.singles()} == {()}


def test_singles_are_measured_each_for_itself():
    request = parse(Api.COMPLETIONS, {"prompt": [[1, 2, 3], [4]], "max_tokens": 3})

    assert [single.prompt_tokens for single in request.singles()] == [3, 1]
    assert [single.max_output_tokens for single in request.singles()] == [3, 3]
    assert sum(single.body_bytes for single in request.singles()) < request.body_bytes


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [], None, {}, 3], ids=repr)
def test_single_prompt_travels_as_it_came(prompt):
    assert completion(prompt=prompt).prompts == ()


def test_chat_has_no_list_of_prompts():
    assert parse(Api.CHAT, {"prompt": ["a", "b"]}).prompts == ()


# --- decode only


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(completion(), False, id="plain"),
        pytest.param(completion(prompt_logprobs=0), True, id="prompt-logprobs-0"),
        pytest.param(completion(prompt_logprobs=None), False, id="prompt-logprobs-null"),
        pytest.param(completion(use_beam_search=True), True, id="beam-search"),
        pytest.param(completion(echo=True), False, id="echo"),
        pytest.param(completion(echo=True, logprobs=0), True, id="echo-logprobs-0"),
        pytest.param(completion(echo=False, logprobs=1), False, id="logprobs"),
        pytest.param(chat(logprobs=True, top_logprobs=3), False, id="chat-logprobs"),
        pytest.param(chat(prompt_logprobs=1), True, id="chat-prompt-logprobs"),
        pytest.param(chat(echo=True), True, id="chat-echo"),
        pytest.param(chat(echo=True, top_logprobs=None), False, id="chat-echo-without"),
    ],
)
def test_decoder_alone_serves_what_needs_the_whole_prompt(request_, expected):
    assert request_.is_decode_only is expected


# --- internal fields


@pytest.mark.parametrize("name", sorted(INTERNAL_FIELDS))
@pytest.mark.parametrize("is_escaped", [False, True], ids=["plain", "escaped"])
def test_internal_fields_never_come_from_a_client(name, is_escaped):
    key = "".join(f"\\u{ord(c):04x}" for c in name) if is_escaped else name

    request = parse(Api.CHAT, b'{"a": 1, "%b": {"x": 1}, "b": 2}' % key.encode())

    assert list(request.fields) == ["a", "b"]


def test_internal_fields_are_taken_out_of_engine_arguments():
    arguments = {"kv_transfer_params": "x", "mine": 1, "ec_transfer_params": "y"}

    request = chat(vllm_xargs=arguments)

    assert json.loads(bytes(request.fields["vllm_xargs"])) == {"mine": 1}


@pytest.mark.parametrize("arguments", [b'{"mine" : 1}', b"null", b'"x"', b"[1]"])
def test_other_engine_arguments_keep_their_bytes(arguments):
    fields = {"a": Raw(b"1"), "vllm_xargs": Raw(arguments)}

    assert without_internal(fields) is fields


def test_the_last_of_equal_keys_counts_as_for_engines():
    body = b'{"model": "a", "kv_transfer_params": null, "model": "b", "kv_transfer_params": {}}'

    request = parse(Api.CHAT, body)

    assert (request.model, list(request.fields)) == ("b", ["model"])
