"""What the engines are asked in a further round: the client's request, less what was said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.cuts import HASTE, cut_after, decodes, limit_of, prefills, prefix_of, spoken
from tests.cases.scene import CHAT, COMPLETIONS, chat, completion, scene
from tests.fakes import toy
from tests.fakes.client import assert_whole_stream
from tests.fakes.proxy import ProxyProcess

IDS = pytest.mark.parametrize("ids", ["auto", "always"])
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "seed": 7,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "stop": ["END"],
    "stop_token_ids": [9999],
    "ignore_eos": True,
    "bad_words": ["x"],
    "skip_special_tokens": False,
    "user": "me",
    "priority": 3,
    "unknown_field": {"kept": [1, 2.50]},
    "stream_options": {"include_usage": True},
}
CHAT_ONLY: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "tools": [TOOL],
    "tool_choice": "auto",
}
# What carries the answer so far, what is left, and what a round cannot go on without.
RESUME_FORM = {
    "messages",
    "prompt",
    "continue_final_message",
    "add_generation_prompt",
    "max_tokens",
    "kv_transfer_params",
    "return_token_ids",
}


def rest(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in RESUME_FORM}


@pytest.mark.case("C35")
@IDS
@pytest.mark.parametrize(
    ("cut", "least", "most"), [(40, 10, 20), (55, 0, 5)], ids=["before-the-least", "behind-it"]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_both_limits_shrink_by_what_was_said(ids, cut, least, most, path):
    make = chat if path == CHAT else completion
    body = make(stream=True, min_tokens=50, max_tokens=60)

    async with scene([None], [cut_after(cut)], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 60)
    second = decodes(stage)[1]
    assert (second.json.get("min_tokens", 0), limit_of(second)) == (least, most)
    for call in prefills(stage):
        assert limit_of(call) == 1
        assert call.json.get("min_tokens", 1) <= 1


@pytest.mark.case("C35")
async def test_both_names_of_the_limit_shrink():
    body = chat(stream=True, max_completion_tokens=9, max_tokens=50)

    async with scene([None], [cut_after(4)]) as stage:
        reply = await stage.post(CHAT, body)

    assert reply.text == toy.answer(body, 9)
    assert decodes(stage)[1].json["max_completion_tokens"] == 5


@pytest.mark.case("C36")
@IDS
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_further_round_asks_as_the_client_did(ids, path):
    body = chat(**CHAT_ONLY) if path == CHAT else completion()
    body |= {**SAMPLING, "stream": True, "max_tokens": 12}

    async with scene([None], [cut_after(5)], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 12)
    first, second = decodes(stage)
    assert second.path == first.path == path
    assert rest(second.json) == rest(first.json) == rest(body)
    if path == CHAT:
        assert second.json["messages"][:-1] == body["messages"]


@pytest.mark.case("C36")
async def test_sampling_of_plain_chat_survives_the_way_by_ids():
    body = chat(**SAMPLING, stream=True, max_tokens=12)

    async with scene([None], [cut_after(5)], "--token-ids", "always") as stage:
        reply = await stage.post(CHAT, body)

    assert reply.text == toy.answer(body, 12)
    second = decodes(stage)[1]
    assert second.path == COMPLETIONS
    assert rest(second.json) == rest(body)


@pytest.mark.case("C38")
@IDS
async def test_each_round_has_an_id_of_its_own_at_the_engines(ids):
    body = chat(stream=True, max_tokens=9)
    asked = [("x-request-id", "mine")]

    async with scene([None], [cut_after(3, 3)], "--token-ids", ids, *HASTE) as stage:
        reply = await stage.post(CHAT, body, asked)

    assert_whole_stream(reply)
    at_p = [call.headers["x-request-id"] for call in prefills(stage)]
    at_d = [call.headers["x-request-id"] for call in decodes(stage)]
    assert at_p == at_d
    assert len(set(at_d)) == 3
    assert len({chunk["id"] for chunk in reply.chunks_of_json}) == 1
    assert reply.headers["x-request-id"] == "mine"


@pytest.mark.case("C38")
async def test_no_id_is_used_for_two_rounds_of_any_request():
    async with scene([None], [cut_after(*[2] * 40)], *HASTE) as stage:
        for _ in range(20):
            await stage.post(CHAT, chat(stream=True, max_tokens=4), [("x-request-id", "same")])

    used = [call.headers["x-request-id"] for call in decodes(stage)]
    assert len(used) >= 40
    assert len(set(used)) == len(used)


@pytest.mark.case("C38")
@pytest.mark.e2e
async def test_log_of_all_rounds_has_the_clients_id():
    args = ("--log-level", "DEBUG", *HASTE)
    async with scene([None], [cut_after(3)], *args, process=True) as stage:
        await stage.post(CHAT, chat(stream=True, max_tokens=9), [("x-request-id", "mine")])
        assert isinstance(stage.proxy, ProxyProcess)
        await stage.proxy.wait_for_log("rounds")
        (line,) = [line for line in stage.proxy.log_text().splitlines() if "rounds" in line]

    assert "mine" in line


@pytest.mark.case("C25")
async def test_whole_conversation_is_sent_again_as_it_was():
    messages = [
        {"role": "system", "content": "Be short.", "name": "ops"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Bon"}, {"type": "text", "text": "!"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": "Et alors ?"},
    ]
    body = chat(messages=messages, tools=[TOOL], stream=True, max_tokens=9)

    async with scene([None], [cut_after(4)]) as stage:
        reply = await stage.post(CHAT, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 9)
    for call in (prefills(stage)[1], decodes(stage)[1]):
        assert call.json["messages"][:-1] == messages
        assert prefix_of(call) == toy.prompts(body)[0] + spoken(body, 4)
