"""The frame around every counted request: what the client gets and what is written down."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from pdproxy.core.api import Api
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.errors import EngineAnswered, InvalidRequest, NoInstance, UpstreamLost
from pdproxy.server.downstream import ClientDownstream
from pdproxy.server.generate import CLIENT_CLOSED, Work, counted, generate
from tests.fakes import behaviours, toy
from tests.fakes.client import (
    RawClient,
    ask,
    assert_ends_in_error,
    assert_whole_stream,
    post,
)
from tests.fakes.waiting import until
from tests.server.stage import Server, handling, server

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PATH = Api.CHAT.value


def working(made: Server, work: Work):
    async def handler(request: web.Request) -> web.StreamResponse:
        return await counted(made.context, request, "test", work)

    return handling(handler)


def generating(made: Server):
    async def handler(request: web.Request) -> web.StreamResponse:
        return await generate(made.context, request, Api.CHAT)

    return handling(handler)


# --- the frame


async def test_good_request_is_counted_once():
    async def work(_account: Account, downstream: ClientDownstream) -> None:
        await downstream.respond(201, [], b"{}")

    async with server() as made, working(made, work) as port:
        reply = await ask(port, "POST", "/", headers=[("X-Request-Id", "mine")])

        assert (reply.status, reply.headers["x-request-id"]) == (201, "mine")
        assert made.requests.started == ["test"]
        assert (made.account.status, made.account.outcome) == (201, Outcome.SUCCESS)
        assert made.account.timeline.finished is not None


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        pytest.param(InvalidRequest("x"), 400, Outcome.CLIENT_ERROR, id="clients"),
        pytest.param(NoInstance("x"), 503, Outcome.REJECTED, id="rejected"),
        pytest.param(UpstreamLost("x"), 502, Outcome.ENGINE_ERROR, id="engines"),
        pytest.param(
            EngineAnswered(422, [], b'{"a":1}'), 422, Outcome.CLIENT_ERROR, id="engines-answer"
        ),
    ],
)
async def test_failure_before_the_start_is_a_status(error, status, outcome):
    async def work(_account: Account, _downstream: ClientDownstream) -> None:
        raise error

    async with server() as made, working(made, work) as port:
        reply = await ask(port, "POST", "/")

        assert reply.status == status
        assert reply.headers["x-request-id"] == made.account.request_id
        assert (made.account.status, made.account.outcome) == (status, outcome)
        assert made.account.why


async def test_failure_after_the_start_is_an_error_event():
    async def work(_account: Account, downstream: ClientDownstream) -> None:
        await downstream.start([])
        downstream.write(b'data: {"choices":[]}\n\n')
        raise UpstreamLost("the engine closed the connection", detail="10.0.0.1")

    async with server() as made, working(made, work) as port:
        reply = await ask(port, "POST", "/")

        assert assert_ends_in_error(reply)["code"] == "upstream_lost"
        assert (made.account.status, made.account.outcome) == (200, Outcome.ENGINE_ERROR)
        assert "10.0.0.1" in made.account.why
        assert b"10.0.0.1" not in reply.body


async def test_client_that_was_told_is_not_told_again():
    async def work(_account: Account, downstream: ClientDownstream) -> None:
        await downstream.start([])
        downstream.write(b'data: {"error":{"message":"m","type":"t"}}\n\n')
        error = UpstreamLost("x")
        error.is_told = True
        raise error

    async with server() as made, working(made, work) as port:
        reply = await ask(port, "POST", "/")

        assert_ends_in_error(reply)
        assert made.account.outcome is Outcome.ENGINE_ERROR


@pytest.mark.case("C90")
@pytest.mark.parametrize("is_started", [False, True], ids=["before", "after"])
async def test_bug_is_logged_and_told_without_its_words(is_started, caplog):
    async def work(_account: Account, downstream: ClientDownstream) -> None:
        if is_started:
            await downstream.start([])
        raise KeyError("secret-words")

    async with server() as made, working(made, work) as port:
        reply = await ask(port, "POST", "/")

        assert b"secret-words" not in reply.body
        assert b"Traceback" not in reply.body
        if is_started:
            assert assert_ends_in_error(reply)["code"] == "internal_error"
        else:
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert made.account.outcome is Outcome.PROXY_ERROR
        (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert made.account.request_id in record.getMessage()


@pytest.mark.parametrize("is_started", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_client_that_leaves_is_no_error(is_started, how, caplog):
    begun = asyncio.Event()

    async def work(_account: Account, downstream: ClientDownstream) -> None:
        if is_started:
            await downstream.start([])
        begun.set()
        await asyncio.sleep(10)

    async with server() as made, working(made, work) as port:
        async with await RawClient.connect(port) as client:
            await client.send_request("POST", "/", b"")
            await begun.wait()
            client.leave(how)
        await until(lambda: made.requests.finished)

        assert made.account.outcome is Outcome.CLIENT_DISCONNECTED
        assert made.account.status == (200 if is_started else CLIENT_CLOSED)
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_engine_that_fails_while_the_client_leaves_is_no_traceback(caplog):
    gone = asyncio.Event()

    async def work(_account: Account, downstream: ClientDownstream) -> None:
        await downstream.start([])
        downstream.cut()
        gone.set()
        raise UpstreamLost("x")

    async with server() as made, working(made, work) as port:
        async with await RawClient.connect(port) as client:
            await client.send_request("POST", "/", b"")
            await gone.wait()
            await until(client.wire.gone.is_set)
        await until(lambda: made.requests.finished)

        assert made.account.outcome is Outcome.ENGINE_ERROR
        assert not [r for r in caplog.records if r.exc_info]


async def test_client_that_breaks_before_the_answer_is_no_traceback(caplog):
    async def work(_account: Account, _downstream: ClientDownstream) -> None:
        raise ConnectionResetError

    async with server() as made, working(made, work) as port:
        await ask(port, "POST", "/")

        assert (made.account.outcome, made.account.status) == (
            Outcome.CLIENT_DISCONNECTED,
            CLIENT_CLOSED,
        )
        assert not caplog.records


async def test_request_without_a_key_reaches_nobody():
    async def work(_account: Account, _downstream: ClientDownstream) -> None:
        raise AssertionError("it was let in")

    async with server(rules={"api_keys": ("k",)}) as made, working(made, work) as port:
        reply = await ask(port, "POST", "/", b"x" * 100_000)

        assert (reply.status, reply.error["type"]) == (401, "authentication_error")
        assert made.account.outcome is Outcome.CLIENT_ERROR


# --- generate


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_answer_of_the_engines_comes_back(stream):
    async with server() as made, generating(made) as port:
        reply = await post(port, PATH, {**CHAT, "stream": stream})

        assert reply.text == toy.answer(CHAT, 4)
        if stream:
            assert_whole_stream(reply)
        account = made.account
        assert (account.endpoint, account.model) == (PATH, "toy")
        assert (account.is_stream, account.status) == (stream, 200)
        assert account.prefiller == made.play.p[0].address
        assert account.decoder == made.play.d[0].address
        made.play.assert_idle()


async def test_clients_id_leads_to_the_engines():
    async with server() as made, generating(made) as port:
        await post(port, PATH, CHAT, [("X-Request-Id", "chat,7"), ("X-Mine", "1")])

        for engine in (made.play.p[0], made.play.d[0]):
            headers = engine.only_call.headers
            assert headers["x-request-id"].startswith("chat_7-")
            assert headers["x-mine"] == "1"
            assert headers["content-type"] == "application/json"


async def test_bad_body_calls_nobody():
    async with server() as made, generating(made) as port:
        reply = await post(port, PATH, b"[]")

        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert made.play.calls == (0, 0)


async def test_model_that_no_text_can_hold_is_no_bug(caplog):
    prefilled = {"choices": [], "kv_transfer_params": {"remote_host": "h"}}
    engines = [behaviours.json_answer(prefilled)], [behaviours.json_answer({"choices": []})]
    async with server(*engines) as made, generating(made) as port:
        body = b'{"model": "a\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}'
        reply = await post(port, PATH, body)

        assert reply.status == 200
        assert made.account.model == "a?"
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_lost_decoder_ends_the_stream_in_an_error():
    word = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    async with (
        server(d=[behaviours.stream([word], then="reset")]) as made,
        generating(made) as port,
    ):
        reply = await post(port, PATH, {**CHAT, "stream": True})

        assert_ends_in_error(reply)
        assert made.account.outcome is Outcome.ENGINE_ERROR
        made.play.assert_idle()
