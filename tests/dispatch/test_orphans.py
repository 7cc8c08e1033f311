"""Handles that no decoder pulls are freed at their prefiller."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import Raw, raw
from pdproxy.dispatch import orphans
from pdproxy.dispatch.orphans import Orphan, Orphans, ReleaseRules
from tests.cases.cuts import cut_after
from tests.dispatch.stage import FakeDownstream, Stage, stage
from tests.fakes import behaviours
from tests.fakes.suspensions import Suspensions
from tests.fakes.waiting import until

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
STREAM = {**CHAT, "stream": True}


def made_by(play: Stage, rules: ReleaseRules) -> Orphans:
    tools = play.tools
    return Orphans(rules, tools.client, tools.fleet, tools.connector, play.observer, play.clock)


def orphan(play: Stage) -> Orphan:
    handle = Raw(raw(play.p[0].new_handle()))
    owner = play.fleet.instances(Role.PREFILL)[0]
    key = [("authorization", "Bearer k"), ("content-type", "application/json")]
    return Orphan(handle, owner, key, "id-release", Raw(b'"toy"'))


def held(play: Stage) -> int:
    return sum(engine.held for engine in play.p)


async def nothing_held(play: Stage) -> None:
    await until(lambda: play.orphans.is_idle)
    await until(lambda: held(play) == 0)


async def test_release_carries_handle_model_and_key_and_costs_no_load():
    async with stage() as play:
        play.orphans.adopt(orphan(play))
        play.assert_idle()
        await until(lambda: play.orphans.is_idle)
        call = play.d[0].releases[0]

    assert held(play) == 0
    assert play.observer.abandoned == ["released"]
    assert call.json["model"] == "toy"
    assert call.headers["authorization"] == "Bearer k"
    assert call.headers["x-request-id"] == "id-release"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(behaviours.error(500), "500"), (behaviours.error(503), "503"), (behaviours.reset, "lost")],
)
async def test_another_decoder_is_asked_once(failure, reason):
    async with stage(d=[None, None, None]) as play:
        play.d[0].routes["/v1/completions"] = failure
        play.orphans.adopt(orphan(play))
        await until(lambda: play.orphans.is_idle)

    assert play.observer.abandoned == ["released"], reason
    assert [len(engine.requests) for engine in play.d] == [1, 2, 0]


async def test_release_is_sent_again_to_a_decoder_that_meets_the_prefiller_first():
    async with stage() as play:
        for _ in range(3):
            play.orphans.adopt(orphan(play))
            await until(lambda: play.orphans.is_idle)

    assert len(play.d[0].releases) == 4
    assert play.observer.abandoned == ["released"] * 3


async def test_no_third_decoder_is_asked():
    async with stage(d=[None, None, None]) as play:
        for engine in play.d:
            engine.routes["/v1/completions"] = behaviours.error(500)
        play.orphans.adopt(orphan(play))
        await until(lambda: play.orphans.is_idle)

    assert play.observer.abandoned == ["failed"]
    assert [len(engine.requests) for engine in play.d] == [1, 1, 0]


async def test_decoder_that_accepts_is_left_at_its_first_event():
    role = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'

    async with stage(d=[None]) as play:
        play.d[0].routes["/v1/completions"] = behaviours.stream([role], then="hang")
        play.orphans.adopt(orphan(play))
        await until(lambda: play.orphans.is_idle)
        await until(lambda: play.d[0].requests[0].closed_early)

    assert play.observer.abandoned == ["released"]


async def test_error_event_is_no_release():
    event = b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n'

    async with stage(d=[None]) as play:
        play.d[0].routes["/v1/completions"] = behaviours.stream([event])
        play.orphans.adopt(orphan(play))
        await until(lambda: play.orphans.is_idle)

    assert play.observer.abandoned == ["failed"]


async def test_releases_are_bounded_in_number_queue_and_time(caplog):
    caplog.set_level(logging.INFO)
    async with stage(d=[None]) as play:
        play.d[0].routes["/v1/completions"] = behaviours.hang
        some = made_by(play, ReleaseRules(max_running=2, max_waiting=3, limit_s=0.3))
        for _ in range(9):
            some.adopt(orphan(play))
        assert play.observer.abandoned == ["dropped"] * 4
        await play.d[0].wait_for_calls(0)
        await until(lambda: some.is_idle)
        await some.close()

    assert play.observer.abandoned == ["dropped"] * 4 + ["expired"] * 5
    assert len(play.d[0].requests) <= 2
    assert len([r for r in caplog.records if r.name == orphans.__name__]) == 2


async def test_nothing_is_released_when_releases_are_off():
    async with stage() as play:
        some = made_by(play, ReleaseRules(max_running=0))
        some.adopt(orphan(play))

    assert play.observer.abandoned == ["dropped"]
    assert play.calls == (0, 0)


async def test_without_a_decoder_the_handle_is_left_to_its_lease():
    async with stage(d=[]) as play:
        play.orphans.adopt(orphan(play))
        await until(lambda: play.orphans.is_idle)

    assert play.observer.abandoned == ["failed"]


async def test_closing_ends_what_runs_and_takes_nothing_more(monkeypatch):
    monkeypatch.setattr(orphans, "CLOSING_S", 0.05)
    async with stage(d=[None]) as play:
        play.d[0].routes["/v1/completions"] = behaviours.hang
        some = made_by(play, ReleaseRules(max_running=1))
        some.adopt(orphan(play))
        some.adopt(orphan(play))
        await play.d[0].wait_for_calls(0)
        await some.close()
        some.adopt(orphan(play))
        play.assert_idle()

    assert some.is_idle
    assert play.observer.abandoned == ["expired", "expired", "dropped"]


@pytest.mark.case("C42")
async def test_handle_that_comes_as_the_client_leaves_is_released():
    """At every await the request is cancelled after what it waits for came, before it looks."""
    is_reached, at = True, -1
    async with stage() as play:
        while is_reached:
            at += 1
            watcher = Suspensions(at, "waking")
            request = watcher.run(play.run(FakeDownstream(), STREAM))
            await asyncio.gather(request, return_exceptions=True)
            await nothing_held(play)
            play.assert_idle()
            is_reached = watcher.is_reached

    assert at >= 3
    assert "released" in play.observer.abandoned
    assert set(play.observer.abandoned) == {"released"}


@pytest.mark.slow
@pytest.mark.case("C41")
async def test_handle_of_a_further_round_is_released_whenever_the_client_leaves():
    """At every await of both rounds, before and after what it waits for came."""
    for moment in ("asleep", "waking"):
        is_reached, at = True, -1
        while is_reached:
            at += 1
            async with stage(d=[cut_after(1)], recompute=True, max_rounds=3) as play:
                watcher = Suspensions(at, moment)
                request = watcher.run(play.run(FakeDownstream(), STREAM))
                await asyncio.gather(request, return_exceptions=True)
                await nothing_held(play)
                play.assert_idle()
                is_reached = watcher.is_reached

        assert at >= 6


@pytest.mark.parametrize("failure", [behaviours.error(400), behaviours.error(500)])
async def test_handle_of_a_refused_decode_is_released(failure):
    async with stage(d=[failure], max_attempts=1) as play:
        await asyncio.gather(play.run(FakeDownstream(), STREAM), return_exceptions=True)
        await until(lambda: play.orphans.is_idle)
        play.assert_idle()

    assert play.observer.abandoned == ["released"]


async def test_prefill_without_a_reply_is_counted():
    async with stage(p=[behaviours.reset, None]) as play:
        await play.run(FakeDownstream(), STREAM)

    assert play.observer.lost_replies == 1
    assert play.observer.abandoned == []
