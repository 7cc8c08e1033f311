"""The same exchanges within TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from pdproxy import errors
from pdproxy.core.instance import Endpoint
from pdproxy.upstream.client import EngineClient
from tests.upstream.exchanges import RecordingSink, post
from tests.upstream.raw_server import (
    EOF,
    PATIENT,
    PAUSE,
    REQUEST,
    RST,
    answer,
    chunked,
    raw_server,
)

CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
KEY = Path(__file__).parent / "tls" / "key.pem"


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


def tls_client() -> EngineClient:
    return EngineClient(ssl_context=ssl.create_default_context(cafile=str(CERTIFICATE)))


async def test_tls_requests_are_kept_alive_and_streamed():
    client = tls_client()
    script = (REQUEST, answer(), REQUEST, chunked(b"a", b"b")[:-5], PAUSE, b"0\r\n\r\n")
    async with raw_server(script, tls=server_context()) as server:
        assert await (await post(client, server)).read() == b"ok"
        sink = RecordingSink()
        response = await post(client, server, body=b"x" * 500_000)
        response.pipe(sink)

        assert await sink.outcome() is None
        assert sink.body == b"ab"
        assert server.connection_count == 1
        await client.close()


@pytest.mark.parametrize("end", [EOF, RST])
async def test_a_loss_within_tls_is_a_loss(end):
    client = tls_client()
    async with raw_server((REQUEST, chunked(b"a")[:-5], PAUSE, end), tls=server_context()) as raw:
        response = await post(client, raw)

        with pytest.raises(errors.UpstreamLost):
            await response.read()
        await client.close()


async def test_a_stale_tls_connection_is_replaced():
    client = tls_client()
    scripts = ((REQUEST, answer(), REQUEST, EOF), (REQUEST, answer(b"new")))
    async with raw_server(*scripts, tls=server_context()) as server:
        await (await post(client, server)).read()

        assert await (await post(client, server)).read() == b"new"
        await client.close()


async def test_tls_back_pressure_stops_the_engine():
    client = tls_client()
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
    client = tls_client()
    async with raw_server((b"HTTP/1.1 400 Bad\r\n\r\n", EOF)) as server:
        endpoint = Endpoint.of("127.0.0.1", server.endpoint.port, True)

        with pytest.raises(errors.UpstreamUnreachable):
            await client.send(endpoint, "GET", "/", [], None, timeouts=PATIENT)
        await client.close()
