"""EngineClient: what goes out, which connection it uses, and what failures become."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
from pathlib import Path

import pytest

from pdproxy import errors
from pdproxy.upstream.client import ClientLimits, EngineClient, Response, Timeouts
from tests.fakes.ports import black_hole
from tests.fakes.waiting import until
from tests.upstream.raw_server import (
    EOF,
    PATIENT,
    PAUSE,
    REQUEST,
    RST,
    RawServer,
    Step,
    answer,
    chunked,
    raw_server,
)
from tests.upstream.sinks import RecordingSink

CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
KEY = Path(__file__).parent / "tls" / "key.pem"


async def post(
    client: EngineClient, server: RawServer, body: bytes | None = b"hi", method: str = "POST"
) -> Response:
    return await client.send(server.endpoint, method, "/x", [], body, timeouts=PATIENT)


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# --- requests


@pytest.mark.parametrize(
    ("method", "body", "framing"),
    [
        pytest.param("POST", b"hello", {"content-length": ["5"]}, id="bytes"),
        pytest.param("POST", b"", {"content-length": ["0"]}, id="empty"),
        pytest.param("POST", None, {"content-length": ["0"]}, id="POST without a body"),
        pytest.param("GET", None, {}, id="GET"),
        pytest.param("DELETE", None, {}, id="DELETE"),
    ],
)
@pytest.mark.case("C64", "C89")
async def test_a_request_has_one_host_and_at_most_one_framing_header(client, method, body, framing):
    async with raw_server((REQUEST, answer())) as server:
        response = await post(client, server, body, method)
        await response.read()

        request = server.requests[0]
        assert request.body == (body or b"")
        assert request.head.startswith(f"{method} /x HTTP/1.1\r\n".encode())
        assert request.values("host") == [server.endpoint.authority]
        for name in ("content-length", "transfer-encoding"):
            assert request.values(name) == framing.get(name, [])


async def test_the_answer_has_its_status_and_headers(client):
    async with (
        raw_server((REQUEST, answer(b"no", 429, b"Retry-After: 7\r\n"))) as server,
        await post(client, server) as response,
    ):
        assert response.status == 429
        assert response.header("retry-after") == "7"
        assert response.header("x-missing") is None
        assert await response.read() == b"no"
        assert await response.read() == b"no"


@pytest.mark.parametrize("size_bytes", [65_536, 65_537, 20 * 2**20])
@pytest.mark.case("C66", "C70")
async def test_large_bodies_pass_both_ways(client, size_bytes):
    body = os.urandom(64) * (size_bytes // 64) + b"x" * (size_bytes % 64)
    async with raw_server((REQUEST, answer(body[::-1]))) as server:
        response = await post(client, server, body)

        assert await response.read() == body[::-1]
        assert server.requests[0].body == body
        assert client.idle_connections(server.endpoint) == 1


async def test_a_body_over_the_limit_of_its_reader_is_refused(client):
    for message in (answer(b"x" * 100), chunked(b"x" * 60, b"y" * 40)):
        for steps in ((message,), (message[:-30], PAUSE, message[-30:])):
            async with raw_server((REQUEST, *steps) * 2) as server:
                response = await post(client, server)
                with pytest.raises(errors.UpstreamProtocol):
                    await response.read(99)
                response = await post(client, server)
                assert len(await response.read(100)) == 100


async def test_a_request_that_cannot_be_written_touches_no_connection(client):
    async with raw_server((REQUEST, answer())) as server:
        with pytest.raises(errors.InvalidRequest):
            await client.send(
                server.endpoint, "POST", "/x", [("X-A", "b\r\nX-B: c")], b"hi", timeouts=PATIENT
            )

        assert server.connection_count == 0


async def test_the_answer_to_head_has_no_body(client):
    async with raw_server((REQUEST, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")) as server:
        for _ in range(2):
            response = await post(client, server, None, "HEAD")
            assert response.header("content-length") == "10"
            assert await response.read() == b""


# --- keep-alive


async def test_a_connection_serves_one_request_after_another(client):
    async with raw_server((REQUEST, answer(), REQUEST, chunked(b"a"), REQUEST, answer())) as server:
        for body in (b"ok", b"a", b"ok"):
            assert await (await post(client, server)).read() == body

        assert server.connection_count == 1


async def test_a_connection_is_free_as_soon_as_its_answer_is_complete(client):
    async with raw_server((REQUEST, answer(), REQUEST, answer())) as server:
        first = await post(client, server)
        await until(lambda: client.idle_connections(server.endpoint) == 1)

        second = await post(client, server)

        assert (await first.read(), await second.read()) == (b"ok", b"ok")
        assert server.connection_count == 1


async def test_an_answer_that_closes_is_not_reused(client):
    closing = answer(extra=b"Connection: close\r\n")
    async with raw_server((REQUEST, closing)) as server:
        for _ in range(3):
            assert await (await post(client, server)).read() == b"ok"

        assert server.connection_count == 3
        await until(lambda: server.open_count == 0)


@pytest.mark.parametrize("end", [EOF, RST])
async def test_a_stale_connection_is_replaced_once(client, end):
    async with raw_server((REQUEST, answer(), REQUEST, end), (REQUEST, answer(b"new"))) as server:
        await (await post(client, server)).read()

        response = await post(client, server)

        assert await response.read() == b"new"
        assert [request.body for request in server.requests] == [b"hi"] * 3


async def test_a_fresh_connection_that_closes_without_a_byte_is_not_tried_again(client):
    async with raw_server((REQUEST, EOF)) as server:
        with pytest.raises(errors.UpstreamLost):
            await post(client, server)

        assert server.connection_count == 1


async def test_the_replacement_of_a_stale_connection_is_not_replaced(client):
    async with raw_server((REQUEST, answer(), REQUEST, EOF), (REQUEST, EOF)) as server:
        await (await post(client, server)).read()

        with pytest.raises(errors.UpstreamLost):
            await post(client, server)

        assert server.connection_count == 2


@pytest.mark.parametrize(
    "start", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"]
)
async def test_a_reused_connection_that_sent_a_byte_is_not_tried_again(client, start):
    async with raw_server((REQUEST, answer(), REQUEST, start, PAUSE, EOF)) as server:
        await (await post(client, server)).read()

        with pytest.raises(errors.UpstreamLost):
            await post(client, server)

        assert server.connection_count == 1


@pytest.mark.case("C75")
async def test_after_a_restart_each_request_needs_at_most_one_failed_attempt(client):
    count = 200
    restart = asyncio.Event()
    gathered = asyncio.Event()
    old = (REQUEST, gathered, answer(), REQUEST, restart, RST)
    new = (REQUEST, answer(b"new"))
    async with raw_server(*[old] * count, new) as server:
        firsts = [asyncio.create_task(post(client, server)) for _ in range(count)]
        await until(lambda: len(server.requests) == count)
        gathered.set()
        for first in firsts:
            await (await first).read()
        assert client.idle_connections(server.endpoint) == count

        seconds = [asyncio.create_task(post(client, server)) for _ in range(count)]
        await until(lambda: len(server.requests) == 2 * count)
        restart.set()
        bodies = [await (await second).read() for second in seconds]

        assert bodies == [b"new"] * count
        assert len(server.requests) == 3 * count


@pytest.mark.case("C75")
async def test_one_stale_connection_empties_the_idle_list(client):
    gathered = asyncio.Event()
    first = (REQUEST, gathered, answer(), REQUEST, RST)
    async with raw_server(*[first] * 5, (REQUEST, answer(b"new"))) as server:
        tasks = [asyncio.create_task(post(client, server)) for _ in range(5)]
        await until(lambda: len(server.requests) == 5)
        gathered.set()
        for task in tasks:
            await (await task).read()

        assert await (await post(client, server)).read() == b"new"

        assert client.idle_connections(server.endpoint) == 1
        await until(lambda: server.open_count == 1)


# --- failures to connect


async def test_a_refused_connection_is_unreachable(client):
    async with raw_server((REQUEST, answer())) as server:
        pass

    with pytest.raises(errors.UpstreamUnreachable) as caught:
        await post(client, server)

    assert str(server.endpoint.port) not in caught.value.message
    assert str(server.endpoint) in caught.value.detail


@pytest.mark.case("C69")
async def test_a_connection_that_does_not_come_is_a_timeout(client):
    with black_hole() as port:
        async with raw_server((EOF,)) as server:
            endpoint = type(server.endpoint).of("127.0.0.1", port)
        with pytest.raises(errors.UpstreamTimeout) as caught:
            await client.send(endpoint, "GET", "/", [], None, timeouts=Timeouts(0.1, 10, 10))

    assert caught.value.phase == "connect"


# --- TLS


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


async def tls_client() -> EngineClient:
    return EngineClient(ssl_context=ssl.create_default_context(cafile=str(CERTIFICATE)))


async def test_tls_requests_are_kept_alive_and_streamed():
    client = await tls_client()
    script = (REQUEST, answer(), REQUEST, chunked(b"a", b"b")[:-5], PAUSE, b"0\r\n\r\n")
    async with raw_server(script, tls=server_context()) as server:
        assert await (await post(client, server)).read() == b"ok"
        sink = RecordingSink()
        response = await post(client, server, b"x" * 500_000)
        response.pipe(sink)

        assert await sink.outcome() is None
        assert sink.body == b"ab"
        assert server.connection_count == 1
        await client.close()


@pytest.mark.parametrize("end", [EOF, RST])
async def test_a_loss_within_tls_is_a_loss(end):
    client = await tls_client()
    async with raw_server((REQUEST, chunked(b"a")[:-5], PAUSE, end), tls=server_context()) as raw:
        response = await post(client, raw)

        with pytest.raises(errors.UpstreamLost):
            await response.read()
        await client.close()


async def test_a_stale_tls_connection_is_replaced():
    client = await tls_client()
    scripts = ((REQUEST, answer(), REQUEST, EOF), (REQUEST, answer(b"new")))
    async with raw_server(*scripts, tls=server_context()) as server:
        await (await post(client, server)).read()

        assert await (await post(client, server)).read() == b"new"
        await client.close()


async def test_tls_back_pressure_stops_the_engine():
    client = await tls_client()
    size_bytes = 16 * 2**20
    async with raw_server((REQUEST, answer(b"x" * size_bytes)), tls=server_context()) as server:
        sink = RecordingSink()
        response = await post(client, server)
        response.pipe(sink)
        response.pause()
        await asyncio.sleep(0.1)
        assert len(sink.body) < size_bytes / 2

        response.resume()

        assert await sink.outcome() is None
        assert len(sink.body) == size_bytes
        await client.close()


async def test_an_untrusted_certificate_is_unreachable(client):
    async with raw_server((REQUEST, answer()), tls=server_context()) as server:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server's handshake

        with pytest.raises(errors.UpstreamUnreachable):
            await post(client, server)


async def test_plain_bytes_in_place_of_tls_are_unreachable():
    client = await tls_client()
    async with raw_server((b"HTTP/1.1 400 Bad\r\n\r\n", EOF)) as server:
        endpoint = type(server.endpoint).of("127.0.0.1", server.endpoint.port, True)

        with pytest.raises(errors.UpstreamUnreachable):
            await client.send(endpoint, "GET", "/", [], None, timeouts=PATIENT)
        await client.close()


# --- leaving


@pytest.mark.parametrize(
    "script",
    [
        pytest.param((REQUEST,), id="waiting for the head"),
        pytest.param((REQUEST, b"HTTP/1.1 200 OK\r\nX"), id="inside the head"),
        pytest.param((REQUEST, answer(b"x" * 9)[:-1]), id="inside the body"),
    ],
)
@pytest.mark.case("C44")
async def test_a_cancelled_caller_closes_the_connection(client, script):
    async def whole() -> bytes:
        return await (await post(client, server)).read()

    async with raw_server(script) as server:
        task = asyncio.create_task(whole())
        await until(lambda: server.requests)
        for _ in range(10):
            await asyncio.sleep(0)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.open_count == 0, within_s=1)
        assert client.idle_connections(server.endpoint) == 0


@pytest.mark.case("C44")
async def test_a_caller_cancelled_at_any_turn_of_the_loop_leaves_nothing(client):
    async def whole() -> bytes:
        return await (await post(client, server)).read()

    script: list[bytes | Step] = []
    for _ in range(100):
        script += [REQUEST, answer(b"ok")[:20], PAUSE, answer(b"ok")[20:]]
    async with raw_server(script) as server:
        for turns in range(40):
            task = asyncio.create_task(whole())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

            # Whatever became of it, what is idle now works.
            assert await whole() == b"ok"

        await until(lambda: server.open_count <= 1)


async def test_a_caller_cancelled_while_connecting_leaves_no_file_open(client):
    with black_hole() as port:
        async with raw_server((EOF,)) as server:
            endpoint = type(server.endpoint).of("127.0.0.1", port)
        before = open_files()
        task = asyncio.create_task(
            client.send(endpoint, "GET", "/", [], None, timeouts=Timeouts(10, 10, 10))
        )
        await until(lambda: open_files() > before)

        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: open_files() == before)


async def test_a_head_that_arrives_with_the_cancellation_does_not_disturb_the_next_request(client):
    async with raw_server((REQUEST, answer(b"one"), REQUEST, answer(b"two"))) as server:
        first = asyncio.create_task(post(client, server))
        # The answer is complete and its connection idle before the caller has run again.
        for _ in range(200):
            await asyncio.sleep(0)
            if client.idle_connections(server.endpoint):
                break
        second = asyncio.create_task(post(client, server))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        assert await (await second).read() == b"two"


# --- many


@pytest.mark.case("C67")
async def test_a_thousand_requests_at_once_all_reach_the_engine(client):
    count = 1000
    gate = asyncio.Event()
    async with raw_server((REQUEST, answer())) as server:
        await (await post(client, server)).read()  # what the loop itself opens once is open now
        client.forget(server.endpoint)
        await until(lambda: server.open_count == 0)
    before = open_files()
    async with raw_server((REQUEST, gate, answer())) as server:
        tasks = [asyncio.create_task(post(client, server)) for _ in range(count)]
        await until(lambda: len(server.requests) == count, within_s=20)
        gate.set()
        bodies = [await (await task).read() for task in tasks]

        assert bodies == [b"ok"] * count
        assert client.idle_connections(server.endpoint) == count
        client.forget(server.endpoint)
        await until(lambda: server.open_count == 0)

    await until(lambda: open_files() <= before)


async def test_close_ends_requests_in_flight_and_refuses_new_ones():
    client = EngineClient(ClientLimits())
    async with raw_server((REQUEST, answer(), REQUEST)) as server:
        await (await post(client, server)).read()
        waiting = asyncio.create_task(post(client, server))
        await until(lambda: len(server.requests) == 2)

        await client.close()

        with pytest.raises(errors.UpstreamLost):
            await waiting
        with pytest.raises(errors.Overloaded):
            await post(client, server)
        await until(lambda: server.open_count == 0)


async def test_no_engine_address_is_in_a_text_for_clients(client):
    scripts = ((REQUEST, EOF), (REQUEST, b"garbage"), (REQUEST,))
    async with raw_server(*scripts) as server:
        for _ in scripts:
            with pytest.raises(errors.UpstreamError) as caught:
                await client.send(
                    server.endpoint, "POST", "/x", [], b"hi", timeouts=Timeouts(10, 0.1, 10)
                )

            assert str(server.endpoint.port) not in caught.value.message
            assert str(server.endpoint.port) in caught.value.detail
