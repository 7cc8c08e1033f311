"""A stream whose decoder was lost goes on at another, without a word twice or missing."""

from __future__ import annotations

import logging

import pytest

from pdproxy.sim.config import SimConfig
from tests.cases.cuts import decodes, ends, in_order
from tests.cases.scene import CHAT, COMPLETIONS, chat, completion, scene
from tests.cases.sims import sims, told
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import assert_ends_in_error, assert_whole_stream
from tests.fakes.engine import FakeEngine


def generate_calls(engine: FakeEngine) -> list[EngineRequest]:
    return in_order([engine])


ASKING = [{"role": "user", "content": "word 0"}]


def breaks_after(words: int) -> Behaviour:
    """A decoder whose connection breaks behind so many words; 0 is behind the role."""

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        is_chat = request.path == CHAT
        events = behaviours.stream_events(request, words + 1, "length")[: words + is_chat]
        await answer.start_stream()
        await answer.chunk(b": hello\n\n")
        for event in events:
            await answer.event(event)
        answer.reset()

    return behaviour


@pytest.mark.case("C71")
@pytest.mark.parametrize("words", [0, 1, 5])
@pytest.mark.parametrize("ids", ["auto", "always"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_lost_decoder_is_followed_by_another_without_a_word_twice(words, ids, path):
    make = chat if path == CHAT else completion
    body = make(stream=True, max_tokens=9, stream_options={"include_usage": True})
    d = behaviours.one_after_another(breaks_after(words), behaviours.decode)

    async with scene([None], [d, d], "--token-ids", ids) as stage:
        reply = await stage.post(path, body)
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 9)
    assert ends(reply) == ["length"]
    assert reply.chunks_of_json[-1]["usage"]["completion_tokens"] == 9
    assert [call.stale for call in decodes(stage)] == [False, False]


@pytest.mark.case("C71")
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("stop", "drops"),
    [(" zz", [2, 1, 2]), (" zz", [2, 2, 3, 1, 4]), (".", [2, 1]), (".", [2, 1, 2, 2])],
)
async def test_what_a_lost_decoder_held_back_is_made_again(temperature, stop, drops):
    body = {"messages": [{"role": "user", "content": "word 0"}], "stream": True, "max_tokens": 9}
    body |= {"temperature": temperature, "stop": [stop], "include_stop_str_in_output": True}
    thinker = SimConfig(eos_odds=1 << 30, reasoning=True, reasoning_tokens=6)

    async with sims(thinker, "--token-ids", "always") as stage:
        stage.decoder.faults.drop_after[:] = drops
        given, uncut = await stage.both(CHAT, body)

    assert told(given) == told(uncut)


@pytest.mark.case("C71")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ids", ["always", "never"])
async def test_text_held_back_for_a_stop_string_is_not_lost_with_its_decoder(
    path, temperature, ids
):
    body = {"prompt": "word 0"} if path == COMPLETIONS else {"messages": ASKING}
    body |= {"temperature": temperature, "stream": True, "max_tokens": 20, "stop": ["zz top"]}

    async with sims(SimConfig(eos_odds=1 << 30), "--token-ids", ids) as stage:
        stage.decoder.faults.drop_after[:] = [6]
        given, uncut = await stage.both(path, body)

    if temperature and ids == "never":  # nothing tells what was held back
        assert "cannot be continued" in assert_ends_in_error(given)["message"]
        return
    assert told(given) == told(uncut)


@pytest.mark.case("C71")
@pytest.mark.parametrize("words", [1, 5])
async def test_with_continue_lost_off_a_lost_decoder_is_an_error(words):
    body = chat(stream=True, max_tokens=9)

    async with scene([None], [breaks_after(words)] * 2, "--continue-lost", "off") as stage:
        reply = await stage.post(CHAT, body)

    assert_ends_in_error(reply)
    assert reply.text == toy.answer(body, words)
    assert len(decodes(stage)) == 1


@pytest.mark.case("C71")
async def test_headers_and_a_comment_are_no_begun_answer():
    d = behaviours.one_after_another(
        behaviours.stream([b": hello\n\n"], then="reset"), behaviours.decode
    )
    body = chat(stream=True, max_tokens=4)

    async with scene([None], [d, d], "--continue-lost", "off") as stage:
        reply = await stage.post(CHAT, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(body, 4)


@pytest.mark.case("C71")
async def test_lost_decoder_does_not_get_the_answer_back_though_it_has_the_least_load():
    body, long = chat(stream=True, max_tokens=9), chat(stream=True, max_tokens=200)
    breaking = behaviours.one_after_another(breaks_after(2), behaviours.decode)

    async with scene([None], [behaviours.decode, behaviours.decode]) as stage:
        for engine in stage.decoders:
            engine.token_delay_s = 0.02
        async with stage.streaming(long):
            first, second = stage.decoders
            idle = second if generate_calls(first) else first
            idle.behaviour = breaking
            reply = await stage.post(CHAT, body)
        await stage.assert_quiescent()

    assert_whole_stream(reply)
    assert len(generate_calls(idle)) == 1


@pytest.mark.case("C71")
async def test_log_tells_which_decoder_was_lost_and_which_gave_the_answer_back(caplog):
    caplog.set_level(logging.INFO, "pdproxy")
    body = chat(stream=True, max_tokens=30)
    d = behaviours.one_after_another(breaks_after(3), behaviours.recompute(5), behaviours.decode)

    async with scene([None], [d, d, d]) as stage:
        await stage.post(CHAT, body)
        await stage.assert_quiescent()
        first, second, _ = (call.engine.address for call in decodes(stage))

    lost, given = (record for record in caplog.records if record.name == "pdproxy.dispatch.cuts")
    assert (lost.levelname, given.levelname) == ("WARNING", "INFO")
    assert f"round 1, decoder {first} did not end the answer, 3 tokens are kept" in lost.message
    assert f"round 2, decoder {second} did not end the answer, 8 tokens are kept" in given.message
    access = next(record for record in caplog.records if record.name == "pdproxy.access")
    assert f"rounds=3 cut_by={first}/lost,{second}/kv_cache_exhausted " in access.getMessage()
