"""Tool calls that are cut, sampled ones too: the client gets the whole call, in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.sim.config import SimConfig
from tests.cases.scene import CHAT
from tests.cases.sims import Sims, sims, told
from tests.fakes.client import Reply

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Use the tool for Oslo"}],
    "tools": [TOOL],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 200,
}
CONFIGS = {
    "plain": SimConfig(),
    "reasoning": SimConfig(reasoning=True, reasoning_tokens=9),
    "three tokens a step": SimConfig(tokens_per_step=3),
}
# Behind 9 tokens of reasoning, the tool call takes some 40.
CUTS = [[4], [12], [20], [33], [8, 7, 6], [16, 1, 1, 1, 9]]


def calls_of(reply: Reply) -> list[tuple[set[str], str, Any]]:
    """Return ids, name and arguments of each call."""
    ids: dict[int, set[str]] = {}
    said: dict[int, list[str]] = {}
    for chunk in reply.chunks_of_json:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls") or []:
                function = piece["function"]
                ids.setdefault(piece["index"], set()).update([piece["id"]] if "id" in piece else [])
                parts = said.setdefault(piece["index"], ["", ""])
                parts[0] += function.get("name") or ""
                parts[1] += function.get("arguments") or ""
    return [(ids[index], name, json.loads(text)) for index, (name, text) in said.items()]


async def cut_and_uncut(stage: Sims, body: dict[str, Any], cuts: list[int], how: str) -> None:
    faults = stage.decoder.faults
    due = faults.recompute_after if how == "given back" else faults.drop_after
    due[:] = cuts
    reply, uncut = await stage.both(CHAT, body)
    await stage.until_idle()

    assert told(reply) == told(uncut)
    ((ids, name, arguments),) = calls_of(reply)
    assert len(ids) == 1
    assert name == "weather"
    assert isinstance(arguments, dict)
    assert len(due) < len(cuts)
    due.clear()


@pytest.mark.case("C37")
@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("how", ["given back", "lost"])
@pytest.mark.parametrize("temperature", [0, 0.7])
async def test_tool_call_that_is_cut_is_whole(config, how, temperature):
    body = {**BODY, "temperature": temperature}
    async with sims(CONFIGS[config], "--token-ids", "always", "--max-retries", "9") as stage:
        for cuts in CUTS:
            await cut_and_uncut(stage, body, cuts, how)


@pytest.mark.case("C37")
async def test_sampled_tool_call_of_engines_without_ids_ends_with_an_error():
    async with sims(CONFIGS["plain"], "--token-ids", "never") as stage:
        stage.decoder.faults.recompute_after[:] = [30]
        reply, _ = await stage.both(CHAT, {**BODY, "temperature": 0.7})
        await stage.until_idle()

    error = reply.chunks_of_json[-1]["error"]
    assert error["code"] == "kv_cache_exhausted"
    assert "tool call" in error["message"]
