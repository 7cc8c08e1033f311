"""Lists of prompts: a prefill, a handle and a decode for each, one answer for the client."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.core.api import Api
from pdproxy.dispatch.account import Outcome
from pdproxy.errors import EngineAnswered, PDProxyError, UpstreamLost
from tests.dispatch.stage import FakeDownstream, Stage, stage
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.waiting import until

PROMPTS = ["one", "two", "three", "four"]
WHOLE = {"model": "toy", "prompt": PROMPTS, "max_tokens": 3}
STREAM = {**WHOLE, "stream": True, "stream_options": {"include_usage": True}}
EITHER = pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])


async def run(play: Stage, body: dict[str, object]) -> FakeDownstream:
    return await play.run(FakeDownstream(), body, Api.COMPLETIONS)


def texts_of(downstream: FakeDownstream) -> dict[int, str]:
    if downstream.answer is not None:
        return {choice["index"]: choice["text"] for choice in downstream.json["choices"]}
    texts: dict[int, str] = {}
    for event in downstream.events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def usage_of(downstream: FakeDownstream) -> dict[str, object]:
    answer = downstream.json if downstream.answer is not None else downstream.events[-2]
    return dict(answer["usage"])


@EITHER
@pytest.mark.parametrize("n", [1, 2])
async def test_every_prompt_gets_its_own_handle_and_its_own_choices(body, n):
    async with stage() as play:
        downstream = await run(play, {**body, "n": n})
        play.assert_idle()

    expected = [
        toy.answer({"prompt": prompt, "n": n}, 3, choice=choice)
        for prompt in PROMPTS
        for choice in range(n)
    ]
    assert texts_of(downstream) == dict(enumerate(expected))
    assert [call.json["prompt"] for call in play.p[0].calls] == PROMPTS
    handles = {call.json["kv_transfer_params"]["remote_request_id"] for call in play.d[0].calls}
    assert len(handles) == len(PROMPTS)
    assert play.p[0].held == 0
    prompt_tokens = sum(len(prompt) for prompt in PROMPTS)
    assert usage_of(downstream)["prompt_tokens"] == prompt_tokens
    assert usage_of(downstream)["completion_tokens"] == 3 * n * len(PROMPTS)
    assert play.account.prompt_tokens == prompt_tokens
    assert play.account.output_tokens == 3 * n * len(PROMPTS)


async def test_stream_has_one_id_one_usage_and_one_end():
    async with stage() as play:
        events = (await run(play, STREAM)).events

    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1
    assert [event for event in events[:-1] if event.get("usage")] == [events[-2]]


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_prompts_in_flight_are_bounded(most):
    gate = asyncio.Event()

    async def gated(request: EngineRequest, answer: Answer) -> None:
        await gate.wait()
        await behaviours.prefill(request, answer)

    async with stage(p=[gated], max_parallel_prompts=most) as play:
        running = asyncio.get_running_loop().create_task(run(play, WHOLE))
        await play.p[0].wait_for_calls(most)
        await asyncio.sleep(0.02)
        assert len(play.p[0].calls) == most
        gate.set()
        assert len(texts_of(await running)) == len(PROMPTS)


@EITHER
async def test_part_is_tried_again_by_itself(body):
    broken = behaviours.one_after_another(behaviours.close, behaviours.decode)

    async with stage(d=[broken]) as play:
        downstream = await run(play, body)
        play.assert_idle()

    assert texts_of(downstream)[0] == toy.answer({"prompt": "one"}, 3)
    assert len(texts_of(downstream)) == len(PROMPTS)
    assert play.calls == (len(PROMPTS) + 1, len(PROMPTS) + 1)


@EITHER
async def test_first_failure_ends_the_others_and_is_the_answer(body):
    async def second_is_wrong(request: EngineRequest, answer: Answer) -> None:
        if request.json["prompt"] == "two":
            await answer.json(behaviours.error_body("too long"), 400)
        else:
            await answer.hang()

    async with stage(p=[second_is_wrong]) as play:
        downstream = FakeDownstream()
        with pytest.raises(EngineAnswered) as caught:
            await play.run(downstream, body, Api.COMPLETIONS)
        play.assert_idle()
        await until(lambda: play.p[0].open_answers == 0)

    assert caught.value.engine_status == 400
    assert not downstream.is_committed
    assert len(play.p[0].calls) == 2


async def test_error_event_of_one_part_is_the_last_thing_written():
    word = event_bytes({"choices": [{"index": 0, "text": "x", "finish_reason": None}]})
    error = event_bytes({"error": {"message": "lost my mind", "code": 500}})

    async def second_fails(request: EngineRequest, answer: Answer) -> None:
        await answer.start_stream()
        await answer.chunk(word)
        if request.json["prompt"] == "two":
            await answer.chunk(error)
            await answer.end()
        while True:
            await answer.chunk(word)
            await asyncio.sleep(0)

    async with stage(d=[second_fails]) as play:
        downstream = FakeDownstream()
        with pytest.raises(PDProxyError) as caught:
            await play.run(downstream, STREAM, Api.COMPLETIONS)
        play.assert_idle()

    assert caught.value.is_told
    assert [event for event in downstream.events if "error" in event] == [downstream.events[-1]]


async def test_lost_part_after_output_fails_the_stream():
    word = event_bytes({"choices": [{"index": 0, "text": "x", "finish_reason": None}]})

    async with stage(d=[behaviours.stream([word], then="reset")]) as play:
        downstream = FakeDownstream()
        with pytest.raises(UpstreamLost):
            await play.run(downstream, STREAM, Api.COMPLETIONS)
        play.assert_idle()

    assert "[DONE]" not in downstream.events


async def test_client_that_leaves_ends_all_parts():
    async with stage(p=[behaviours.hang]) as play:
        running = asyncio.get_running_loop().create_task(run(play, WHOLE))
        await play.p[0].wait_for_calls(2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        play.assert_idle()
        await until(lambda: play.p[0].open_answers == 0)
    assert running.cancelled()


async def test_list_that_needs_no_prefill_goes_whole_to_one_decoder():
    async with stage() as play:
        await run(play, {**WHOLE, "echo": True, "logprobs": 1})

    assert play.calls == (0, 1)
    assert play.d[0].only_call.json["prompt"] == PROMPTS


@pytest.mark.parametrize("prompt", ["one", ["one"], [1, 2]], ids=["text", "list-of-one", "ids"])
async def test_single_prompt_is_no_batch(prompt):
    async with stage() as play:
        downstream = await run(play, {**WHOLE, "prompt": prompt})

    assert play.calls == (1, 1)
    assert play.p[0].only_call.json["prompt"] == prompt
    assert len(texts_of(downstream)) == 1
    assert play.account.outcome is Outcome.SUCCESS
