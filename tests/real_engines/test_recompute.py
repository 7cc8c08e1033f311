"""Answers that a decoder gave back, or lost, after any of their tokens are the uncut ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.cases.sims import told
from tests.real_engines.cutting import GivenBack, Lost
from tests.real_engines.engines import Engines
from tests.real_engines.exchange import CHAT, COMPLETIONS
from tests.real_engines.stage import ALWAYS_IDS, Stage, stage

TOKENS = 40
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
APIS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
MODES = pytest.mark.parametrize("mode", [{}, WITH_USAGE], ids=["whole", "streamed"])
SOME = (0, 1, 2, 13, 27, 39)


@pytest.fixture
async def cut_stage(engines: Engines) -> AsyncIterator[Stage]:
    async with stage(engines, *ALWAYS_IDS) as found:
        yield found


@APIS
@MODES
async def test_answer_given_back_after_any_token_is_the_uncut_one(
    cut_stage: Stage, path: str, mode: dict[str, Any]
) -> None:
    hidden = asked(cut_stage, path, **mode)
    bodies = [hidden, {**hidden, "return_token_ids": True}]
    uncut = [await cut_stage.uncut(path, body) for body in bodies]

    seen = {
        tokens: told(await cut_stage.cut(path, bodies[tokens % 2], GivenBack(tokens)))
        for tokens in range(TOKENS)
    }

    wrong = {tokens: each for tokens, each in seen.items() if each != uncut[tokens % 2]}
    assert not wrong, uncut
    await cut_stage.lab.engines.assert_no_kv_cache_held()


@APIS
@pytest.mark.parametrize("tokens", SOME)
async def test_stream_whose_decoder_is_lost_is_the_uncut_one(
    cut_stage: Stage, path: str, tokens: int
) -> None:
    body = asked(cut_stage, path, **WITH_USAGE, return_token_ids=True)

    seen = told(await cut_stage.cut(path, body, Lost(tokens)))

    assert seen == await cut_stage.uncut(path, body)


@APIS
@MODES
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"logprobs": 1}, id="log-probabilities"),
        pytest.param({"stop": ["qu", "er"], "ignore_eos": False}, id="stop strings"),
        pytest.param({"stop": ["er"], "include_stop_str_in_output": True}, id="stops in the text"),
        pytest.param({"min_tokens": 20, "ignore_eos": False}, id="a least length"),
    ],
)
async def test_answer_with_this_cut_several_times_is_the_uncut_one(
    cut_stage: Stage, path: str, mode: dict[str, Any], fields: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = {"logprobs": True, "top_logprobs": 1}
    body = asked(cut_stage, path, **mode, **{"ignore_eos": True, **fields})
    uncut = await cut_stage.uncut(path, body)
    tokens = (uncut.usage or {})["completion_tokens"]
    cuts = [GivenBack(count) for count in (1, tokens // 3, tokens // 4) if count < tokens // 2]

    seen = told(await cut_stage.cut(path, body, *cuts))

    assert rounded(seen) == rounded(uncut)


async def test_answer_is_cut_by_decoders_of_both_kinds(cut_stage: Stage) -> None:
    body = asked(cut_stage, CHAT, **WITH_USAGE)

    seen = told(await cut_stage.cut(CHAT, body, Lost(7), GivenBack(0), GivenBack(9), Lost(5)))

    assert seen == await cut_stage.uncut(CHAT, body)


def asked(cut_stage: Stage, path: str, **fields: Any) -> dict[str, Any]:
    make = cut_stage.lab.chat if path == CHAT else cut_stage.lab.completion
    return make(**{"max_tokens": TOKENS, "ignore_eos": True, **fields})


def rounded(answer: Any) -> Any:
    """Round log-probabilities: sums of other batches differ in the last digits."""
    for choice in answer.choices.values():
        choice.logprobs = [_rounded(entry) for entry in choice.logprobs]
    return answer


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
