"""The fakes themselves: a test that trusts a wrong fake proves nothing."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import behaviours, client, toy
from tests.fakes.answer import Answer, EngineRequest, chunk_bytes, head_bytes
from tests.fakes.client import RawClient, assert_whole_stream
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import black_hole, refusing_port
from tests.fakes.wire import PeerGone, Wire

CHAT = "/v1/chat/completions"
ASK = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def test_decoder_streams_the_toy_models_words() -> None:
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}

    async with FakeEngine("decode") as d1:
        reply = await client.post(d1.port, CHAT, body)

    assert_whole_stream(reply)
    assert reply.text == toy.answer(ASK, 4)
    assert reply.chunks_of_json[0]["choices"][0]["delta"]["role"] == "assistant"
    assert reply.chunks_of_json[-1]["usage"]["completion_tokens"] == 4


async def test_decoder_answers_one_document_and_connections_are_kept() -> None:
    async with FakeEngine("decode") as d1, await RawClient.connect(d1.port) as peer:
        first = await peer.ask("POST", CHAT, client.as_json(ASK))
        second = await peer.ask("POST", CHAT, client.as_json(ASK))

    assert first.text == second.text == toy.answer(ASK, 4)
    assert [request.connection for request in d1.requests] == [1, 1]


def test_spoken_text_tokenises_back_and_continues_where_it_stopped() -> None:
    prompt = {"prompt": "Bonjour"}
    whole = toy.answer(prompt, 12)
    part = toy.answer(prompt, 5)

    assert whole == part + toy.answer({"prompt": f"Bonjour{part}"}, 7)
    assert whole != toy.answer({"prompt": "Bonjours"}, 12)


async def test_handle_is_good_for_one_pull_and_held_until_the_decoder_is_done() -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        handle = (await client.post(p1.port, CHAT, ASK)).json["kv_transfer_params"]
        held_before = p1.held
        body = {**ASK, "kv_transfer_params": handle}
        good = await client.post(d1.port, CHAT, body)
        held_after = p1.held
        bad = await client.post(d1.port, CHAT, body)

    assert (held_before, held_after) == (1, 0)
    assert good.text == toy.answer(ASK, 4)
    assert bad.text == "STALE" * 4


async def test_engine_notes_a_peer_that_leaves_early() -> None:
    async with FakeEngine("decode", behaviours.hang) as d1:
        async with await RawClient.connect(d1.port) as peer:
            await peer.send_request("POST", CHAT, client.as_json(ASK))
            await d1.wait_for_calls(1)
        async with asyncio.timeout(5):
            await d1.only_call.finished.wait()

    assert d1.only_call.closed_early
    assert d1.open_answers == 0


async def test_an_answered_request_is_not_closed_early() -> None:
    async with FakeEngine("decode") as d1:
        await client.post(d1.port, CHAT, ASK)

    assert not d1.only_call.closed_early


async def test_engine_reads_chunked_bodies_and_answers_expect_continue() -> None:
    head = head_bytes(200).replace(b"HTTP/1.1 200 OK", b"POST /v1/chat/completions HTTP/1.1")
    head = (
        head.removesuffix(b"\r\n") + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    body = client.as_json(ASK)

    async with FakeEngine("decode") as d1, await RawClient.connect(d1.port) as peer:
        await peer.wire.write(head)
        interim = await peer.wire.read_until(b"\r\n\r\n")
        await peer.wire.write(chunk_bytes(body[:9]) + chunk_bytes(body[9:]) + b"0\r\n\r\n")
        reply = await peer.read_rest(await peer.read_head())

    assert interim.startswith(b"HTTP/1.1 100")
    assert reply.text == toy.answer(ASK, 4)


async def test_recompute_ends_with_the_word_after_its_tokens() -> None:
    async with FakeEngine("decode", behaviours.recompute(2)) as d1:
        reply = await client.post(d1.port, CHAT, {**ASK, "stream": True})

    assert reply.text == toy.answer(ASK, 2)
    assert reply.chunks_of_json[-1]["choices"][0]["stop_reason"] == "recomputed"


@pytest.mark.parametrize("how", [behaviours.close, behaviours.reset], ids=["fin", "rst"])
async def test_engine_leaves_without_an_answer(how: behaviours.Behaviour) -> None:
    async with FakeEngine("decode", how) as d1, await RawClient.connect(d1.port) as peer:
        await peer.send_request("POST", CHAT, client.as_json(ASK))
        with pytest.raises(PeerGone):
            await peer.read_head()

    assert not d1.only_call.closed_early


async def test_pieces_arrive_as_they_were_sent() -> None:
    async def pieces(_: EngineRequest, answer: Answer) -> None:
        await answer.start_stream()
        for piece in (b"data: a", b"b\n\ndata: c\n\n"):
            await answer.chunk(piece)
        await answer.end()

    async with FakeEngine("decode", pieces) as d1:
        reply = await client.post(d1.port, CHAT, ASK)

    assert [data for _, data in reply.chunks] == [b"data: a", b"b\n\ndata: c\n\n"]
    assert reply.events == ["ab", "c"]


async def test_stopped_engine_refuses_and_a_started_one_is_back_on_its_port() -> None:
    async with FakeEngine("decode") as d1:
        port = d1.port
        await d1.stop()
        with pytest.raises(ConnectionRefusedError):
            await Wire.connect(port)
        await d1.start()

        assert d1.port == port
        assert (await client.post(port, CHAT, ASK)).status == 200


async def test_refusing_port_refuses_and_black_hole_is_silent() -> None:
    with refusing_port() as port, pytest.raises(ConnectionRefusedError):
        await Wire.connect(port)
    with black_hole() as port, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await Wire.connect(port)


async def test_engine_tells_what_is_wrong_with_a_request() -> None:
    async with FakeEngine("prefill") as p1:
        reply = await client.post(p1.port, CHAT, {**ASK, "max_tokens": 1, "min_tokens": 9})

    assert reply.status == 400
    assert "min_tokens" in reply.error["message"]
