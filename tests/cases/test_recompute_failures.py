"""Answers that cannot be continued end with an error that says so; nothing is kept for them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise

import pytest

from tests.cases.cuts import HASTE, cut_after, decodes, prefills
from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import behaviours, client, toy
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.client import assert_ends_in_error, assert_whole_stream
from tests.fakes.proxy import metric, metrics
from tests.fakes.waiting import until

ROUNDS = 5
REQUESTS = "pdproxy_requests_total"
FEW = ("--max-rounds", str(ROUNDS))


@pytest.mark.case("C31")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_decoders_without_any_room_are_asked_less_and_less_often(stream):
    full = behaviours.recompute(0)

    async with scene([None], [full, full], *FEW, "--retry-delay", "0.05") as stage:
        reply = await stage.post(CHAT, chat(stream=stream, max_tokens=9))
        await stage.assert_quiescent()

    assert reply.status == 503
    assert "limit of rounds" in reply.error["message"]
    calls = prefills(stage)
    assert len(calls) == ROUNDS
    gaps = [second.at_s - first.at_s for first, second in pairwise(calls)]
    for number, gap in enumerate(gaps):
        assert gap >= 0.75 * 0.05 * 2**number


@pytest.mark.case("C31")
@pytest.mark.parametrize("ids", ["auto", "always"])
async def test_one_token_a_round_ends_at_the_limit_of_rounds(ids):
    body = chat(stream=True, max_tokens=100)
    full = behaviours.recompute(1)

    async with scene([None], [full], *FEW, *HASTE, "--token-ids", ids) as stage:
        reply = await stage.post(CHAT, body)
        assert await metric(stage.proxy, "pdproxy_recomputes_total", result="limit") == 1
        await stage.assert_quiescent()

    error = assert_ends_in_error(reply)
    assert "limit of rounds" in error["message"]
    assert len(prefills(stage)) == len(decodes(stage)) == ROUNDS
    said = "".join(client.text_of(chunk) for chunk in reply.chunks_of_json)
    assert said == toy.answer(body, ROUNDS)


@pytest.mark.case("C31")
async def test_storm_leaves_other_traffic_alone():
    async def full_for_some(request: EngineRequest, answer: Answer) -> None:
        is_stuck = "stuck" in request.body.decode()
        await (behaviours.recompute(0) if is_stuck else behaviours.decode)(request, answer)

    storm = chat(messages=[{"role": "user", "content": "stuck"}], stream=True, max_tokens=9)
    body = chat(stream=True, max_tokens=3)

    async with scene([None], [full_for_some], "--max-rounds", "3") as stage:
        stuck = [asyncio.create_task(stage.post(CHAT, storm)) for _ in range(50)]
        others = [await stage.post(CHAT, body) for _ in range(20)]
        ended = await asyncio.gather(*stuck)
        await stage.assert_quiescent()

    assert {reply.status for reply in ended} == {503}
    for reply in others:
        assert_whole_stream(reply)
        assert reply.text == toy.answer(body, 3)
    assert len(prefills(stage)) == 50 * 3 + 20


@pytest.mark.case("C31")
@pytest.mark.parametrize("tokens", [0, 1, 2])
async def test_storm_takes_a_fifth_of_a_prefillers_time(tokens):
    """So other traffic keeps four fifths of its rate, however busy the prefiller is."""
    seen: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    now, most = 0, 0

    async def noted(request: EngineRequest, answer: Answer) -> None:
        nonlocal now, most
        name = str(request.json["messages"][0]["content"])
        seen[name] += 1
        is_further = seen[name] > 1
        now += is_further
        most = max(most, now)
        began_s = time.monotonic()
        await asyncio.sleep(0.01)
        if is_further:
            spans.append((began_s, time.monotonic()))
        now -= is_further
        await behaviours.prefill(request, answer)

    full = behaviours.recompute(tokens)
    bodies = [
        chat(messages=[{"role": "user", "content": f"stuck {number}"}], max_tokens=9)
        for number in range(20)
    ]

    args = ("--max-rounds", "3", "--token-ids", "never", *HASTE)
    async with scene([noted], [full], *args) as stage:
        await asyncio.gather(*(stage.post(CHAT, body) for body in bodies))
        await stage.assert_quiescent()

    assert most == 1
    assert len(spans) == 20 * 2
    busy_s = sum(end - begin for begin, end in spans)
    whole_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    longest_s = max(end - begin for begin, end in spans)
    assert busy_s <= 0.2 * whole_s + longest_s


@pytest.mark.case("C31")
async def test_one_request_has_one_prefill_at_a_time():
    running, most = 0, 0

    async def counted(request: EngineRequest, answer: Answer) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        await behaviours.prefill(request, answer)
        running -= 1

    async with scene([counted, counted], [cut_after(2, 2, 2)], *HASTE) as stage:
        assert_whole_stream(await stage.post(CHAT, chat(stream=True, max_tokens=9)))

    assert most == 1


REFUSALS = [
    pytest.param(behaviours.error(500), 2, id="500"),
    pytest.param(behaviours.error(400), 1, id="400"),
    pytest.param(behaviours.reset, 2, id="reset"),
    pytest.param(behaviours.hang, 2, id="hang"),
]


@pytest.mark.case("C32")
@pytest.mark.parametrize(("refusal", "tries"), REFUSALS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_failing_prefill_of_a_further_round_is_told(refusal, tries, stream):
    body = chat(stream=stream, max_tokens=30)
    p = behaviours.one_after_another(behaviours.prefill, refusal)
    args = ("--max-retries", "2", "--prefill-timeout", "0.5", *HASTE)

    async with scene([p, p], [cut_after(20)], *args) as stage:
        reply = await stage.post(CHAT, body)
        failed = await metric(stage.proxy, "pdproxy_recomputes_total", result="failed")
        ended = [each for each in await metrics(stage.proxy) if each.name == REQUESTS]
        await stage.assert_quiescent()

    if stream:
        assert_ends_in_error(reply)
        assert reply.text == toy.answer(body, 20)
        assert ends_of_text(reply) == []
    else:
        assert reply.status in (400, 500, 502, 503, 504)
        assert reply.error["message"]
    assert failed == 1
    assert sum(each.value for each in ended if each.labels["outcome"] != "success") == 1
    # A kept connection that closes without an answer is tried once more.
    most = tries + (refusal is behaviours.reset)
    assert tries <= len(prefills(stage)) - 1 <= most
    assert len(decodes(stage)) == 1


def ends_of_text(reply: client.Reply) -> list[str]:
    chunks = [chunk for chunk in reply.chunks_of_json if "choices" in chunk]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [each["finish_reason"] for each in choices if each.get("finish_reason")]


@pytest.mark.case("C32")
async def test_dead_prefillers_of_a_further_round_are_told():
    body = chat(stream=True, max_tokens=30)

    async with scene([None], [None], *HASTE) as stage:

        async def kills_the_prefiller(request: EngineRequest, answer: Answer) -> None:
            await stage.p1.stop()
            await behaviours.recompute(20)(request, answer)

        stage.d1.behaviour = kills_the_prefiller
        reply = await stage.post(CHAT, body)

    assert_ends_in_error(reply)
    assert reply.text == toy.answer(body, 20)


@pytest.mark.case("C24")
async def test_with_recompute_off_the_end_is_an_error():
    body = chat(stream=True, max_tokens=30)

    async with scene([None], [behaviours.recompute(5)], "--recompute", "off") as stage:
        reply = await stage.post(CHAT, body)
        whole = await stage.post(CHAT, {**body, "stream": False})

    assert_ends_in_error(reply)
    assert reply.text == toy.answer(body, 5)
    assert whole.status == 503
    for each in (reply, whole):
        assert b'"recomputed"' not in each.body


@pytest.mark.case("C41")
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_client_that_leaves_during_the_second_prefill_ends_it(how):
    p = behaviours.one_after_another(behaviours.prefill, behaviours.hang)

    async with scene([p], [cut_after(5)]) as stage:
        async with stage.streaming(chat(stream=True, max_tokens=9)) as (connection, _):
            await until(lambda: len(prefills(stage)) == 2)
            second = prefills(stage)[1]
            connection.leave(how)
            async with asyncio.timeout(1.0):
                await second.finished.wait()
        await stage.assert_quiescent()

    assert second.closed_early
    assert len(decodes(stage)) == 1


@pytest.mark.case("C41")
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_client_that_leaves_during_the_second_decode_ends_it(how):
    async with scene([None], [cut_after(5, then=behaviours.hang)]) as stage:
        async with stage.streaming(chat(stream=True, max_tokens=9)) as (connection, _):
            await until(lambda: len(decodes(stage)) == 2)
            connection.leave(how)
        await stage.assert_quiescent()

    assert decodes(stage)[1].closed_early


@pytest.mark.case("C47")
async def test_load_of_others_stays_while_a_request_is_recomputed():
    may_speak = asyncio.Event()
    waits = chat(messages=[{"role": "user", "content": "waits " * 9}], stream=True, max_tokens=3)
    cut = cut_after(2, 2, 2, 2)

    async def by_request(request: EngineRequest, answer: Answer) -> None:
        if "waits" in request.body.decode():
            await may_speak.wait()
            await behaviours.decode(request, answer)
            return
        await cut(request, answer)

    async with scene([None], [by_request], *HASTE) as stage:
        first = asyncio.create_task(stage.post(CHAT, waits))
        await until(lambda: decodes(stage))
        share = await prefiller_load(stage)
        assert share == len(toy.prompts(waits)[0])
        other = asyncio.create_task(stage.post(CHAT, chat(stream=True, max_tokens=12)))
        while not other.done():
            assert await prefiller_load(stage) >= share
            await asyncio.sleep(0.005)
        assert await prefiller_load(stage) == share
        may_speak.set()
        assert_whole_stream(await first)
        await stage.assert_quiescent()

    assert_whole_stream(await other)
    assert len(prefills(stage)) == 6


async def prefiller_load(stage: Scene) -> float:
    return await metric(stage.proxy, "pdproxy_instance_kv_tokens", role="prefill")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_further_round_that_an_engine_refuses_is_not_the_clients_fault(stream):
    refusal = behaviours.error(400)
    p = behaviours.one_after_another(behaviours.prefill, refusal)

    async with scene([p], [behaviours.recompute(3)], *HASTE) as stage:
        reply = await stage.post(CHAT, chat(stream=stream, max_tokens=9))
        ended = await metric(stage.proxy, REQUESTS, outcome="engine_error")
        await stage.assert_quiescent()

    error = assert_ends_in_error(reply) if stream else reply.error
    assert reply.status == (200 if stream else 503)
    assert error["code"] == "kv_cache_exhausted"
    assert "cannot be continued: the engine answered 400: " in error["message"]
    assert ended == 1


async def test_every_further_round_is_counted_with_what_came_of_it():
    d = cut_after(20, 20, 20)

    async with scene([None], [d, d], *HASTE) as stage:
        await stage.post(CHAT, chat(stream=True, max_tokens=80))
        counts = {
            result: await metric(stage.proxy, "pdproxy_recomputes_total", result=result)
            for result in ("cut", "resumed", "failed", "limit")
        }

    assert counts == {"cut": 2, "resumed": 1, "failed": 0, "limit": 0}
