"""`--max-retries` is the number of attempts per leg, at least one."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.cases.scene import CHAT, chat, scene
from tests.fakes import behaviours, client
from tests.fakes.proxy import assert_quiescent, run_command
from tests.fakes.waiting import until

ATTEMPTS = [("0", 1), ("-1", 1), ("1", 1), ("2", 2), ("3", 3)]


@pytest.mark.case("C72")
@pytest.mark.parametrize(("value", "attempts"), ATTEMPTS, ids=[value for value, _ in ATTEMPTS])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_is_tried_as_often_as_max_retries_says(
    role: str, value: str, attempts: int
) -> None:
    body = behaviours.error_body("broken", 500)
    broken = [behaviours.error(500, body=body)] * 2
    p, d = (broken, [None]) if role == "prefill" else ([None, None], broken)

    async with scene(p, d, f"--max-retries={value}", "--retry-delay", "0") as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        await stage.assert_quiescent()

    assert reply.status == 500
    assert reply.json == body
    if role == "prefill":
        assert (stage.prefill_calls, stage.decode_calls) == (attempts, 0)
    else:
        assert stage.decode_calls == attempts
        assert stage.prefill_calls <= attempts


@pytest.mark.case("C72")
@pytest.mark.parametrize("value", ["0", "-1"])
async def test_one_attempt_is_enough_for_a_healthy_engine(value: str) -> None:
    async with scene([None], [None], f"--max-retries={value}") as stage:
        reply = await stage.post(CHAT, chat(max_tokens=2))

    assert reply.status == 200
    assert (stage.prefill_calls, stage.decode_calls) == (1, 1)


@pytest.mark.case("C72")
@pytest.mark.e2e
@pytest.mark.parametrize("value", ["x", "1.5", ""])
async def test_number_of_attempts_that_is_no_whole_number_is_refused_at_start(value: str) -> None:
    code, output = await run_command(f"--max-retries={value}")

    assert code == 2
    assert "--max-retries" in output
    assert "Traceback" not in output


@pytest.mark.case("C73")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_attempts_are_spread_over_some_time_by_default(role: str, count: int) -> None:
    broken = [behaviours.error(500)] * count
    p, d = (broken, [None]) if role == "prefill" else ([None], broken)

    async with scene(p, d) as stage:
        reply = await stage.post(CHAT, chat(stream=True))
        engines = stage.prefillers if role == "prefill" else stage.decoders
        times = sorted(call.at_s for engine in engines for call in engine.calls)

    assert reply.status == 500
    assert len(times) == 3
    assert times[-1] - times[0] >= 0.2
    # Spread over the instances while there are others.
    assert {len(engine.calls) for engine in engines} <= {1, 2, 3 // count}


@pytest.mark.case("C73", "C74")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_busy_engine_is_left_alone_for_the_time_it_asks_for(role: str) -> None:
    busy = behaviours.error(503, headers=[("Retry-After", "60")])
    p, d = ([busy, None], [None]) if role == "prefill" else ([None], [busy, None])

    async with scene(p, d, "--prefill-policy=round_robin", "--decode-policy=round_robin") as stage:
        engine = stage.p1 if role == "prefill" else stage.d1
        replies = [await stage.post(CHAT, chat(stream=True, max_tokens=2)) for _ in range(8)]
        await stage.assert_quiescent()

    assert {reply.status for reply in replies} == {200}
    assert len(engine.calls) == 1


@pytest.mark.case("C73")
async def test_nothing_is_tried_again_for_a_client_that_left() -> None:
    async with scene([behaviours.error(500)], [None], "--retry-delay", "1") as stage:
        async with await client.RawClient.connect(stage.port) as peer:
            await peer.wire.write(client.request_bytes("POST", CHAT, client.as_json(chat())))
            await stage.p1.wait_for_calls(1)
        await stage.assert_quiescent()
        await asyncio.sleep(1.6)  # beyond the pause

    assert (stage.prefill_calls, stage.decode_calls) == (1, 0)


@pytest.mark.case("C02")
@pytest.mark.parametrize("stream", [True, False])
async def test_decoders_that_are_all_down_are_an_error_soon(stream: bool) -> None:
    async with scene([None], [None, None]) as stage:
        for decoder in stage.decoders:
            await decoder.stop()
        began_s = time.monotonic()
        reply = await stage.post(CHAT, chat(stream=stream))
        took_s = time.monotonic() - began_s
        # Nobody is left who could release the handle, so it stays at its prefiller.
        await assert_quiescent(stage.proxy)

    assert reply.status in {502, 503}
    assert reply.json["error"]["message"]
    assert reply.json["error"]["type"]
    assert not any(str(decoder.port).encode() in reply.body for decoder in stage.decoders)
    assert took_s < 10
    assert stage.prefill_calls <= 3


@pytest.mark.case("C46")
@pytest.mark.parametrize("stream", [True, False])
async def test_handle_of_a_restarted_prefiller_is_replaced_by_a_fresh_one(stream: bool) -> None:
    async with scene([None, None], [behaviours.error(500), None]) as stage:
        stage.d2.behaviour = behaviours.error(500)
        reply = await stage.post(CHAT, chat(stream=stream))
        handles = [
            call.json["kv_transfer_params"]["remote_request_id"]
            for engine in stage.decoders
            for call in engine.calls
        ]
        await until(lambda: not any(engine.held for engine in stage.prefillers))

    assert reply.status == 500
    assert len(set(handles)) == len(handles) == stage.prefill_calls == 3


@pytest.mark.case("C75")
async def test_restarted_engine_with_a_pool_of_dead_connections_fails_no_request() -> None:
    async with scene([None], [None]) as stage:
        body = chat(stream=True, max_tokens=2)
        await asyncio.gather(*(stage.post(CHAT, body) for _ in range(200)))
        for engine in (stage.p1, stage.d1):
            await engine.stop()
            await engine.start()
        replies = await asyncio.gather(*(stage.post(CHAT, body) for _ in range(200)))
        await stage.assert_quiescent()

    assert {reply.status for reply in replies} == {200}
    assert (stage.prefill_calls, stage.decode_calls) == (400, 400)
