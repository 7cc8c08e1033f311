"""What clients ask for beside plain text: each answer equals the plain engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.real_engines.exchange import CHAT, COMPLETIONS, Lab, answer_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
COLOR = {
    "type": "json_schema",
    "json_schema": {
        "name": "color",
        "schema": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "green", "blue"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
    },
}
CHATS: Mapping[str, dict[str, Any]] = {
    "two choices drawn with a seed": {"n": 2, "seed": 7, "temperature": 0.9},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "a tool by name": {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 64},
    "any tool required": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 64},
    "a tool if the model likes": {"tools": [WEATHER], "tool_choice": "auto"},
    "a JSON schema": {"response_format": COLOR, "max_tokens": 64},
    "the newer limit": {"max_completion_tokens": 9, "max_tokens": 500},
    "a least length": {"min_tokens": 12, "stop_token_ids": [5], "stop": ["a"]},
    "stop strings": {"stop": ["e", "o"]},
    "token ids": {"return_token_ids": True},
    "no end before the limit": {"ignore_eos": True, "max_tokens": 40},
    "content parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Go on, engine."}]}]
    },
    "an open assistant turn": {
        "messages": [
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": "The river"},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a cache salt": {"cache_salt": "salt"},
    "a priority": {"priority": 3},
}
COMPLETION_FIELDS: Mapping[str, dict[str, Any]] = {
    "two choices drawn with a seed": {"n": 2, "seed": 7, "temperature": 0.9},
    "log-probabilities": {"logprobs": 2},
    "echo": {"echo": True},
    "echo with log-probabilities": {"echo": True, "logprobs": 1},
    "echo of the prompt alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "prompt log-probabilities": {"prompt_logprobs": 1},
    "a regular expression": {"structured_outputs": {"regex": "[a-c]{4}"}},
    "the default limit": {"max_tokens": None},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS.keys())
async def test_chat_with_this_is_answered_as_by_one_engine(
    lab: Lab, fields: dict[str, Any], stream: bool
) -> None:
    await lab.assert_equal(CHAT, lab.chat(**{"stream": stream, **fields}))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", COMPLETION_FIELDS.values(), ids=COMPLETION_FIELDS.keys())
async def test_completion_with_this_is_answered_as_by_one_engine(
    lab: Lab, fields: dict[str, Any], stream: bool
) -> None:
    body = lab.completion(**{"stream": stream, **fields})
    expected = await lab.plain(COMPLETIONS, body)
    if expected.status != 200:
        reply = await lab.post(COMPLETIONS, body)
        assert (reply.status, reply.error) == (expected.status, expected.error)
        return
    await lab.assert_equal(COMPLETIONS, body)


async def test_prompt_log_probabilities_equal_the_plain_engines(lab: Lab) -> None:
    body = lab.completion(echo=True, logprobs=1)

    reply = await lab.post(COMPLETIONS, body)

    expected = await lab.plain(COMPLETIONS, body)
    assert answer_of(reply) == answer_of(expected)
    seen, known = (r.json["choices"][0]["logprobs"]["token_logprobs"] for r in (reply, expected))
    assert seen[0] is known[0] is None
    assert seen[1:] == pytest.approx(known[1:], abs=1e-3)


async def test_usage_in_every_chunk_grows_to_the_plain_engines_sum(lab: Lab) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = lab.chat(stream=True, stream_options=options)

    reply = await lab.post(CHAT, body)

    answer = answer_of(reply)
    assert answer == answer_of(await lab.plain(CHAT, body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.chunks_of_json]
    assert counts == sorted(counts)
    assert counts[-1] == 24
