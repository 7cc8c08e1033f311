"""What is not split into legs: one instance, both bodies as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.dispatch.passthrough import RawRelay, RawRequest, pass_through
from pdproxy.errors import (
    BodyTooLarge,
    NoInstance,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from pdproxy.upstream.limits import Timeouts
from pdproxy.upstream.response import Response
from tests.dispatch.stage import FakeDownstream, Stage, stage
from tests.dispatch.test_relay import FakeLink
from tests.fakes import behaviours
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import black_hole
from tests.fakes.waiting import until

EMBED = "/v1/embeddings"


async def send(
    play: Stage,
    downstream: FakeDownstream,
    *,
    method: str = "POST",
    target: str = EMBED,
    body: bytes | AsyncIterator[bytes] | None = b"body",
) -> FakeDownstream:
    request = RawRequest(method, target, [("content-type", "x/y")], body)
    await pass_through(play.tools, request, play.account, downstream)
    return downstream


async def echo(request: EngineRequest, answer: Answer) -> None:
    reply = b"%s?%s %s" % (request.path.encode(), request.query.encode(), request.body)
    await answer.whole(201, reply, [("content-type", "a/b"), ("x-mine", "1")])


def route(play: Stage, answer_with: behaviours.Behaviour) -> None:
    for engine in [*play.p, *play.d]:
        engine.routes[EMBED] = answer_with


async def test_status_headers_and_bytes_pass_both_ways():
    async with stage() as play:
        route(play, echo)
        downstream = await send(play, FakeDownstream(), target=f"{EMBED}?a=%20b")
        play.assert_idle()

    assert b"".join(downstream.blocks) == b"/v1/embeddings?a=%20b body"
    headers = dict(downstream.headers)
    assert (headers[":status"], headers["content-type"], headers["x-mine"]) == ("201", "a/b", "1")
    assert play.calls == (0, 1)
    assert play.d[0].only_call.headers["content-type"] == "x/y"
    assert play.account.decoder == play.d[0].address


@pytest.mark.parametrize("status", [200, 404, 429, 500, 503])
async def test_any_status_is_the_answer(status):
    async with stage(d=[None, None]) as play:
        route(play, behaviours.error(status))
        downstream = await send(play, FakeDownstream())

    assert dict(downstream.headers)[":status"] == str(status)
    assert play.calls == (0, 1)


async def test_streamed_body_goes_out_as_it_comes():
    async def body() -> AsyncIterator[bytes]:
        for part in (b"a", b"b" * 70_000, b"c"):
            yield part

    async with stage() as play:
        route(play, echo)
        await send(play, FakeDownstream(), body=body())

    assert play.d[0].only_call.body == b"a" + b"b" * 70_000 + b"c"


async def test_fault_of_the_clients_body_is_the_error():
    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        raise BodyTooLarge("too large")

    async with stage() as play:
        route(play, echo)
        with pytest.raises(BodyTooLarge):
            await send(play, FakeDownstream(), body=body())
        play.assert_idle()

    assert play.observer.attempts[0][1:] == ("error", "body_too_large")


async def test_refusing_instance_is_replaced():
    async with stage(d=[None, None]) as play:
        route(play, echo)
        await play.d[0].stop()
        await send(play, FakeDownstream())
        play.assert_idle()

    assert len(play.d[1].calls) == 1


async def test_black_hole_is_replaced_as_nothing_was_sent():
    quick = Timeouts(connect_s=0.7, head_s=5, idle_s=5)
    with black_hole() as port:
        async with stage(d=[], decode_whole=quick) as play, FakeEngine("decode") as d2:
            for address in (f"127.0.0.1:{port}", d2.address):
                play.fleet.add(Role.DECODE, Endpoint.parse(address), state=State.ACTIVE)
            d2.routes[EMBED] = echo
            await send(play, FakeDownstream())
            play.assert_idle()

    assert len(d2.calls) == 1


@pytest.mark.parametrize("wrong", [behaviours.close, behaviours.reset], ids=["fin", "rst"])
async def test_what_may_have_been_executed_is_not_sent_again(wrong):
    async with stage(d=[None, None]) as play:
        route(play, wrong)
        with pytest.raises(UpstreamLost):
            await send(play, FakeDownstream())
        play.assert_idle()

    assert play.calls == (0, 1)


async def test_attempts_are_bounded():
    async with stage(d=[None] * 4, max_attempts=2) as play:
        for engine in play.d:
            await engine.stop()
        with pytest.raises(UpstreamUnreachable):
            await send(play, FakeDownstream())
        play.assert_idle()

    assert len(play.observer.attempts) == 2


async def test_prefillers_serve_if_there_is_no_decoder():
    async with stage(d=[]) as play:
        route(play, echo)
        await send(play, FakeDownstream())

    assert play.calls == (1, 0)


async def test_nobody_at_all_is_told():
    async with stage(p=[], d=[]) as play:
        with pytest.raises(NoInstance):
            await send(play, FakeDownstream())


async def test_answer_that_breaks_off_is_an_error_after_what_came():
    half = behaviours.raw([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"], then="close")

    async with stage() as play:
        route(play, half)
        downstream = FakeDownstream()
        with pytest.raises(UpstreamLost):
            await send(play, downstream)
        play.assert_idle()

    assert b"".join(downstream.blocks) == b"half"


async def test_silence_is_a_timeout():
    quick = Timeouts(connect_s=1, head_s=0.1, idle_s=1)
    async with stage(decode_whole=quick) as play:
        route(play, behaviours.hang)
        with pytest.raises(UpstreamTimeout):
            await send(play, FakeDownstream())
        await until(lambda: play.d[0].open_answers == 0)


async def test_client_that_leaves_ends_the_call():
    async with stage() as play:
        route(play, behaviours.hang)
        running = asyncio.get_running_loop().create_task(send(play, FakeDownstream()))
        await play.d[0].wait_for_calls(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        play.assert_idle()
        await until(lambda: play.d[0].open_answers == 0)
    assert play.observer.attempts[0][1] == "abandoned"


async def test_slow_client_pauses_the_engine():
    link = FakeLink()
    response = Response(link, asyncio.get_running_loop().create_future(), 1 << 20)
    downstream = FakeDownstream()
    await downstream.start([])
    relay = RawRelay(response, downstream)
    response.pipe(relay)
    finishing = asyncio.get_running_loop().create_task(relay.finished())
    await asyncio.sleep(0)

    downstream.is_congested = True
    response.sink.body_received(b"a")
    assert link.asked == ["pause"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert link.asked == ["pause", "resume"]
    response.end()

    await finishing
    assert downstream.blocks == [b"a"]
