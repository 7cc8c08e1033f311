"""Engines are asked about tokens; one that does not tell is passed over."""

from __future__ import annotations

import asyncio

from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.jsonfields import raw
from pdproxy.core.recount import DETOKENIZE, Question
from pdproxy.dispatch.tokenizer import Tokenizer
from pdproxy.sim import tokenizer as toy
from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.dispatch.stage import Stage, stage
from tests.fakes import behaviours

THE, OF = toy.encode(" the of")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"
BODY = b'{"tokens": [%d]}' % THE


def of(play: Stage) -> Tokenizer:
    return Tokenizer(play.tools.client, play.tools.fleet, [])


def join(play: Stage, port: int) -> None:
    play.tools.fleet.add(Role.DECODE, Endpoint.parse(f"127.0.0.1:{port}"), state=State.ACTIVE)


async def test_next_decoder_is_asked_if_one_does_not_tell():
    async with stage(p=[], d=[None]) as play, in_process(SimConfig()) as sim:
        join(play, sim.port)

        assert await of(play).ask(DETOKENIZE, BODY) == {"prompt": " the"}


async def test_none_is_told_if_no_decoder_tells():
    async with stage(p=[], d=[None]) as play, in_process(SimConfig()) as gone:
        join(play, 1)
        join(play, gone.port)

        assert await of(play).ask("/nowhere", BODY) is None


async def test_engine_that_takes_for_ever_over_its_answer_is_given_up():
    """Each byte comes within the time that an engine may be silent."""
    pieces: list[bytes | float] = [b" ", 0.1]
    slowly = behaviours.raw([HEAD, *pieces * 600], then="close")
    async with stage(p=[], d=[None, None]) as play:
        for decoder in play.d:
            decoder.routes[DETOKENIZE] = slowly
        tokenizer = Tokenizer(play.tools.client, play.tools.fleet, [], longest_s=0.3)

        async with asyncio.timeout(20):
            assert await tokenizer.ask(DETOKENIZE, BODY) is None


async def test_questions_are_answered_until_there_are_none():
    answers = []

    def asking():
        answers.append((yield Question(DETOKENIZE, {"tokens": raw([THE])})))
        answers.append((yield Question(DETOKENIZE, {"tokens": raw([OF])})))

    async with stage(p=[], d=[]) as play, in_process(SimConfig()) as sim:
        join(play, sim.port)
        await of(play).settle(asking())

    assert answers == [{"prompt": " the"}, {"prompt": " of"}]


async def test_time_for_all_questions_about_a_cut_is_bounded():
    said = b'{"prompt": " the"}'
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(said)
    answers: list[object] = []

    def asking():
        for _ in range(20):
            answer = yield Question(DETOKENIZE, {"tokens": raw([THE])})
            answers.append(answer)

    async with stage(p=[], d=[None]) as play:
        play.d[0].routes[DETOKENIZE] = behaviours.raw([head, 0.2, said], then="close")
        tokenizer = Tokenizer(play.tools.client, play.tools.fleet, [], longest_s=1)
        await tokenizer.settle(asking())

    assert answers[0] == {"prompt": " the"}
    assert answers[10:] == [None] * 10
