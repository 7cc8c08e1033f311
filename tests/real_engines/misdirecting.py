"""A prefiller whose KV cache cannot be pulled: a real one behind it, and a handle that misleads."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from tests.fakes.ports import free_port, refusing_port
from tests.real_engines.engines import ask

JsonObject = dict[str, Any]
TOO_MANY_TOKENS = 10_000_000


@dataclass(slots=True)
class Misdirecting:
    """A running one; `handles` counts those that it has spoiled."""

    address: str
    handles: int = 0


@asynccontextmanager
async def misdirecting(
    engine: str, decoder: str, spoil: Callable[[JsonObject], JsonObject]
) -> AsyncIterator[Misdirecting]:
    """Serve all that `engine` serves, with `spoil` applied to the KV handles in its answers.

    Nobody can use such a handle, so `decoder` is made to give it back, lest the engine keeps its
    KV cache, and itself busy, until the lease ends.
    """
    port = free_port()
    state = Misdirecting(f"127.0.0.1:{port}")

    async def forward(request: web.Request) -> web.Response:
        body: JsonObject = orjson.loads(await request.read() or b"{}")
        reply = await ask(engine, request.method, request.raw_path, body or None)
        answer = reply.body
        if request.method == "POST" and reply.status == 200:
            fields = reply.json
            if fields.get("kv_transfer_params"):
                state.handles += 1
                handle = fields["kv_transfer_params"]
                await _give_back(decoder, request.path, body, handle)
                fields["kv_transfer_params"] = spoil(handle)
                answer = orjson.dumps(fields)
        kind = reply.headers.get("content-type", "text/plain").partition(";")[0]
        return web.Response(status=reply.status, body=answer, content_type=kind)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield state
    finally:
        await runner.cleanup()


def restarted(handle: JsonObject) -> JsonObject:
    """Name an engine that is no longer behind the address, as after a restart."""
    return {**handle, "remote_engine_id": str(uuid.uuid4())}


def gone(handle: JsonObject) -> JsonObject:
    """Name an engine and an address where nobody listens, as after a crash."""
    with refusing_port() as port:
        return {**restarted(handle), "remote_port": port}


async def _give_back(decoder: str, path: str, body: JsonObject, handle: JsonObject) -> None:
    """Let a decoder refuse a request that has the handle: it then tells the prefiller."""
    refused = {**body, "max_tokens": TOO_MANY_TOKENS, "kv_transfer_params": handle}
    refused.pop("max_completion_tokens", None)
    reply = await ask(decoder, "POST", path, refused)
    assert reply.status == 400, (reply.status, reply.body)
