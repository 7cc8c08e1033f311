"""However an answer is cut, and however its events fall, the client gets the uncut answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdproxy.sim.config import SimConfig
from tests.cases.scene import CHAT, COMPLETIONS
from tests.cases.sims import Sims, Told, sims, told
from tests.properties import UNHURRIED

PLAIN = SimConfig(eos_odds=1 << 30)
CONFIGS = {
    "plain": PLAIN,
    "three-tokens-a-step": replace(PLAIN, tokens_per_step=3),
    "reasoning": replace(PLAIN, reasoning=True, reasoning_tokens=9),
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CUTS = st.lists(st.integers(0, 12), max_size=5)
Asked = tuple[str, dict[str, Any]]
Ask = Callable[[str, Asked, list[int], list[int]], tuple[Told, Told]]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A request that a client may make, small enough to be asked often."""
    number = draw(st.integers(0, 1 << 16))
    body: dict[str, Any] = {"max_tokens": draw(st.integers(1, 30)), "stream": draw(st.booleans())}
    if body["stream"]:
        body["stream_options"] = {"include_usage": draw(st.booleans())}
    if draw(st.booleans()):
        body["return_token_ids"] = True
    if draw(st.booleans()):
        body["stop"] = draw(st.sampled_from([["."], [" the", ", "], [" s"]]))
        body["include_stop_str_in_output"] = draw(st.booleans())
    if draw(st.booleans()):
        body["temperature"] = 0
    else:
        body["n"] = draw(st.integers(1, 2))
    if draw(st.booleans()):
        prompt = draw(st.sampled_from([f"word {number}", [300, 301, 302 + number % 50]]))
        logprobs = draw(st.sampled_from([None, 0, 2]))
        return COMPLETIONS, {**body, "prompt": prompt, "logprobs": logprobs}
    body["messages"] = [{"role": "user", "content": f"word {number}"}]
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 2))}
    return CHAT, body


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return what asks the proxy and the plain engine of a configuration the same."""
    with asyncio.Runner() as runner:
        stages: dict[str, Sims] = {}
        stack = runner.run(_entered(stages))

        def both(name: str, asked: Asked, cuts: list[int], drops: list[int]) -> tuple[Told, Told]:
            stage = stages[name]
            stage.decoder.faults.recompute_after[:] = cuts
            stage.decoder.faults.drop_after[:] = drops
            cut, uncut = runner.run(stage.both(*asked))
            stage.decoder.faults.recompute_after.clear()
            stage.decoder.faults.drop_after.clear()
            return told(cut), told(uncut)

        yield both
        runner.run(stack.aclose())


async def _entered(stages: dict[str, Sims]) -> AsyncExitStack:
    stack = AsyncExitStack()
    for name, config in CONFIGS.items():
        stage = sims(config, "--token-ids", "always", "--max-retries", "9")
        stages[name] = await stack.enter_async_context(stage)
    return stack


def assert_seamless(cut: Told, uncut: Told) -> None:
    """Check that the answers are the same.

    A choice of which nothing was delivered is asked for alone, and then sampled as an only choice.
    """
    assert cut.choices.keys() == uncut.choices.keys()
    for index, seen in cut.choices.items():
        assert seen in (uncut.choices[index], uncut.choices[0])
    assert cut.errors == uncut.errors
    if cut.choices == uncut.choices:
        assert cut.usage == uncut.usage


@pytest.mark.case("C24", "C25", "C28", "C29", "C33", "C37")
@settings(UNHURRIED, max_examples=120)
@given(name=st.sampled_from(sorted(CONFIGS)), asked=requests(), cuts=CUTS)
def test_answer_given_back_anywhere_is_the_uncut_answer(ask, name, asked, cuts):
    cut, uncut = ask(name, asked, cuts, [])

    assert_seamless(cut, uncut)


@pytest.mark.case("C71")
@settings(UNHURRIED, max_examples=80)
@given(name=st.sampled_from(sorted(CONFIGS)), asked=requests(), drops=CUTS)
def test_answer_of_lost_decoders_is_the_uncut_answer(ask, name, asked, drops):
    path, body = asked

    cut, uncut = ask(name, (path, {**body, "stream": True}), [], [drop + 1 for drop in drops])

    assert_seamless(cut, uncut)


@pytest.mark.case("C37")
@settings(UNHURRIED, max_examples=40)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    question=st.sampled_from(["Use the tool for Oslo", "Say something"]),
    stream=st.booleans(),
    cuts=CUTS,
)
# Half a character at the end of an event of several tokens.
@example(name="three-tokens-a-step", question="Say something", stream=True, cuts=[0, 7, 12, 12, 12])
def test_answer_that_may_call_tools_is_the_uncut_answer(ask, name, question, stream, cuts):
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "tools": [TOOL]}
    body |= {"temperature": 0, "stream": stream, "max_tokens": 60}

    cut, uncut = ask(name, (CHAT, body), cuts, [])

    assert_seamless(cut, uncut)
