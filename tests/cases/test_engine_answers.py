"""Answers of engines that say one thing and mean another."""

from __future__ import annotations

import pytest

from tests.cases.scene import CHAT, chat, scene
from tests.fakes import behaviours
from tests.fakes.waiting import until

ERROR = {"error": {"message": "out of luck", "type": "InternalServerError", "code": 500}}


@pytest.mark.parametrize("status", [600, 999])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_status_that_is_none_is_not_passed_on(role: str, status: int) -> None:
    odd = behaviours.error(status)
    p, d = ((odd,), (None,)) if role == "prefill" else ((None,), (odd,))
    async with scene(p, d) as stage:
        reply = await stage.post(CHAT, chat(max_tokens=1))

    assert (reply.status, reply.error["code"]) == (502, "upstream_protocol")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_error_with_status_200_is_the_error(role: str) -> None:
    odd = behaviours.json_answer(ERROR)
    p, d = ((odd,), (None,)) if role == "prefill" else ((None,), (odd,))
    async with scene(p, d) as stage:
        reply = await stage.post(CHAT, chat(max_tokens=1))
        await stage.assert_quiescent()

    assert (reply.status, reply.error["message"]) == (500, "out of luck")


async def test_the_handle_of_a_decoder_that_says_an_error_is_released() -> None:
    async with scene((None,), (behaviours.json_answer(ERROR), None)) as stage:
        replies = [await stage.post(CHAT, chat(max_tokens=1)) for _ in range(3)]
        await until(lambda: any(engine.releases for engine in stage.decoders))
        await stage.assert_quiescent()

    assert [reply.status for reply in replies] == [200] * 3


async def test_an_error_with_status_200_is_tried_elsewhere() -> None:
    async with scene((None,), (behaviours.json_answer(ERROR), None)) as stage:
        replies = [await stage.post(CHAT, chat(max_tokens=1)) for _ in range(3)]

    assert [reply.status for reply in replies] == [200] * 3


@pytest.mark.parametrize("encoding", ["gibberish", "compress", "gzip, gzip"])
async def test_a_body_compressed_in_an_unknown_way_is_refused(encoding: str) -> None:
    async with scene() as stage:
        headers = [("Content-Encoding", encoding)]
        reply = await stage.post(CHAT, chat(max_tokens=1), headers)

        assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
        assert stage.prefill_calls == 0
