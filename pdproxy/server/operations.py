"""Operations: health, readiness, version, models, metrics; open to all, and never slow."""

from __future__ import annotations

from aiohttp import web

from pdproxy import __version__
from pdproxy.core.headers import to_client
from pdproxy.core.instance import Instance, Role
from pdproxy.core.jsonfields import encode
from pdproxy.dispatch.account import Account
from pdproxy.errors import EngineAnswered, NoInstance, PDProxyError, UpstreamError
from pdproxy.server.context import Context
from pdproxy.server.downstream import SERVER, ClientDownstream
from pdproxy.server.generate import counted
from pdproxy.server.intake import engine_headers
from pdproxy.upstream.limits import Timeouts

JSON_TYPE = "application/json"
UNAVAILABLE = 503
OK = 200
# Statuses that another instance would give as well: the client's key is wrong.
_CLIENTS_FAULT = frozenset({401, 403})
MAX_MODELS_BYTES = 16 * 1024 * 1024
MAX_CACHED_LISTS = 64


def reply(value: object, status: int = OK) -> web.Response:
    """Return a JSON answer."""
    headers = {"Content-Type": JSON_TYPE, "Server": SERVER}
    return web.Response(status=status, body=encode(value), headers=headers)


async def health(_context: Context, _request: web.Request) -> web.Response:
    """Answer /health and /ping: the proxy itself is alive."""
    return reply({"status": "ok"})


async def version(_context: Context, _request: web.Request) -> web.Response:
    """Answer /version."""
    return reply({"version": __version__})


async def ready(context: Context, _request: web.Request) -> web.Response:
    """Answer /ready: 200 if a request can be expected to be served now."""
    counts = {role: context.tools.fleet.ready_count(role) for role in Role}
    can_prefill = counts[Role.PREFILL] > 0 or context.tools.rules.decode_alone
    is_ready = counts[Role.DECODE] > 0 and can_prefill and not context.is_stopping()
    body = {
        "status": "ready" if is_ready else "not ready",
        "stopping": context.is_stopping(),
        "available_prefill_instances": counts[Role.PREFILL],
        "available_decode_instances": counts[Role.DECODE],
    }
    return reply(body, OK if is_ready else UNAVAILABLE)


async def healthcheck(context: Context, _request: web.Request) -> web.Response:
    """Answer /healthcheck in the form of the vllm-ascend example; liveness, so always 200."""
    body = {
        "status": "ok",
        "prefill_instances": len(listed(context, Role.PREFILL)),
        "decode_instances": len(listed(context, Role.DECODE)),
        "request_num": context.observer.in_flight,
    }
    return reply(body)


async def metrics(context: Context, request: web.Request) -> web.Response:
    """Answer /metrics."""
    body, content_type = await context.page(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type, "Server": SERVER})


def listed(context: Context, role: Role) -> list[Instance]:
    """Return the instances that callers are told of: all but those that have yet to join."""
    fleet = context.tools.fleet
    return [i for i in fleet.instances(role) if not fleet.is_pending(i)]


class Models:
    """GET /v1/models: one engine's list, kept briefly per Authorization."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[float, EngineAnswered]] = {}

    async def answer(self, context: Context, request: web.Request) -> web.StreamResponse:
        """Answer with the first engine that has a list, prefillers first."""

        async def work(account: Account, downstream: ClientDownstream) -> None:
            found = await self._find(context, request, account)
            await downstream.respond(found.engine_status, to_client(found.headers), found.body)

        return await counted(context, request, "/v1/models", work)

    async def _find(
        self, context: Context, request: web.Request, account: Account
    ) -> EngineAnswered:
        key = request.headers.get("Authorization", "")
        now = context.clock()
        cached = self._cached.get(key)
        if cached is not None and now < cached[0]:
            return cached[1]
        headers = engine_headers(context, request, None)
        found = await _first_list(context, headers, account)
        if found.engine_status == OK:
            if len(self._cached) >= MAX_CACHED_LISTS:
                self._cached.clear()
            self._cached[key] = (now + context.rules.models_cache_s, found)
        return found


async def _first_list(
    context: Context, headers: list[tuple[str, str]], account: Account
) -> EngineAnswered:
    candidates = _candidates(context)
    if not candidates:
        raise NoInstance("no instance is known")
    failure: PDProxyError = NoInstance("no instance answered /v1/models")
    for instance in candidates:
        if instance.role is Role.PREFILL:
            account.prefiller = instance.label
        else:
            account.decoder = instance.label
        try:
            found = await _ask(context, instance, headers)
        except UpstreamError:
            continue
        if found.engine_status == OK or found.engine_status in _CLIENTS_FAULT:
            return found
        failure = found
    raise failure


def _candidates(context: Context) -> list[Instance]:
    """Return those in service first, then the others: a list can come from any that answers."""
    fleet = context.tools.fleet
    available = [i for role in Role for i in fleet.available(role)]
    known = [i for role in Role for i in fleet.instances(role)]
    return available + [i for i in known if i not in available]


async def _ask(
    context: Context, instance: Instance, headers: list[tuple[str, str]]
) -> EngineAnswered:
    limit_s = context.rules.models_s
    response = await context.tools.client.send(
        instance.endpoint,
        "GET",
        "/v1/models",
        headers,
        None,
        timeouts=Timeouts(connect_s=limit_s, head_s=limit_s, idle_s=limit_s),
    )
    with response:
        body = await response.read(MAX_MODELS_BYTES)
        return EngineAnswered(response.status, response.headers, body)
