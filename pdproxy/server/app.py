"""The routes: which path is answered by what, and nothing else.

Rule: no middleware; it would run on every request of the hot path. Unknown paths and methods
reach `_unknown` as the last route.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from aiohttp import web

from pdproxy.core.api import Api
from pdproxy.errors import MethodNotAllowed, NotFound, PDProxyError
from pdproxy.server import admin, dashboard, instances, operations, running
from pdproxy.server.context import Context
from pdproxy.server.failures import to_failure
from pdproxy.server.generate import generate
from pdproxy.server.openapi import openapi
from pdproxy.server.passthrough import passthrough

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = Callable[[Context, web.Request], Awaitable[web.StreamResponse]]

# Engines serve these beside /v1; other paths of theirs (start_profile, abort, sleep) are not for
# clients.
PASSED_PATHS = (
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
)


# A server between proxy and engine may resolve these, and so reach any path of the engine's.
_DOT_SEGMENT = re.compile(r"(?:^|[/\\])\.\.?(?:[/\\]|$)")


def build_app(context: Context) -> web.Application:
    """Return the application; the worker serves it."""
    app = web.Application(client_max_size=context.rules.max_body_bytes)
    allowed: dict[str, set[str]] = {}

    def route(method: str, path: str, answer: Answer) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await answer(context, request)

        app.router.add_route(method, path, handler)
        allowed.setdefault(path, set()).add(method)
        if method == "GET":
            app.router.add_route("HEAD", path, handler)
            allowed[path].add("HEAD")

    _add_generate(app, context, allowed)
    for method, path, answer in _OPERATIONS:
        route(method, path, answer)
    route("GET", "/v1/models", operations.Models().answer)
    route("GET", "/dashboard", dashboard.Dashboard().answer)
    _add_last(app, context, allowed)
    return app


_OPERATIONS: tuple[tuple[str, str, Answer], ...] = (
    ("GET", "/health", operations.health),
    ("GET", "/ping", operations.health),
    ("POST", "/ping", operations.health),
    ("GET", "/ready", operations.ready),
    ("GET", "/version", operations.version),
    ("GET", "/healthcheck", operations.healthcheck),
    ("GET", "/metrics", operations.metrics),
    ("GET", "/openapi.json", openapi),
    ("GET", "/dashboard/data", dashboard.data),
    ("GET", "/debug/requests", running.running),
    ("GET", "/instances", instances.list_instances),
    ("POST", "/instances/drain", instances.drain),
    ("POST", "/instances/undrain", instances.undrain),
    ("POST", "/instances/add", admin.add),
    ("POST", "/instances/remove", admin.remove),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
)


def build_metrics_app(context: Context) -> web.Application:
    """Return the application of the port that only scrapers use."""
    app = web.Application()

    async def metrics(request: web.Request) -> web.Response:
        return await operations.metrics(context, request)

    async def health(request: web.Request) -> web.Response:
        return await operations.health(context, request)

    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    return app


def _add_generate(app: web.Application, context: Context, allowed: dict[str, set[str]]) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        return await generate(context, request, Api.CHAT)

    async def completions(request: web.Request) -> web.StreamResponse:
        return await generate(context, request, Api.COMPLETIONS)

    for api, handler in ((Api.CHAT, chat), (Api.COMPLETIONS, completions)):
        app.router.add_post(api.value, handler)
        allowed[api.value] = {"POST"}


def _add_last(app: web.Application, context: Context, allowed: dict[str, set[str]]) -> None:
    """Add what is reached only if nothing above matched."""

    async def last(request: web.Request) -> web.StreamResponse:
        path = request.path
        methods = allowed.get(path)
        if methods is not None:
            return _unknown(MethodNotAllowed(f"{path} does not take {request.method}"), methods)
        # An engine redirects a path of ours with a slash behind it to its own address.
        is_slashed = path.endswith("/") and path.rstrip("/") in allowed
        is_odd = is_slashed or _DOT_SEGMENT.search(unquote(path)) is not None
        if not is_odd and (path in PASSED_PATHS or path.startswith("/v1/")):
            return await passthrough(context, request)
        return _unknown(NotFound(f"there is no {path}"))

    app.router.add_route("*", "/{path:.*}", last)


def _unknown(error: PDProxyError, methods: set[str] | None = None) -> web.Response:
    failure = to_failure(error)
    headers = dict(failure.headers)
    if methods is not None:
        headers["allow"] = ", ".join(sorted(methods))
    return web.Response(status=failure.status, headers=headers, body=failure.body)
