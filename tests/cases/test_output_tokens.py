"""Output tokens are counted as engines tell them, and what they do not tell is not made up."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.sim.config import SimConfig
from tests.cases.scene import CHAT, COMPLETIONS, chat, scene
from tests.cases.sims import sims
from tests.fakes import client
from tests.fakes.proxy import HasPort, metric
from tests.fakes.waiting import until_answer

GENERATED = "pdproxy_generation_tokens_total"
UNTOLD = "pdproxy_requests_without_usage_total"
TPOT = "pdproxy_time_per_output_token_seconds_count"
ASKS_USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("eos_odds", [8, 1 << 30], ids=["ends-by-itself", "ends-at-the-limit"])
async def test_token_ids_count_what_usage_would_have_told(
    path: str, choices: int, eos_odds: int
) -> None:
    thinker = SimConfig(eos_odds=eos_odds, reasoning=path == CHAT, reasoning_tokens=6)
    messages = [{"role": "user", "content": "Bonjour"}]
    asked: dict[str, Any] = {"prompt": "Bonjour"} if path == COMPLETIONS else {"messages": messages}
    asked |= {"stream": True, "max_tokens": 40, "n": choices, "seed": 7}

    async with sims(thinker, "--token-ids", "always") as stage:
        with_usage = await client.post(stage.proxy.port, path, asked | ASKS_USAGE)
        told = with_usage.chunks_of_json[-1]["usage"]["completion_tokens"]
        await until_counted(stage.proxy, told)
        without = await client.post(stage.proxy.port, path, asked)
        await until_counted(stage.proxy, 2 * told)
        untold, paced = await metric(stage.proxy, UNTOLD), await metric(stage.proxy, TPOT)

    assert not any(chunk.get("usage") for chunk in without.chunks_of_json)
    assert not any(b'token_ids":[' in body for body in (with_usage.body, without.body))
    assert (untold, paced) == (0, 2)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_prompts_of_a_list_are_counted_once_each_though_one_was_cut(stream: bool) -> None:
    asked = {"prompt": ["one", "two", "three"], "max_tokens": 9, "ignore_eos": True}
    asked |= {"stream": True, **ASKS_USAGE} if stream else {}
    async with sims(SimConfig(), "--token-ids", "always") as stage:
        stage.decoder.faults.recompute_after[:] = [4]
        given, uncut = await stage.both(COMPLETIONS, asked)
        last = uncut.chunks_of_json[-1] if stream else uncut.json
        await until_counted(stage.proxy, last["usage"]["completion_tokens"])
        prompts = await metric(stage.proxy, "pdproxy_prompt_tokens_total")

    assert given.status == 200
    assert prompts == last["usage"]["prompt_tokens"]


async def test_stream_that_tells_nothing_is_counted_as_such_and_not_guessed() -> None:
    async with scene([None], [None], "--token-ids", "never") as stage:
        await stage.post(CHAT, chat(stream=True, max_tokens=5))
        await stage.post(COMPLETIONS, {"model": "toy", "prompt": "x", "max_tokens": 3})
        await stage.post(CHAT, chat(stream=True, max_tokens=5, **ASKS_USAGE))
        await until_counted(stage.proxy, 8)
        of_chat = await metric(stage.proxy, UNTOLD, endpoint=CHAT)
        of_all = await metric(stage.proxy, UNTOLD)

    assert (of_chat, of_all) == (1, 1)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("ids", "untold"), [("never", 1.0), ("always", 0.0)])
async def test_of_a_client_that_leaves_only_ids_tell_what_was_made(ids: str, untold: float) -> None:
    flags = ("--token-ids", ids, "--workers", "2")
    async with scene([None], [None], *flags, process=True) as stage:
        stage.d1.token_delay_s = 0.05
        body = chat(stream=True, max_tokens=1000, **ASKS_USAGE)
        async with stage.streaming(body) as (peer, reply):
            while len(reply.events) < 4:
                await peer.read_event(reply)
        await until_answer(lambda: has_ended(stage.proxy), 10)
        found = await metric(stage.proxy, UNTOLD)
        generated = await metric(stage.proxy, GENERATED)

    assert found == untold
    assert (generated > 0) is (ids == "always")


async def has_ended(proxy: HasPort) -> bool:
    return await metric(proxy, "pdproxy_requests_total", outcome="client_disconnected") == 1


async def until_counted(proxy: HasPort, tokens: int) -> None:
    async def is_counted() -> bool:
        return await metric(proxy, GENERATED) == tokens

    await until_answer(is_counted)
