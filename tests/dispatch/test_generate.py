"""One exchange against fake engines on sockets: what is tried, what is not, what is left behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from pdproxy.core.instance import Role
from pdproxy.core.load import Load
from pdproxy.dispatch.account import Outcome
from pdproxy.errors import (
    EngineAnswered,
    NoInstance,
    PDProxyError,
    RecomputeUnsupported,
    UpstreamLost,
    UpstreamProtocol,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from pdproxy.upstream.limits import Timeouts
from tests.dispatch.stage import FakeDownstream, Stage, stage
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest, event_bytes
from tests.fakes.waiting import until

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
EITHER = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])

ROLE = event_bytes({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
WORD = event_bytes({"choices": [{"index": 0, "delta": {"content": "x"}}]})
FAILED_LOAD = event_bytes({"error": {"message": "KV load failed", "code": 500}})
BUSY = behaviours.error(429, headers=[("Retry-After", "7")])
NO_HANDLE = behaviours.json_answer({"choices": [], "kv_transfer_params": None})


def text_of(downstream: FakeDownstream) -> str:
    if downstream.answer is not None:
        return str(downstream.json["choices"][0]["message"]["content"])
    events = [event for event in downstream.events if event != "[DONE]" and event["choices"]]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def assert_answered(downstream: FakeDownstream) -> None:
    assert text_of(downstream) == toy.answer(CHAT, 4)


def handles(play: Stage) -> list[str]:
    """The handles that decoders were sent, in order of arrival."""
    calls = sorted((c for e in play.d for c in e.calls), key=lambda call: call.at_s)
    return [str(call.json["kv_transfer_params"]["remote_request_id"]) for call in calls]


async def fails(play: Stage, body: dict[str, Any]) -> tuple[PDProxyError, FakeDownstream]:
    downstream = FakeDownstream()
    with pytest.raises(PDProxyError) as caught:
        await play.run(downstream, body)
    play.assert_idle()
    return caught.value, downstream


# --- when all is well


@EITHER
async def test_prefill_then_decode_with_the_handle(body):
    async with stage() as play:
        downstream = await play.run(FakeDownstream(), body)
        play.assert_idle()

    assert_answered(downstream)
    prefill, decode = play.p[0].only_call, play.d[0].only_call
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
    assert decode.json.items() >= body.items()
    assert play.p[0].held == 0
    assert [outcome for _, outcome, _ in play.observer.attempts] == ["success"] * 2
    account = play.account
    assert (account.prefill_attempts, account.decode_attempts) == (1, 1)
    assert (account.output_tokens, account.finish_reasons) == (4, ["length"])
    assert account.is_model_known
    assert (account.timeline.ttft_s is not None) == body.get("stream", False)


async def test_rank_of_an_engine_is_meant_for_the_decoder():
    async with stage() as play:
        await play.run(FakeDownstream(), CHAT, headers=[("x-data-parallel-rank", "1")])

    assert "x-data-parallel-rank" not in play.p[0].only_call.headers
    assert play.d[0].only_call.headers["x-data-parallel-rank"] == "1"


@pytest.mark.case("C14")
@EITHER
@pytest.mark.parametrize("told", [3, 0, None, ...], ids=["3", "0", "null", "missing"])
async def test_cached_tokens_are_the_prefillers(body, told):
    async with stage() as play:
        play.p[0].cached_tokens, play.d[0].cached_tokens = told, 8
        downstream = await play.run(FakeDownstream(), body)

    usage = downstream.events[-2]["usage"] if body is STREAM else downstream.json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": told if isinstance(told, int) else 0}


@EITHER
async def test_request_that_needs_no_prefill_goes_to_a_decoder_alone(body):
    async with stage() as play:
        await play.run(FakeDownstream(), {**body, "prompt_logprobs": 1})
        play.assert_idle()

    assert play.calls == (0, 1)
    assert "kv_transfer_params" not in play.d[0].only_call.json
    assert play.account.is_model_known


@pytest.mark.case("C12")
@EITHER
async def test_without_a_handle_the_decoder_computes_the_prompt(body):
    async with stage(p=[NO_HANDLE]) as play:
        downstream = await play.run(FakeDownstream(), body)
        play.assert_idle()

    assert_answered(downstream)
    assert "kv_transfer_params" not in play.d[0].only_call.json
    assert (play.observer.missing, play.observer.abandoned) == (1, [])


@pytest.mark.case("C48")
async def test_each_leg_is_charged_while_it_runs_and_no_longer():
    gates = {"prefill": asyncio.Event(), "decode": asyncio.Event()}
    seen: list[tuple[Load, Load]] = []

    async def gated(request: EngineRequest, answer: Answer) -> None:
        await gates[request.engine.role].wait()
        await behaviours.default_for(request.engine.role)(request, answer)

    async with stage(p=[gated], d=[gated]) as play:
        p, d = play.instance(play.p[0]), play.instance(play.d[0])
        running = asyncio.get_running_loop().create_task(play.run(FakeDownstream(), STREAM))
        for engine in (play.p[0], play.d[0]):
            await engine.wait_for_calls(1)
            seen.append((play.fleet.load(p), play.fleet.load(d)))
            gates[engine.role].set()
        await asyncio.wait_for(running, 10)
        play.assert_idle()

    (computing, idle), (pinned, decoding) = seen
    assert (computing.requests, idle.requests) == (1, 0)
    assert computing.compute_tokens > 0
    assert (pinned.compute_tokens, pinned.kv_tokens > 0) == (0, True)
    assert decoding.kv_tokens == pinned.kv_tokens + 4


# --- what is tried again


@EITHER
async def test_failed_prefiller_is_left_for_another(body):
    async with stage(p=[behaviours.error(500), None]) as play:
        downstream = await play.run(FakeDownstream(), body)
        play.assert_idle()

    assert_answered(downstream)
    assert [len(engine.calls) for engine in play.p] == [1, 1]
    assert play.observer.retries == [(Role.PREFILL, "status_5xx")]


@EITHER
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        pytest.param(behaviours.close, "lost", id="closed"),
        pytest.param(behaviours.reset, "lost", id="reset"),
        pytest.param(behaviours.error(503), "status_5xx", id="503"),
        pytest.param(behaviours.error(408), "status_4xx", id="408"),
        pytest.param(BUSY, "status_4xx", id="429"),
        pytest.param(behaviours.raw([b"hello\r\n\r\n"], then="close"), "protocol", id="no-http"),
        pytest.param(
            behaviours.stream([ROLE, FAILED_LOAD]), "status_5xx", id="error-after-the-role"
        ),
        pytest.param(behaviours.stream([ROLE], then="reset"), "lost", id="lost-after-the-role"),
        pytest.param(behaviours.stream([ROLE]), "lost", id="ended-after-the-role"),
    ],
)
async def test_decoder_that_may_have_used_the_handle_costs_a_fresh_one(body, wrong, reason):
    async with stage(d=[wrong, None]) as play:
        downstream = await play.run(FakeDownstream(), body)
        play.assert_idle()

    assert_answered(downstream)
    assert play.calls == (2, 2)
    assert len(set(handles(play))) == 2
    assert [len(engine.calls) for engine in play.d] == [1, 1]
    assert play.observer.retries == [(Role.DECODE, reason)]


@EITHER
async def test_refusing_decoder_leaves_the_handle_to_another(body):
    async with stage(d=[None, None]) as play:
        await play.d[0].stop()
        downstream = await play.run(FakeDownstream(), body)
        play.assert_idle()

    assert_answered(downstream)
    assert play.calls == (1, 1)
    assert play.observer.abandoned == []
    assert play.observer.retries == [(Role.DECODE, "connect")]


async def test_handle_that_is_too_old_is_replaced():
    async with stage(d=[None, None], kv_handle_ttl_s=-1) as play:
        await play.d[0].stop()
        downstream = await play.run(FakeDownstream(), STREAM)
        play.assert_idle()

    assert_answered(downstream)
    assert play.calls == (2, 1)
    assert play.observer.abandoned == ["released"]


async def test_silent_decoder_is_left_after_the_first_token_timeout():
    async with stage(d=[behaviours.stream([ROLE], then="hang"), None], first_token_s=0.7) as play:
        downstream = await play.run(FakeDownstream(), STREAM)
        await until(lambda: play.d[0].calls[0].closed_early)

    assert_answered(downstream)
    assert play.observer.retries == [(Role.DECODE, "timeout")]


async def test_prefiller_that_answers_no_json_is_left():
    broken = behaviours.raw([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"], then="keep")

    async with stage(p=[broken, None]) as play:
        assert_answered(await play.run(FakeDownstream(), CHAT))

    assert play.observer.retries == [(Role.PREFILL, "protocol")]


# --- what is not


@pytest.mark.case("C72")
@EITHER
@pytest.mark.parametrize("most", [1, 3])
async def test_prefill_attempts_are_bounded(body, most):
    async with stage(p=[behaviours.error(500)], max_attempts=most) as play:
        error, downstream = await fails(play, body)

    assert isinstance(error, EngineAnswered)
    assert play.calls == (most, 0)
    assert not downstream.is_committed


@pytest.mark.case("C72")
@EITHER
@pytest.mark.parametrize("most", [1, 3])
async def test_decode_attempts_are_bounded_and_prefills_with_them(body, most):
    async with stage(d=[behaviours.error(500)], max_attempts=most) as play:
        error, downstream = await fails(play, body)

    assert isinstance(error, EngineAnswered)
    assert play.calls == (most, most)
    assert not downstream.is_committed


async def test_too_old_handle_does_not_raise_the_bound():
    async with stage(
        p=[behaviours.error(500), None], d=[None, None], max_attempts=2, kv_handle_ttl_s=-1
    ) as play:
        await play.d[0].stop()
        error, _ = await fails(play, CHAT)

    assert isinstance(error, UpstreamUnreachable)
    assert play.calls == (2, 0)
    assert play.observer.abandoned == ["released"]


@pytest.mark.case("C06")
@EITHER
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
@pytest.mark.parametrize("role", list(Role))
async def test_clients_fault_is_not_tried_again(body, status, role):
    wrong = [behaviours.error(status), None]
    engines: dict[str, Any] = {"p": wrong} if role is Role.PREFILL else {"d": wrong}

    async with stage(**engines) as play:
        error, _ = await fails(play, body)

    assert isinstance(error, EngineAnswered)
    assert error.engine_status == status
    assert play.calls == ((1, 0) if role is Role.PREFILL else (1, 1))


@pytest.mark.case("C03", "C74")
@pytest.mark.parametrize("role", list(Role))
async def test_busy_answer_passes_when_all_are_busy(role):
    engines: dict[str, Any] = {"p" if role is Role.PREFILL else "d": [BUSY, BUSY]}

    async with stage(**engines) as play:
        error, _ = await fails(play, CHAT)

    assert isinstance(error, EngineAnswered)
    assert ("retry-after", "7") in error.headers
    assert [len(e.calls) for e in (play.p if role is Role.PREFILL else play.d)] == [1, 1]


@pytest.mark.case("C03")
@pytest.mark.parametrize("role", list(Role))
async def test_busy_instance_is_not_asked_again_when_the_others_fail(role):
    engines: dict[str, Any] = {"p" if role is Role.PREFILL else "d": [BUSY, None]}

    async with stage(**engines) as play:
        busy, other = play.p if role is Role.PREFILL else play.d
        await other.stop()
        error, _ = await fails(play, CHAT)

    assert isinstance(error, EngineAnswered)
    assert ("retry-after", "7") in error.headers
    assert len(busy.calls) == 1


async def test_no_decoder_costs_no_prefill():
    async with stage(d=[]) as play:
        error, _ = await fails(play, CHAT)

    assert isinstance(error, NoInstance)
    assert play.calls == (0, 0)


async def test_no_prefiller_is_told():
    async with stage(p=[]) as play:
        error, _ = await fails(play, CHAT)

    assert isinstance(error, NoInstance)
    assert play.calls == (0, 0)


@EITHER
async def test_recompute_is_told_and_never_shown(body):
    async with stage(d=[behaviours.recompute(2), None]) as play:
        error, downstream = await fails(play, body)

    assert isinstance(error, RecomputeUnsupported)
    assert downstream.answer is None
    assert b"recomputed" not in b"".join(downstream.blocks)


@pytest.mark.case("C71")
@pytest.mark.parametrize("count", [1, 5])
async def test_nothing_is_tried_again_after_output(count):
    async with stage(d=[behaviours.stream([ROLE, *[WORD] * count], then="reset"), None]) as play:
        error, downstream = await fails(play, STREAM)

    assert isinstance(error, UpstreamLost)
    assert text_of(downstream) == "x" * count
    assert play.calls == (1, 1)


async def test_engines_own_error_event_after_output_is_told_once():
    async with stage(d=[behaviours.stream([ROLE, WORD, FAILED_LOAD])]) as play:
        error, downstream = await fails(play, STREAM)

    assert error.is_told
    assert [list(event) for event in downstream.events] == [["choices"], ["choices"], ["error"]]


@pytest.mark.case("C05")
@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_failed_generation_passes_and_counts_as_failed(reason):
    whole = {"choices": [{"index": 0, "message": {}, "finish_reason": reason}]}

    async with stage(d=[behaviours.json_answer(whole)]) as play:
        downstream = await play.run(FakeDownstream(), CHAT)

    assert downstream.json == whole
    assert play.account.outcome is Outcome.ENGINE_ERROR


async def test_decoder_that_answers_no_json_is_an_error():
    broken = behaviours.raw([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"], then="keep")

    async with stage(d=[broken], max_attempts=1) as play:
        error, _ = await fails(play, CHAT)

    assert isinstance(error, UpstreamProtocol)


async def test_internal_fields_of_a_whole_answer_stay_inside():
    whole = {"choices": [], "kv_transfer_params": {"remote_host": "secret"}}

    async with stage(d=[behaviours.json_answer(whole)]) as play:
        downstream = await play.run(FakeDownstream(), CHAT)

    assert downstream.json == {"choices": []}


# --- a client that leaves


@pytest.mark.case("C42", "C43", "C44")
@pytest.mark.parametrize(
    ("engines", "body", "heads", "abandoned"),
    [
        pytest.param({"p": [behaviours.hang]}, CHAT, 0, 0, id="prefill"),
        pytest.param({"d": [behaviours.hang]}, CHAT, 1, 1, id="decode-whole"),
        pytest.param({"d": [behaviours.hang]}, STREAM, 1, 1, id="decode-before-the-head"),
        pytest.param(
            {"d": [behaviours.stream([], then="hang")]}, STREAM, 2, 1, id="after-the-head"
        ),
        pytest.param(
            {"d": [behaviours.stream([ROLE], then="hang")]}, STREAM, 2, 1, id="after-the-role"
        ),
        pytest.param(
            {"d": [behaviours.stream([ROLE, WORD], then="hang")]}, STREAM, 2, 0, id="in-the-middle"
        ),
    ],
)
async def test_cancelled_request_leaves_nothing(engines, body, heads, abandoned):
    async with stage(**engines) as play:
        running = asyncio.get_running_loop().create_task(play.run(FakeDownstream(), body))
        last = play.p[0] if "p" in engines else play.d[0]
        await last.wait_for_calls(1)
        await until(lambda: play.client.heads == heads)

        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        play.assert_idle()
        await until(lambda: last.open_answers == 0)
        assert last.calls[0].closed_early
        await until(lambda: play.orphans.is_idle)
        assert play.observer.abandoned == ["released"] * abandoned
        assert play.observer.attempts[-1][1] == "abandoned"


async def test_client_that_breaks_while_it_is_written_to_is_an_abandoned_attempt():
    class Broken(FakeDownstream):
        async def start(  # type: ignore[explicit-override]  # typing has it from 3.12
            self, headers: Any
        ) -> None:
            raise ConnectionResetError

    async with stage() as play:
        with pytest.raises(ConnectionResetError):
            await play.run(Broken(), STREAM)
        play.assert_idle()

    assert [outcome for _, outcome, _ in play.observer.attempts] == ["success", "abandoned"]


# --- what the operator is told


async def test_failures_are_logged_without_the_prompt(caplog: pytest.LogCaptureFixture):
    body = {**CHAT, "messages": [{"role": "user", "content": "PROMPT-XYZ"}]}
    leaky = behaviours.error(500, "PROMPT-XYZ")

    async with stage(p=[leaky, None], d=[leaky, None]) as play:
        await play.run(FakeDownstream(), body)

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert not any("PROMPT-XYZ" in text for text in warnings)
    assert play.p[0].address in warnings[0]


async def test_silent_prefiller_is_a_timeout():
    quick = Timeouts(connect_s=2, head_s=0.1, idle_s=1)
    async with stage(p=[behaviours.hang], max_attempts=1, prefill=quick) as play:
        error, _ = await fails(play, CHAT)

    assert isinstance(error, UpstreamTimeout)
    assert error.phase == "head"


async def test_prefiller_of_a_handle_that_failed_is_left_for_another():
    """Its KV transfer may be broken though it answers, and no decoder could then load from it."""
    async with stage(p=[None, None], d=[behaviours.error(500, "KV load failed"), None]) as play:
        await play.run(FakeDownstream(), CHAT)

    assert [len(engine.calls) for engine in play.p] == [1, 1]
