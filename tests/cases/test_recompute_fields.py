"""Reasoning, echo, running usage and logprobs of a cut answer are those of the uncut one."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.sim import tokenizer
from pdproxy.sim.config import SimConfig
from pdproxy.sim.server import Sim
from tests.cases.cuts import decodes, ends, prefix_of, scripted, spoken, text_of
from tests.cases.scene import CHAT, COMPLETIONS, chat, scene
from tests.cases.sims import sims, told
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import assert_whole_stream

PLAIN = SimConfig(eos_odds=1 << 30)
THINKER = SimConfig(eos_odds=1 << 30, reasoning=True, reasoning_tokens=40)
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
END = 5_000_000  # the id by which the toy model ends its reasoning
THOUGHTS, CUT, ALL = 40, 30, 60


def generations(sim: Sim) -> list[dict[str, Any]]:
    """The bodies of what an engine was asked to generate."""
    return [seen.body or {} for seen in sim.requests if "completions" in seen.path]


def thinking(count: int, field: str, ends: dict[str, Any]) -> Behaviour:
    """A decoder that streams words as reasoning, under one of its names."""

    def edit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            for choice in event["choices"]:
                if choice.get("delta", {}).get("content"):
                    choice["delta"] = {field: choice["delta"]["content"]}
        return events

    return scripted(count, edit, **ends)


async def to_the_end_of_reasoning(request: EngineRequest, answer: Answer) -> None:
    """Give the rest of the reasoning, and end at the token that was asked for."""
    assert request.json["stop_token_ids"] == [END]
    events = behaviours.stream_events(request, THOUGHTS - CUT, "stop")
    last = next(each["choices"][0] for each in events if each["choices"][0]["finish_reason"])
    last |= {"stop_reason": END, "token_ids": [END]}
    await behaviours.stream(behaviours.stream_bytes(events))(request, answer)


@pytest.mark.case("C28")
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_goes_on_under_its_name(field):
    body = chat(stream=True, max_tokens=ALL)
    prompt = toy.prompts(body)[0]
    first = thinking(CUT, field, {"finish_reason": "stop", "stop_reason": "recomputed"})
    d = behaviours.one_after_another(first, to_the_end_of_reasoning, behaviours.decode)
    args = ("--token-ids", "always", "--reasoning-end-id", str(END))

    async with scene([None], [d, d], *args) as stage:
        reply = await stage.post(CHAT, body)
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    thoughts = spoken(body, THOUGHTS)
    deltas = [each["choices"][0]["delta"] for each in reply.chunks_of_json if each["choices"]]
    other = {"reasoning": "reasoning_content"}.get(field, "reasoning")
    assert "".join(delta.get(field) or "" for delta in deltas) == text_of(thoughts)
    assert not any(delta.get(other) for delta in deltas)
    behind = [*prompt, *thoughts, END]
    assert reply.text == text_of(toy.speak(behind, ALL - THOUGHTS - 1))
    assert ends(reply) == ["length"]
    assert [prefix_of(call) for call in decodes(stage)] == [
        prompt,
        [*prompt, *thoughts[:CUT]],
        behind,
    ]


@pytest.mark.case("C28")
@pytest.mark.parametrize("cut", [0, 1, 30, 39, 40, 41, 42, 50])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_thinking_model_cut_anywhere_thinks_once(cut, stream):
    body = {"messages": MESSAGES, "stream": stream, "max_tokens": ALL}

    async with sims(THINKER, "--token-ids", "always") as stage:
        stage.decoder.faults.recompute_after[:] = [cut]
        given, uncut = await stage.both(CHAT, body)
        await stage.until_idle()

    got, wanted = told(given), told(uncut)
    assert got.choices == wanted.choices
    assert got.choices[0].reasoning
    assert got.choices[0].content
    assert got.usage == wanted.usage
    assert len(generations(stage.decoder)) > 1


@pytest.mark.case("C28")
async def test_reasoning_without_ids_is_given_again_at_temperature_zero():
    body = {"messages": MESSAGES, "stream": True, "max_tokens": ALL, "temperature": 0}

    async with sims(THINKER, "--token-ids", "never") as stage:
        stage.decoder.faults.recompute_after[:] = [30]
        given, uncut = await stage.both(CHAT, body)

    assert told(given).choices == told(uncut).choices


@pytest.mark.case("C30")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("ids", ["auto", "always"])
async def test_running_usage_never_goes_back(path, ids):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once upon a time"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "stream": True, "max_tokens": 20, "stream_options": options}

    async with sims(PLAIN, "--token-ids", ids) as stage:
        stage.decoder.faults.recompute_after[:] = [5, 6, 3]
        given, uncut = await stage.both(path, body)

    assert told(given).choices == told(uncut).choices
    usages = [each["usage"] for each in given.chunks_of_json if each.get("usage")]
    wanted = told(uncut).usage
    assert wanted is not None
    assert {each["prompt_tokens"] for each in usages} == {wanted["prompt_tokens"]}
    counts = [each["completion_tokens"] for each in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 20
    for each in usages:
        assert each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"]


@pytest.mark.case("C30")
async def test_running_usage_counts_what_was_delivered():
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"stream_options": options, "return_token_ids": True}
    body = {"prompt": "Once upon a time", "stream": True, "max_tokens": 20, **asked}

    async with sims(PLAIN) as stage:
        stage.decoder.faults.recompute_after[:] = [5, 6, 4]
        given, _ = await stage.both(COMPLETIONS, body)

    delivered = 0
    for chunk in given.chunks_of_json:
        delivered += sum(len(choice.get("token_ids") or []) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == delivered
    assert delivered == 20


@pytest.mark.case("C34")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("logprobs", [None, 2], ids=["plain", "logprobs"])
@pytest.mark.parametrize("ids", ["auto", "always"])
async def test_prompt_is_echoed_once(stream, logprobs, ids):
    body = {"prompt": "Once upon a time", "echo": True, "max_tokens": 12, "stream": stream}
    body |= {} if logprobs is None else {"logprobs": logprobs}
    body |= {"stream_options": {"include_usage": True}} if stream else {}

    async with sims(PLAIN, "--token-ids", ids) as stage:
        stage.decoder.faults.recompute_after[:] = [3, 4]
        given, uncut = await stage.both(COMPLETIONS, body)

    got, wanted = told(given), told(uncut)
    assert got.choices == wanted.choices
    assert got.choices[0].content.count("Once upon a time") == 1
    assert got.usage == wanted.usage
    first, *later = generations(stage.decoder)
    assert first["echo"] is True
    assert later
    assert not any(asked.get("echo") for asked in later)


@pytest.mark.case("C28", "C37")
def test_toy_and_simulated_models_have_a_token_that_ends_reasoning():
    assert tokenizer.encode("</think>") == [tokenizer.THINK_END]
    assert END not in range(toy.VOCABULARY)
