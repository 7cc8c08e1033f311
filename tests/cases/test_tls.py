"""TLS on both sides of the proxy: its own certificate, and those of engines."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cases.scene import CHAT, chat
from tests.fakes import client
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import proxy_here, running_proxy
from tests.upstream.test_tls import CERTIFICATE, KEY, server_context


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def within_tls(engine: FakeEngine) -> AsyncIterator[str]:
    """Yield the https:// address of a server that passes everything on to an engine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", engine.port)
        await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context())
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def engines_within_tls() -> AsyncIterator[tuple[str, ...]]:
    """Yield the flags of a prefiller and a decoder."""
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        within_tls(p1) as prefiller,
        within_tls(d1) as decoder,
    ):
        yield ("--prefillers", prefiller, "--decoders", decoder)


@pytest.mark.e2e
async def test_engines_are_checked_against_their_authority() -> None:
    async with (
        engines_within_tls() as flags,
        running_proxy([], [], *flags, "--engine-ca-file", str(CERTIFICATE)) as proxy,
    ):
        whole = await client.post(proxy.port, CHAT, chat(max_tokens=2))
        stream = await client.post(proxy.port, CHAT, chat(max_tokens=2, stream=True))

    assert whole.status == 200
    client.assert_whole_stream(stream)


@pytest.mark.e2e
async def test_engines_of_another_authority_are_refused_and_the_reason_is_shown(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other.pem"
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    files = ("-keyout", str(tmp_path / "other.key"), "-out", str(other), "-subj", "/CN=other")
    await asyncio.to_thread(subprocess.run, [*made, *files], check=True, capture_output=True)

    async with (
        engines_within_tls() as flags,
        running_proxy([], [], *flags, "--engine-ca-file", str(other), wait_ready=False) as proxy,
    ):
        reply = await client.post(proxy.port, CHAT, chat(max_tokens=2))
        shown = await client.get(proxy.port, "/instances")

    assert (reply.status, reply.error["code"]) == (503, "no_instance")
    assert shown.body.count(b"certificate verify failed") == 2


async def test_clients_speak_https_with_the_proxy() -> None:
    flags = ("--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(KEY))
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    body = client.as_json(chat(max_tokens=2))
    sent = client.request_bytes("POST", CHAT, body, [*client.JSON_TYPE, ("Connection", "close")])
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        proxy_here([p1], [d1], *flags, wait_ready=False) as proxy,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, ssl=trusting)
        writer.write(sent)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", proxy.port, ssl=True)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"choices" in answer
