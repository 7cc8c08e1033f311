"""The main job: greedy answers through prefill and decode equal those of one plain engine."""

from __future__ import annotations

import pytest

from tests.real_engines.exchange import CHAT, COMPLETIONS, Lab

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
PROMPT_WORDS = (5, 60, 250)


async def test_twelve_of_twelve_greedy_answers_are_equal_and_every_prompt_token_is_transferred(
    lab: Lab,
) -> None:
    bodies = [
        (path, make(words, **streaming))
        for words in PROMPT_WORDS
        for path, make in ((CHAT, lab.chat), (COMPLETIONS, lab.completion))
        for streaming in ({}, WITH_USAGE)
    ]
    before = await lab.engines.prompt_tokens_by_source()

    answers = [await lab.assert_equal(path, body) for path, body in bodies]

    after = await lab.engines.prompt_tokens_by_source()
    assert len(answers) == 12
    assert after - before == {"external_kv_transfer": sum(a.prompt_tokens for a in answers)}
    await lab.engines.assert_no_kv_cache_held()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_answer_that_ends_with_its_first_token_is_equal(lab: Lab, stream: bool) -> None:
    await lab.assert_equal(COMPLETIONS, lab.completion(max_tokens=1, stream=stream))


async def test_second_turn_is_equal_and_reports_the_prefillers_cached_tokens(lab: Lab) -> None:
    body = lab.chat(words=200)
    first = await lab.post(CHAT, body)
    said = {"role": "assistant", "content": first.text}
    body["messages"] += [said, {"role": "user", "content": "And then?"}]

    await lab.assert_equal(CHAT, body)
    reply = await lab.post(CHAT, body)

    usage = reply.json["usage"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
