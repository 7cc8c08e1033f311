"""The HTTP server of one engine: routes, errors in vLLM's form, start and stop."""

import asyncio
import hmac
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import orjson
from aiohttp import web

from pdproxy.sim import generate, operations, scaleout_api
from pdproxy.sim import transfer as kv_transfer
from pdproxy.sim.books import Books
from pdproxy.sim.config import SimConfig
from pdproxy.sim.faults import Faults
from pdproxy.sim.node import NODE, Node, SeenRequest, json_response
from pdproxy.sim.problems import Problem, scale_out_disabled, unauthorized
from pdproxy.sim.scheduler import Engine

# vLLM has no limit of its own; this one only stops accidents.
_MAX_BODY_BYTES = 256 * 1024 * 1024
_BACKLOG = 1024
_SHUTDOWN_S = 0.5
_GUARDED = ("/v1/", "/inference/")
_SCALE_OUT = ("/inference/v1/", "/v1/chat/completions/", "/v1/completions/")
_WILDCARD_HOSTS = ("0.0.0.0", "::", "")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Sim:
    """A running engine."""

    host: str
    port: int
    node: Node

    @property
    def url(self) -> str:
        """Where it listens, such as `http://127.0.0.1:7100`."""
        return f"http://{self.host}:{self.port}"

    @property
    def engine(self) -> Engine:
        """The scheduler, with its queues and counters."""
        return self.node.engine

    @property
    def books(self) -> Books:
        """The KV blocks."""
        return self.node.engine.books

    @property
    def faults(self) -> Faults:
        """Failures on demand."""
        return self.node.faults

    @property
    def requests(self) -> deque[SeenRequest]:
        """Generation requests as received, oldest first."""
        return self.node.requests


@asynccontextmanager
async def serve(
    config: SimConfig, on_crash: Callable[[], None] | None = None
) -> AsyncIterator[Sim]:
    """Run an engine in this event loop until the context ends.

    Args:
        config: The engine; port 0 takes a free one.
        on_crash: Called when a bad handle has killed the engine; without it, the engine only
            stops to listen.
    """
    async with AsyncExitStack() as stack:
        listener = socket.create_server((config.host, config.port), backlog=_BACKLOG)
        stack.callback(listener.close)
        port = int(listener.getsockname()[1])
        host = "127.0.0.1" if config.host in _WILDCARD_HOSTS else config.host
        transfer = await stack.enter_async_context(kv_transfer.Transfer(config))
        dead = asyncio.Event()
        engine = Engine(config, (host, port), transfer, on_crash or dead.set)
        node = Node(config, engine, requests=deque(maxlen=config.keep_requests))
        # Cancellation on a closed connection is off by default; vLLM aborts such requests.
        runner = web.AppRunner(
            build_app(node),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.SockSite(runner, listener)
        await site.start()
        for work in (engine.run(), _stop_listening(dead, site)):
            task = asyncio.get_running_loop().create_task(work)
            stack.push_async_callback(_cancelled, task)
        yield Sim(host, port, node)


async def _stop_listening(dead: asyncio.Event, site: web.SockSite) -> None:
    """A dead engine takes no more connections; the open ones get errors."""
    await dead.wait()
    await site.stop()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def build_app(node: Node) -> web.Application:
    """The engine's routes."""
    app = web.Application(middlewares=[_errors], client_max_size=_MAX_BODY_BYTES)
    app[NODE] = node
    app.on_response_prepare.append(_stamp)
    app.router.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.completions),
            web.post("/v1/responses", generate.responses),
            web.post("/v1/messages", generate.messages),
            web.post("/inference/v1/generate", generate.tokens),
            web.post("/inference/v1/abort_requests", scaleout_api.abort_requests),
            web.post("/v1/chat/completions/render", scaleout_api.render_chat),
            web.post("/v1/completions/render", scaleout_api.render_completion),
            web.post("/v1/embeddings", operations.embeddings),
            web.get("/v1/models", operations.models),
            web.get("/health", operations.health),
            web.get("/ping", operations.health),
            web.post("/ping", operations.health),
            web.get("/version", operations.version),
            web.get("/load", operations.load),
            web.get("/metrics", operations.metrics),
            web.post("/tokenize", operations.tokenize),
            web.post("/detokenize", operations.detokenize),
            web.post("/reset_prefix_cache", operations.reset_prefix_cache),
            web.post(kv_transfer.PATH, operations.pull),
            web.post("/sim/faults", operations.set_faults),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the key, and turn failures into vLLM's error bodies."""
    node = request.app[NODE]
    try:
        _check_access(request, node.config)
        if node.config.keep_requests and request.method == "POST":
            await _remember(request, node)
        return await handler(request)
    except Problem as problem:
        return json_response(problem.to_json(), status=problem.status)
    except web.HTTPException as error:
        # FastAPI's form for unknown paths and methods.
        detail = orjson.dumps({"detail": error.reason})
        allow = error.headers.get("Allow")
        headers = None if allow is None else {"Allow": allow}
        return json_response(detail, status=error.status, headers=headers)


def _check_access(request: web.Request, config: SimConfig) -> None:
    path = request.path
    if config.api_key is not None and path.startswith(_GUARDED):
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {config.api_key}".encode()):
            raise unauthorized()
    if not config.scale_out and path.startswith(_SCALE_OUT):
        raise scale_out_disabled()


async def _remember(request: web.Request, node: Node) -> None:
    """Keep a request for tests."""
    if not request.path.startswith(_GUARDED):
        return
    body: dict[str, object] | None = None
    with suppress(orjson.JSONDecodeError):
        parsed = orjson.loads(await request.read())
        body = parsed if isinstance(parsed, dict) else None
    node.requests.append(SeenRequest(request.method, request.path, request.headers, body))


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    """The headers that every answer of vLLM has."""
    response.headers["Server"] = "uvicorn"
    response.headers["Vary"] = "Origin"
    if request.app[NODE].config.request_id_headers:
        given = request.headers.get("X-Request-Id")
        response.headers["X-Request-Id"] = given or secrets.token_hex(16)
