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
    "three tokens a step": replace(PLAIN, tokens_per_step=3),
    "reasoning": replace(PLAIN, reasoning=True, reasoning_tokens=9),
    "reasoning, three tokens a step": replace(
        PLAIN, reasoning=True, reasoning_tokens=9, tokens_per_step=3
    ),
    "ends of its own": SimConfig(eos_odds=12),
    "no ids": PLAIN,
    "no ids, three tokens a step": replace(PLAIN, tokens_per_step=3),
    "no ids, reasoning": replace(PLAIN, reasoning=True, reasoning_tokens=9),
}
WITH_IDS = st.sampled_from(sorted(name for name in CONFIGS if not name.startswith("no ids")))
WITHOUT_IDS = st.sampled_from(sorted(name for name in CONFIGS if name.startswith("no ids")))
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CUTS = st.lists(st.integers(0, 12), max_size=5)
Asked = tuple[str, dict[str, Any]]
Ask = Callable[[str, Asked, list[int], list[int]], tuple[Told, Told]]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A request that a client may make, small enough to be asked often."""
    number = draw(st.integers(0, 1 << 16))
    body = draw(limits()) | draw(wishes())
    if draw(st.booleans()):
        body |= draw(st.sampled_from([{"temperature": 0}, {"seed": number}]))
    else:
        body["n"] = draw(st.integers(1, 2))
    if draw(st.booleans()):
        prompt = draw(st.sampled_from([f"word {number}", [300, 301, 302 + number % 50]]))
        body.pop("max_completion_tokens", None)
        logprobs = draw(st.sampled_from([None, 0, 2]))
        return COMPLETIONS, {**body, "prompt": prompt, "logprobs": logprobs}
    body["messages"] = [{"role": "user", "content": f"word {number}"}]
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 2))}
    return CHAT, body


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Where an answer may end, and where not yet."""
    body: dict[str, Any] = {"max_tokens": draw(st.integers(1, 30))}
    if draw(st.booleans()):
        body["min_tokens"] = draw(st.integers(0, body["max_tokens"]))
    if draw(st.booleans()):  # it wins over the older name
        body |= {"max_completion_tokens": body["max_tokens"], "max_tokens": 60}
    if draw(st.booleans()):
        body["ignore_eos"] = True
    return body


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    """What a client may want to be told, and how."""
    body: dict[str, Any] = {"stream": draw(st.booleans())}
    if body["stream"]:
        is_wanted = draw(st.booleans())
        body["stream_options"] = {
            "include_usage": is_wanted,
            "continuous_usage_stats": is_wanted and draw(st.booleans()),
        }
    if draw(st.booleans()):
        body["return_token_ids"] = True
    if draw(st.booleans()):
        body["stop"] = draw(st.sampled_from([["."], [" the", ", "], [" s"]]))
        body["include_stop_str_in_output"] = draw(st.booleans())
    return body


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
        mode = "never" if name.startswith("no ids") else "always"
        stage = sims(config, "--token-ids", mode, "--max-retries", "9")
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


def assert_seamless_or_told(body: dict[str, Any], cut: Told, uncut: Told) -> None:
    """Check that the answers are the same, or that a sampled one ends with the reason why not."""
    if "temperature" not in body and "seed" not in body and cut.errors:
        assert "cannot be continued" in cut.errors[0]["message"]
        assert uncut.choices[0].content.startswith(cut.choices[0].content)
        return
    assert_seamless(cut, uncut)


@pytest.mark.case("C24", "C25", "C28", "C29", "C33", "C37")
@settings(UNHURRIED, max_examples=150)
@given(name=WITH_IDS, asked=requests(), cuts=CUTS)
def test_answer_given_back_anywhere_is_the_uncut_answer(ask, name, asked, cuts):
    cut, uncut = ask(name, asked, cuts, [])

    assert_seamless(cut, uncut)


@pytest.mark.case("C71")
@settings(UNHURRIED, max_examples=80)
@given(name=WITH_IDS, asked=requests(), drops=CUTS)
def test_answer_of_lost_decoders_is_the_uncut_answer(ask, name, asked, drops):
    path, body = asked

    cut, uncut = ask(name, (path, {**body, "stream": True}), [], [drop + 1 for drop in drops])

    assert_seamless(cut, uncut)


@pytest.mark.case("C24", "C25", "C28", "C37")
@settings(UNHURRIED, max_examples=100)
@given(name=WITHOUT_IDS, asked=requests(), cuts=CUTS)
def test_answer_without_ids_is_the_uncut_answer_or_a_truthful_error(ask, name, asked, cuts):
    path, body = asked
    body = {key: value for key, value in body.items() if key not in ("return_token_ids", "n")}

    assert_seamless_or_told(body, *ask(name, (path, body), cuts, []))


@pytest.mark.case("C71")
@settings(UNHURRIED, max_examples=60)
@given(name=WITHOUT_IDS, asked=requests(), drops=CUTS)
def test_lost_answer_without_ids_is_the_uncut_answer_or_a_truthful_error(ask, name, asked, drops):
    path, body = asked
    body = {key: value for key, value in body.items() if key not in ("return_token_ids", "n")}
    body["stream"] = True

    assert_seamless_or_told(body, *ask(name, (path, body), [], [drop + 1 for drop in drops]))


@pytest.mark.case("C37")
@settings(UNHURRIED, max_examples=40)
@given(
    name=WITH_IDS,
    question=st.sampled_from(["Use the tool for Oslo", "Say something"]),
    stream=st.booleans(),
    cuts=CUTS,
)
# Half a character at the end of an event of several tokens.
@example(name="three tokens a step", question="Say something", stream=True, cuts=[0, 7, 12, 12, 12])
def test_answer_that_may_call_tools_is_the_uncut_answer(ask, name, question, stream, cuts):
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "tools": [TOOL]}
    body |= {"temperature": 0, "stream": stream, "max_tokens": 60}

    cut, uncut = ask(name, (CHAT, body), cuts, [])

    assert_seamless(cut, uncut)
