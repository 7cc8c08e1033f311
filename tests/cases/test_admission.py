"""Limits on what runs at once, and decoders whose KV cache is full."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdproxy.sim.config import SimConfig
from tests.cases.scene import CHAT, COMPLETIONS, Scene, chat, scene
from tests.cases.sims import Sims, sims
from tests.fakes import behaviours, client
from tests.fakes.client import Reply
from tests.fakes.proxy import metric

# Room for five answers of the length below, and slow enough that all are there at once.
SMALL = SimConfig(num_blocks=128, decode_base_s=0.002, max_model_len=2048)
WORDS = "Un deux trois quatre cinq six sept huit neuf dix onze douze. "


def prompt(number: int, words: int = 1, **more: object) -> dict[str, object]:
    text = f"{number}: " + WORDS * words
    return {"prompt": text, "max_tokens": 250, "ignore_eos": True, "stream": True, **more}


async def burst(stage: Sims, count: int, first: int = 0) -> list[Reply]:
    asked = (prompt(first + number) for number in range(count))
    sent = (client.post(stage.proxy.port, COMPLETIONS, each) for each in asked)
    return list(await asyncio.gather(*sent))


async def storm(*args: str) -> tuple[int, list[Reply]]:
    """Return how often the decoder gave an answer back, and what the clients got."""
    more = ("--max-rounds", "60", "--queue-timeout", "60", *args)
    async with sims(SMALL, *more) as stage:
        # The first burst teaches what the decoder can hold.
        await burst(stage, 12)
        before = stage.decoder.engine.counters.preemptions
        replies = await burst(stage, 40, first=100)
        await stage.until_idle()
        return stage.decoder.engine.counters.preemptions - before, replies


@pytest.mark.slow
@pytest.mark.case("C31")
async def test_requests_wait_for_kv_cache_rather_than_to_be_computed_again() -> None:
    without, _ = await storm("--kv-queue=off")
    recomputes, replies = await storm("--kv-queue=on")

    assert {reply.status for reply in replies} == {200}
    assert not any(b'"error"' in reply.body for reply in replies)
    assert without > 10
    assert recomputes <= without / 3, (recomputes, without)


@pytest.mark.slow
async def test_long_prompts_and_low_priority_do_not_starve() -> None:
    """Short and important requests keep coming; a long and a humble one are answered meanwhile."""
    async with sims(SMALL, "--max-rounds=60", "--queue-timeout=20", "--kv-queue=on") as stage:
        await burst(stage, 12)
        is_over = False

        async def stream_of_short_ones(number: int) -> None:
            while not is_over:
                body = prompt(number, max_tokens=60, priority=-100)
                await client.post(stage.proxy.port, COMPLETIONS, body)

        short = [
            asyncio.get_running_loop().create_task(stream_of_short_ones(number))
            for number in range(24)
        ]
        long = client.post(stage.proxy.port, COMPLETIONS, prompt(500, words=20))
        humble = client.post(stage.proxy.port, COMPLETIONS, prompt(501, priority=100))
        async with asyncio.timeout(60):
            replies = await asyncio.gather(long, humble)
        is_over = True
        await asyncio.gather(*short)

    assert [reply.status for reply in replies] == [200, 200]
    assert not any(b'"error"' in reply.body for reply in replies)


async def test_refusal_is_an_openai_error_with_retry_after_and_shows_in_the_metrics() -> None:
    args = ("--max-in-flight=1", "--max-queue=0")
    async with scene([None], [behaviours.late(0.5, behaviours.decode)], *args) as stage:
        running = asyncio.get_running_loop().create_task(stage.post(CHAT, chat()))
        await stage.p1.wait_for_calls(1)
        refused = await stage.post(CHAT, chat())
        page = (await stage.get("/metrics")).body.decode()
        answered = await running

    assert answered.status == 200
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json["error"]["type"] == "rate_limit_error"
    assert refused.json["error"]["code"] == "queue_full"
    assert 'pdproxy_rejected_total{reason="queue_full"} 1.0' in page
    assert "pdproxy_admission_queue_depth 0.0" in page


async def test_request_that_waited_shows_it_in_metrics() -> None:
    async with scene([None], [None], "--max-per-decoder=1") as stage:
        stage.d1.token_delay_s = 0.02
        replies = await asyncio.gather(*(stage.post(CHAT, chat(max_tokens=3)) for _ in range(3)))
        page = (await stage.get("/metrics")).body.decode()

    assert {reply.status for reply in replies} == {200}
    assert "pdproxy_admission_wait_seconds_count 2.0" in page


async def test_decoder_that_is_chosen_since_the_other_is_full_is_said_to_be() -> None:
    async with scene([None], [None, None], "--max-per-decoder=1") as stage:
        for engine in stage.decoders:
            engine.token_delay_s = 0.05
        await asyncio.gather(*(stage.post(CHAT, chat(max_tokens=9)) for _ in range(2)))
        name = "pdproxy_routing_decisions_total"
        full = await metric(stage.proxy, name, role="decode", reason="others_full")
        failed = await metric(stage.proxy, name, role="decode", reason="others_failed")

    assert (full, failed) == (1, 0)


async def without_prefiller(stage: Scene) -> None:
    gone = {"type": "prefill", "instances": [stage.p1.address]}
    assert (await stage.post("/instances/remove", gone)).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_decoder_goes_alone_without_prefillers_if_told_to(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdproxy.access")
    async with scene([None], [None], "--on-no-prefiller=decode-only") as stage:
        await without_prefiller(stage)
        assert (await stage.get("/ready")).status == 200
        reply = await stage.post(CHAT, chat(max_tokens=2, stream=stream))
        page = (await stage.get("/metrics")).body.decode()

    assert reply.status == 200
    assert 'pdproxy_prefill_skipped_total{reason="no_prefiller"} 1.0' in page
    assert " prefill_skipped=no_prefiller " in caplog.text


async def test_without_prefillers_a_request_fails_by_default_with_a_time_to_come_back() -> None:
    async with scene([None], [None]) as stage:
        await without_prefiller(stage)
        assert (await stage.get("/ready")).status == 503
        reply = await stage.post(CHAT, chat())

    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert stage.decode_calls == 0
