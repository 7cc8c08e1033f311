"""Prompts in all forms: lists, whose single KV handle would end a decoder, and token ids."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real_engines.engines import Engines, ask
from tests.real_engines.exchange import COMPLETIONS, Lab, text

MODES: list[dict[str, Any]] = [{}, {"stream": True, "stream_options": {"include_usage": True}}]
streamed_or_not = pytest.mark.parametrize("mode", MODES, ids=["whole", "streamed"])


@streamed_or_not
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((50, 50), id="equal lengths"),
        pytest.param((5, 200), id="the second longer"),
        pytest.param((200, 5), id="the second shorter"),
        pytest.param((30, 90, 10, 60, 120), id="five"),
        pytest.param((40,), id="one"),
    ],
)
async def test_list_of_prompts_is_answered_as_by_one_engine(
    lab: Lab, words: tuple[int, ...], mode: dict[str, Any]
) -> None:
    body = lab.completion(prompt=[text(count) for count in words], **mode)
    before = await lab.engines.prompt_tokens_by_source()

    answer = await lab.assert_equal(COMPLETIONS, body)

    after = await lab.engines.prompt_tokens_by_source()
    assert sorted(answer.choices) == list(range(len(words)))
    assert after - before == {"external_kv_transfer": answer.prompt_tokens}
    await lab.engines.assert_no_kv_cache_held()


@streamed_or_not
async def test_list_of_prompts_with_two_choices_each_keeps_their_order(
    lab: Lab, mode: dict[str, Any]
) -> None:
    body = lab.completion(prompt=[text(20), text(120)], n=2, seed=11, temperature=0.8, **mode)

    answer = await lab.assert_equal(COMPLETIONS, body)

    assert sorted(answer.choices) == [0, 1, 2, 3]


@streamed_or_not
async def test_token_ids_are_a_prompt(lab: Lab, mode: dict[str, Any]) -> None:
    ids = await _token_ids(lab.engines, text(80))

    answer = await lab.assert_equal(COMPLETIONS, lab.completion(prompt=ids, **mode))

    if mode:
        assert answer.prompt_tokens == len(ids)


@streamed_or_not
async def test_lists_of_token_ids_are_prompts(lab: Lab, mode: dict[str, Any]) -> None:
    prompts = [await _token_ids(lab.engines, text(words)) for words in (10, 150)]

    await lab.assert_equal(COMPLETIONS, lab.completion(prompt=prompts, **mode))


@streamed_or_not
async def test_list_with_one_prompt_that_is_too_long_is_the_engines_400(
    lab: Lab, mode: dict[str, Any]
) -> None:
    body = lab.completion(prompt=[[5] * 20, [5] * (lab.engines.context_tokens + 1)], **mode)

    reply = await lab.post(COMPLETIONS, body)

    assert reply.status == 400, reply.body
    assert str(lab.engines.context_tokens) in reply.error["message"]


async def _token_ids(engines: Engines, prompt: str) -> list[int]:
    body = {"model": engines.model, "prompt": prompt}
    reply = await ask(engines.plain, "POST", "/tokenize", body)
    return list(reply.json["tokens"])
