"""`--max-retries` is the number of attempts per leg, at least one."""

from __future__ import annotations

import pytest

from tests.cases.scene import CHAT, chat, scene
from tests.fakes import behaviours
from tests.fakes.proxy import run_command

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
