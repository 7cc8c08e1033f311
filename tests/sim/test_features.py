"""What requests can ask for, over sockets: tools, JSON, reasoning, ids, echo, limits."""

import orjson
import pytest

from pdproxy.sim import tokenizer
from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.sim.clients import CHAT, COMPLETIONS, send

USER = [{"role": "user", "content": "Hello, who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    },
    "required": ["city", "unit"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}},
]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def chat(messages=USER, **fields):
    return {"messages": messages, "max_tokens": 400} | fields


def streamed_call(answer):
    """The tool call put together from a stream's deltas."""
    deltas = [e["choices"][0]["delta"] for e in answer.events if e["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    name = "".join(call["function"].get("name", "") for call in calls)
    return name, "".join(call["function"].get("arguments", "") for call in calls), calls


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
async def test_tool_calls_are_the_same_whole_and_streamed(session, decoder, choice):
    messages = [{"role": "user", "content": "Please use the tool"}]
    body = chat(messages, tools=TOOLS, tool_choice=choice)

    whole = await send(session, decoder, CHAT, body)
    stream = await send(session, decoder, CHAT, body | {"stream": True})

    message = whole.json["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    name, arguments, calls = streamed_call(stream)
    assert message["content"] is None
    assert whole.json["choices"][0]["finish_reason"] == "tool_calls"
    assert stream.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (name, arguments) == (function["name"], function["arguments"])
    assert set(orjson.loads(arguments)) == {"city", "unit", "days"}
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert choice != NAMED or name == "get_time"


async def test_without_being_asked_no_tool_is_called(session, decoder):
    answer = await send(session, decoder, CHAT, chat(tools=TOOLS, max_tokens=8))

    assert "tool_calls" not in answer.json["choices"][0]["message"]


@pytest.mark.parametrize("cut", [1, 2, 9, 25, 40])
async def test_an_open_tool_call_goes_on_from_exact_ids(session, decoder, cut):
    messages = [{"role": "user", "content": "Use the tool"}]
    body = chat(messages, tools=TOOLS, return_token_ids=True)
    whole = (await send(session, decoder, CHAT, body)).json
    prompt, ids = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]

    rest = await send(
        session, decoder, COMPLETIONS,
        {"prompt": prompt + ids[:cut], "max_tokens": 400, "return_token_ids": True},
    )  # fmt: skip

    assert ids[:cut] + rest.json["choices"][0]["token_ids"] == ids


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        pytest.param(
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"city", "unit", "days"},
            id="json_schema",
        ),
        pytest.param({"response_format": {"type": "json_object"}}, {"answer"}, id="json_object"),
        pytest.param({"structured_outputs": {"json": SCHEMA}}, {"city", "unit", "days"}, id="own"),
    ],
)
async def test_structured_answers_are_valid_json_and_end(session, decoder, fields, keys):
    answer = await send(session, decoder, CHAT, chat(**fields))

    assert set(orjson.loads(answer.text)) == keys
    assert answer.json["choices"][0]["finish_reason"] == "stop"


async def test_a_grammar_sent_again_starts_at_its_root(session, decoder):
    form = {"response_format": {"type": "json_object"}}
    opened = [*USER, {"role": "assistant", "content": '{"ans'}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}

    answer = await send(session, decoder, CHAT, chat(opened, **form, **goes_on))

    assert answer.text.startswith('{"answer"')


async def test_a_choice_is_one_of_those_given(session, decoder):
    body = chat(structured_outputs={"choice": ["yes", "no"]})

    answer = await send(session, decoder, CHAT, body)

    assert answer.text in ("yes", "no")


async def test_reasoning_comes_apart_whole_and_streamed(session):
    async with in_process(SimConfig(reasoning=True, reasoning_tokens=5)) as sim:
        body = chat(max_tokens=20, ignore_eos=True)
        whole = await send(session, sim, CHAT, body)
        stream = await send(session, sim, CHAT, body | {"stream": True, "return_token_ids": True})

    message = whole.json["choices"][0]["message"]
    choices = [e["choices"][0] for e in stream.events]
    reasoning = "".join(c["delta"].get("reasoning", "") for c in choices)
    marker = [c for c in choices if tokenizer.THINK_END in c.get("token_ids", [])]
    assert message["reasoning"]
    assert (reasoning, stream.text) == (message["reasoning"], message["content"])
    assert "</think>" not in reasoning + stream.text
    assert marker[0]["delta"] == {}


async def test_reasoning_goes_on_from_exact_ids_up_to_its_marker(session):
    async with in_process(SimConfig(reasoning=True, reasoning_tokens=8)) as sim:
        body = chat(max_tokens=20, ignore_eos=True, return_token_ids=True)
        whole = (await send(session, sim, CHAT, body)).json
        prompt, ids = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]

        rest = await send(
            session, sim, COMPLETIONS,
            {
                "prompt": prompt + ids[:3], "max_tokens": 20, "return_token_ids": True,
                "stop_token_ids": [tokenizer.THINK_END],
            },
        )  # fmt: skip

    choice = rest.json["choices"][0]
    assert ids[:3] + choice["token_ids"] == ids[: ids.index(tokenizer.THINK_END) + 1]
    assert choice["stop_reason"] == tokenizer.THINK_END


async def test_an_open_turn_in_content_goes_on_streamed_but_not_whole(session):
    async with in_process(SimConfig(reasoning=True, reasoning_tokens=4)) as sim:
        body = chat(max_tokens=20, ignore_eos=True)
        message = (await send(session, sim, CHAT, body)).json["choices"][0]["message"]
        cut = message["content"][:10].rpartition(" ")[0]
        turn = {"role": "assistant", "reasoning": message["reasoning"], "content": cut}
        again = chat(
            [*USER, turn], max_tokens=5, ignore_eos=True, continue_final_message=True,
            add_generation_prompt=False,
        )  # fmt: skip

        stream = await send(session, sim, CHAT, again | {"stream": True})
        whole = await send(session, sim, CHAT, again)

    assert message["content"].startswith(cut + stream.text)
    # The parser of whole answers does not look at the prompt.
    assert whole.json["choices"][0]["message"]["reasoning"] == stream.text


async def test_thinking_can_be_switched_off(session):
    async with in_process(SimConfig(reasoning=True)) as sim:
        body = chat(max_tokens=5, chat_template_kwargs={"enable_thinking": False})
        answer = await send(session, sim, CHAT, body)

    assert answer.json["choices"][0]["message"]["reasoning"] is None
    assert answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_echo_repeats_the_prompt(session, decoder, stream):
    body = {"prompt": "Say it again", "max_tokens": 4, "ignore_eos": True}
    plain = await send(session, decoder, COMPLETIONS, body)

    echoed = await send(session, decoder, COMPLETIONS, body | {"echo": True, "stream": stream})

    assert echoed.text == "Say it again" + plain.text


async def test_max_completion_tokens_wins(session, decoder):
    body = chat(max_tokens=1, max_completion_tokens=5, ignore_eos=True)

    answer = await send(session, decoder, CHAT, body)

    assert answer.json["usage"]["completion_tokens"] == 5


async def test_completions_write_sixteen_tokens_by_default(session, decoder):
    answer = await send(session, decoder, COMPLETIONS, {"prompt": "x", "ignore_eos": True})

    assert answer.json["usage"]["completion_tokens"] == 16


async def test_chat_without_a_limit_may_fill_the_context(session):
    async with in_process(SimConfig(max_model_len=64)) as sim:
        answer = await send(session, sim, CHAT, {"messages": USER, "ignore_eos": True})

    assert answer.json["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"messages": [{"role": "system", "content": USER[0]["content"]}]}, id="role"),
        pytest.param({"messages": [USER[0] | {"name": "bob"}]}, id="name"),
        pytest.param({"tools": TOOLS}, id="tools"),
        pytest.param({"chat_template_kwargs": {"style": "short"}}, id="template-arguments"),
        pytest.param({"seed": 4}, id="seed"),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": USER[0]["content"]},
                            {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                        ],
                    }
                ]
            },
            id="image",
        ),
    ],
)
async def test_whatever_reaches_the_prompt_changes_the_answer(session, decoder, change):
    plain = await send(session, decoder, CHAT, chat(max_tokens=8))

    changed = await send(session, decoder, CHAT, chat(max_tokens=8) | change)

    assert changed.status == 200
    assert changed.text != plain.text


async def test_a_list_of_text_parts_is_the_same_as_text(session, decoder):
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "who are you?"}]
    plain = await send(session, decoder, CHAT, chat(max_tokens=8))

    listed = await send(
        session, decoder, CHAT, chat([{"role": "user", "content": parts}], max_tokens=8)
    )

    assert listed.text == plain.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param(CHAT, chat(continue_final_message=True), None, id="both-template-flags"),
        pytest.param(CHAT, chat(tool_choice="required"), "tool_choice", id="choice-without-tools"),
        pytest.param(CHAT, chat(top_logprobs=3), "top_logprobs", id="top-without-logprobs"),
        pytest.param(CHAT, chat(logprobs=True, top_logprobs=99), "top_logprobs", id="too-many"),
        pytest.param(CHAT, chat(messages=[]), "messages", id="no-messages"),
        pytest.param(CHAT, chat(messages=["x"]), "body.messages.0", id="message-no-object"),
        pytest.param(CHAT, chat(stop=[""]), "stop", id="empty-stop"),
        pytest.param(CHAT, chat(top_p=2), "top_p", id="top_p"),
        pytest.param(CHAT, chat(n=2, temperature=0), None, id="greedy-choices"),
        pytest.param(CHAT, chat(stream="maybe"), "body.stream", id="stream-type"),
        pytest.param(COMPLETIONS, {"prompt": [99999]}, "prompt", id="unknown-token"),
        pytest.param(COMPLETIONS, {"prompt": {"a": 1}}, "body.prompt", id="prompt-type"),
        pytest.param(COMPLETIONS, [1], "body", id="no-object"),
    ],
)
async def test_impossible_requests_are_400(session, decoder, path, body, param):
    answer = await send(session, decoder, path, body)

    assert (answer.status, answer.json["error"]["code"]) == (400, 400)
    assert answer.json["error"]["param"] == param


async def test_the_api_key_guards_the_api_only(session):
    async with in_process(SimConfig(api_key="secret")) as sim:
        refused = await send(session, sim, COMPLETIONS, {"prompt": "x"})
        allowed = await send(
            session, sim, COMPLETIONS, {"prompt": "x"}, Authorization="Bearer secret"
        )
        open_path = await send(session, sim, "/tokenize", {"prompt": "x"})

    assert (refused.status, allowed.status, open_path.status) == (401, 200, 200)


async def test_embeddings_depend_on_the_text(session, decoder):
    answer = await send(session, decoder, "/v1/embeddings", {"input": ["a", "b"]})

    first, second = (entry["embedding"] for entry in answer.json["data"])
    assert len(first) == len(second)
    assert first != second


async def test_metrics_have_vllms_names(session, decoder):
    await send(session, decoder, COMPLETIONS, {"prompt": "x y z", "max_tokens": 3})
    async with session.get(decoder.url + "/metrics") as response:
        text = await response.text()

    labels = 'engine="0",model_name="sim"'
    assert f"vllm:num_requests_running{{{labels}}} 0.0" in text
    assert f"vllm:num_requests_waiting{{{labels}}} 0.0" in text
    assert f"vllm:kv_cache_usage_perc{{{labels}}} 0.0" in text
    assert f"vllm:generation_tokens_total{{{labels}}} 3.0" in text
    assert f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 3.0' in text
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="4096"' in text


async def test_reset_prefix_cache_forgets(session, decoder):
    body = {"prompt": list(range(300, 340)), "max_tokens": 1}
    await send(session, decoder, COMPLETIONS, body)

    reset = await send(session, decoder, "/reset_prefix_cache", {})
    again = await send(session, decoder, COMPLETIONS, body)

    assert (reset.status, reset.raw) == (200, b"")
    assert again.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_tokenize_and_detokenize_are_inverse(session, decoder):
    ids = (await send(session, decoder, "/tokenize", {"prompt": "Ünïcode 🦜!"})).json["tokens"]

    answer = await send(session, decoder, "/detokenize", {"tokens": ids})

    assert answer.json == {"prompt": "Ünïcode 🦜!"}
