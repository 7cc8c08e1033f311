"""Sampled JSON under a grammar that is cut: the client gets one value, whole, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.sim.config import SimConfig
from tests.cases.scene import CHAT
from tests.cases.sims import Sims, sims, told
from tests.fakes.client import Reply

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "far": {"type": "boolean"},
    },
    "required": ["city", "n", "far"],
}
TOLD = f"Answer in English. answer in json: {json.dumps(CITY)}"
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": TOLD}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 200,
    "temperature": 0.7,
}
CONFIGS = {
    "plain": SimConfig(),
    "reasoning": SimConfig(reasoning=True, reasoning_tokens=9),
    "three tokens a step": SimConfig(tokens_per_step=3),
}
# 27 tokens of JSON, behind 9 of reasoning or none.
CUTS = [*([cut] for cut in range(1, 28)), [12, 3, 2], [10, 3, 3, 3]]
ASKED: dict[str, dict[str, Any]] = {
    "response_format": FORMAT,
    "structured_outputs": {"structured_outputs": {"json": CITY}},
}


async def cut_and_uncut(stage: Sims, body: dict[str, Any], cuts: list[int]) -> tuple[Reply, Reply]:
    stage.decoder.faults.recompute_after[:] = cuts
    reply, uncut = await stage.both(CHAT, body)
    await stage.until_idle()
    assert len(stage.decoder.faults.recompute_after) < len(cuts)
    stage.decoder.faults.recompute_after.clear()
    return reply, uncut


@pytest.mark.case("C37")
@pytest.mark.parametrize("config", sorted(CONFIGS))
@pytest.mark.parametrize("asked", sorted(ASKED))
async def test_sampled_json_that_is_cut_is_whole(config, asked):
    body = {**BODY, **ASKED[asked]}
    async with sims(CONFIGS[config], "--token-ids", "always") as stage:
        for cuts in CUTS:
            reply, uncut = await cut_and_uncut(stage, body, cuts)

            assert told(reply) == told(uncut)
            assert reply.text.count("{") == 1
            assert json.loads(reply.text).keys() == CITY["properties"].keys()


@pytest.mark.case("C37")
async def test_sampled_json_of_a_completion_that_is_cut_is_whole():
    prompt = f"<|user|>\n{TOLD}<|end|>\n<|assistant|>\n"
    body = {**BODY, "prompt": prompt, "structured_outputs": {"json": CITY}}
    del body["messages"]
    async with sims(CONFIGS["plain"], "--token-ids", "always") as stage:
        stage.decoder.faults.recompute_after[:] = [7, 4]
        reply, uncut = await stage.both("/v1/completions", body)
        await stage.until_idle()

    assert told(reply) == told(uncut)
    assert json.loads(reply.text).keys() == CITY["properties"].keys()


@pytest.mark.case("C37")
async def test_model_that_goes_on_in_another_way_makes_an_error():
    """Without the grammar this one has never heard of JSON."""
    body = {**BODY, **FORMAT, "messages": [{"role": "user", "content": "Where is it?"}]}
    async with sims(CONFIGS["plain"], "--token-ids", "always") as stage:
        reply, _ = await cut_and_uncut(stage, body, [8])

    error = reply.chunks_of_json[-1]["error"]
    assert error["code"] == "kv_cache_exhausted"
    assert "without the grammar its JSON" in error["message"]
