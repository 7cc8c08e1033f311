"""Cut answers of a model that reasons: in thoughts, at their end, in content, calls, grammars."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cases.sims import Told, told
from tests.fakes.client import Reply
from tests.real_engines.cutting import GivenBack, Lost
from tests.real_engines.engines import Engines, ask
from tests.real_engines.exchange import CHAT
from tests.real_engines.stage import ALWAYS_IDS, Stage, stage
from tests.real_engines.test_shapes import COLOR, WEATHER

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
MODES = pytest.mark.parametrize("mode", [{}, WITH_USAGE], ids=["whole", "streamed"])
END = "</think>"
END_OF_TURN = 2  # the tiny model's
THOUGHTS = "the river and the stone"
SAID = "The silver bridge."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
JSON = '{"color": "green"}'
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "content": (SAID, {}),
    "content where a tool may be called": (SAID, {"tools": [WEATHER]}),
    "a call": (CALL, {"tools": [WEATHER]}),
    "a sampled call": (CALL, {"tools": [WEATHER], "temperature": 0.8}),
    "two sampled calls": (CALL + "\n" + CALL, {"tools": [WEATHER], "temperature": 0.8}),
    "a call behind content": (SAID + "\n" + CALL, {"tools": [WEATHER]}),
    "a JSON schema": (JSON, {"response_format": COLOR}),
    "sampled JSON": (JSON, {"response_format": COLOR, "temperature": 0.8}),
}


@dataclass(frozen=True, slots=True)
class Recital:
    """A request whose answer is known.

    Attributes:
        body: of the request.
        ids: the answer's tokens, the last of them the one that ends it.
        marker: where in `ids` the token stands that ends the reasoning.
    """

    body: dict[str, Any]
    ids: list[int]
    marker: int

    @property
    def cuts(self) -> list[int]:
        """Each place around the marker, and each third token elsewhere."""
        last, marker = len(self.ids), self.marker
        return sorted({0, 1, *range(marker - 1, marker + 4), *range(3, last, 3), last - 1})


@pytest.fixture
async def cut_stage(engines: Engines) -> AsyncIterator[Stage]:
    assert len(await _ids(engines, END)) == 1, f"the model does not reason: {END} is no token of it"
    async with stage(engines, *ALWAYS_IDS) as found:
        yield found


@MODES
@pytest.mark.parametrize("name", TEXTS)
async def test_answer_given_back_after_any_token_is_the_uncut_one(
    cut_stage: Stage, name: str, mode: dict[str, Any]
) -> None:
    text, fields = TEXTS[name]
    recital = await recited(cut_stage, text, **fields, **mode)
    uncut = await uncut_answers(cut_stage, recital)
    assert uncut[0].usage is not None
    assert uncut[0].usage["completion_tokens"] == len(recital.ids)

    wrong = {}
    for tokens in recital.cuts:
        reply = await cut_stage.cut(CHAT, recital.body, GivenBack(tokens))
        if not _is_right(reply, uncut):
            wrong[tokens] = (recital.marker, _shown(reply))

    assert not wrong, uncut


@pytest.mark.parametrize("name", TEXTS)
async def test_stream_whose_decoder_is_lost_is_the_uncut_one(cut_stage: Stage, name: str) -> None:
    text, fields = TEXTS[name]
    recital = await recited(cut_stage, text, **fields, **WITH_USAGE)
    uncut = await uncut_answers(cut_stage, recital)

    replies = {
        tokens: await cut_stage.cut(CHAT, recital.body, Lost(tokens))
        for tokens in (recital.marker - 3, recital.marker + 1, recital.marker + 7)
    }

    assert not {tokens: _shown(r) for tokens, r in replies.items() if not _is_right(r, uncut)}


@MODES
@pytest.mark.parametrize("name", TEXTS)
async def test_answer_cut_in_its_reasoning_and_again_behind_it_is_the_uncut_one(
    cut_stage: Stage, name: str, mode: dict[str, Any]
) -> None:
    text, fields = TEXTS[name]
    recital = await recited(cut_stage, text, **fields, **mode)
    uncut = await uncut_answers(cut_stage, recital)

    # A round ends at the marker, so that the second cut is in the third round.
    seen = told(await cut_stage.cut(CHAT, recital.body, GivenBack(3), GivenBack(2)))

    assert seen in uncut


async def uncut_answers(cut_stage: Stage, recital: Recital) -> list[Told]:
    """Return what the plain engine says: streamed, and whole if it was asked so.

    Whole answers of some reasoning parsers have the content in the reasoning field; a continued
    answer is streamed by the engines and so has it in its place.
    """
    streamed = await cut_stage.uncut(CHAT, {**recital.body, **WITH_USAGE})
    return [streamed, await cut_stage.uncut(CHAT, recital.body)]


def _is_right(reply: Reply, uncut: list[Told]) -> bool:
    return reply.status == 200 and told(reply) in uncut


def _shown(reply: Reply) -> object:
    return told(reply) if reply.status == 200 else (reply.status, reply.body)


async def recited(cut_stage: Stage, text: str, **fields: Any) -> Recital:
    """Return a greedy request that is answered with THOUGHTS, the end of them, and a text."""
    engines = cut_stage.lab.engines
    ids = [*await _ids(engines, f"{THOUGHTS}{END}{text}"), END_OF_TURN]
    (end,) = await _ids(engines, END)
    body = cut_stage.lab.chat(**{"max_tokens": 200, "vllm_xargs": {"recite": ids}, **fields})
    return Recital(body, ids, ids.index(end))


async def _ids(engines: Engines, text: str) -> list[int]:
    body = {"model": engines.model, "prompt": text, "add_special_tokens": False}
    return list((await ask(engines.plain, "POST", "/tokenize", body)).json["tokens"])
