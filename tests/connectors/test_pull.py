import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.connectors.pull import PullConnector
from pdproxy.core.api import ENGINE_ARGUMENTS, INTERNAL_FIELDS, Api, parse_generate
from pdproxy.core.jsonfields import Raw, split_object
from tests.properties import UNHURRIED

PULL = PullConnector()
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
# Keys are Unicode text; lone surrogates in keys are no fields that an engine knows.
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda key: key not in INTERNAL_FIELDS and key != ENGINE_ARGUMENTS
)

BODIES = st.dictionaries(KEYS | st.sampled_from(["n", "stop", "stream", "max_tokens"]), JSON)


def parse(body, api=Api.CHAT):
    return parse_generate(api, body if isinstance(body, bytes) else json.dumps(body).encode())


def prefill(**fields):
    return json.loads(PULL.prefill_body(parse(fields)))


FORCED = {"stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": ASK}


@pytest.mark.case("C08", "C09", "C10", "C11", "C12")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, {}, id="C11-nothing-given"),
        pytest.param({"max_tokens": 500, "min_tokens": 100}, {}, id="C08-min-tokens"),
        pytest.param({"min_tokens": None}, {}, id="C08-min-tokens-null"),
        pytest.param({"max_completion_tokens": 4096}, {"max_completion_tokens": 1}, id="C09-new"),
        pytest.param({"max_completion_tokens": None}, {"max_completion_tokens": 1}, id="C09-null"),
        pytest.param(
            {"max_completion_tokens": 9, "max_tokens": 7}, {"max_completion_tokens": 1}, id="C09"
        ),
        pytest.param({"max_tokens": None}, {}, id="C09-old-null"),
        pytest.param(
            {"stream": True, "stream_options": {"include_usage": True}}, {}, id="C10-stream"
        ),
        pytest.param({"stop": ["a"], "stop_token_ids": [2]}, {}, id="C12-stops"),
        pytest.param({"n": 4, "best_of": 4}, {}, id="one-answer"),
        pytest.param({"logprobs": True, "top_logprobs": 20}, {}, id="no-logprobs"),
        pytest.param({"echo": True, "return_token_ids": True}, {}, id="nothing-to-read"),
    ],
)
def test_prefill_makes_one_token_at_least_and_at_most(fields, expected):
    assert prefill(**fields) == {**expected, **FORCED}


@pytest.mark.parametrize(
    "field",
    [
        pytest.param({"messages": [{"role": "user", "content": "hi"}]}, id="messages"),
        pytest.param({"tools": [{"type": "function"}], "tool_choice": "auto"}, id="tools"),
        pytest.param({"chat_template_kwargs": {"enable_thinking": False}}, id="template"),
        pytest.param({"response_format": {"type": "json_object"}}, id="response-format"),
        pytest.param({"cache_salt": "x", "priority": 3, "seed": 2**63 - 1}, id="engine"),
        pytest.param({"prompt": [1, 2, 3]}, id="prompt"),
    ],
)
def test_prefill_keeps_what_may_be_rendered_into_the_prompt(field):
    assert prefill(**field) == {**field, **FORCED}


@UNHURRIED
@given(body=BODIES)
def test_prefill_of_any_body_is_capped(body):
    made = json.loads(PULL.prefill_body(parse(body)))

    lengths = {made[name] for name in ("max_tokens", "max_completion_tokens") if name in made}
    assert lengths == {1}
    assert (made["stream"], made["min_tokens"], made["kv_transfer_params"]) == (False, 1, ASK)


@pytest.mark.case("C13", "C45")
@UNHURRIED
@given(body=BODIES, handle=st.dictionaries(st.text(max_size=8), JSON, min_size=1))
def test_decode_body_is_the_clients_body_and_the_handle(body, handle):
    reply = split_object(json.dumps({"kv_transfer_params": handle}).encode())

    made = PULL.decode_body(parse(body), PULL.handle_of(reply))

    assert json.loads(made) == {**body, "kv_transfer_params": handle}


@UNHURRIED
@given(body=BODIES)
def test_without_a_handle_the_decode_body_is_the_clients(body):
    assert json.loads(PULL.decode_body(parse(body), None)) == body


@pytest.mark.case("C13")
def test_bytes_of_values_and_handle_are_not_touched():
    body = b'{"seed":9223372036854775807,"top_p":1e-9,"logit_bias":{"15" : -1.50},"s":"\\u00e9"}'
    handle = Raw(b'{"a" : [1 , 18446744073709551617], "b": null}')

    made = PULL.decode_body(parse(body), handle)

    assert made == body[:-1] + b',"kv_transfer_params":' + bytes(handle) + b"}"


@pytest.mark.case("C12")
@pytest.mark.parametrize(
    "value", ["null", "{}", "{ }", "{\n}", "[]", '""', '"x"', "false", "0", "[1]"]
)
def test_what_is_no_handle_is_none(value):
    reply = split_object(b'{"kv_transfer_params": %b}' % value.encode())

    assert PULL.handle_of(reply) is None


def test_reply_without_the_field_has_no_handle():
    assert PULL.handle_of({}) is None


@pytest.mark.case("C12")
def test_clients_own_handle_never_goes_to_an_engine():
    body = {"model": "m", "kv_transfer_params": {"remote_engine_id": "stolen"}}

    assert json.loads(PULL.decode_body(parse(body), None)) == {"model": "m"}
    assert json.loads(PULL.prefill_body(parse(body)))["kv_transfer_params"] == ASK


@pytest.mark.parametrize("api", list(Api))
def test_bodies_are_made_anew_and_the_request_stays(api):
    request = parse({"model": "m", "max_tokens": 7}, api)
    before = dict(request.fields)

    PULL.prefill_body(request)
    PULL.decode_body(request, Raw(b'{"a":1}'))

    assert request.fields == before
