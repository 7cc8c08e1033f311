"""Administration in the form of the vllm-ascend example: add, remove, reset the prefix caches.

Rule: a call is done whole or not at all; one bad entry and nothing changes.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from pdproxy.core.api import parse_object
from pdproxy.core.instance import Endpoint, Instance, Role
from pdproxy.core.jsonfields import Raw, decode
from pdproxy.core.record import Change
from pdproxy.errors import Forbidden, InvalidRequest, PDProxyError, Unauthorized
from pdproxy.server.context import Context
from pdproxy.server.failures import to_failure
from pdproxy.server.intake import engine_headers, has_key, read_body
from pdproxy.server.local_calls import check_local
from pdproxy.server.operations import listed, reply
from pdproxy.upstream.allowed import is_admissible
from pdproxy.upstream.limits import Timeouts

RESET_TIMEOUTS = Timeouts(connect_s=5, head_s=30, idle_s=30)
OK = 200
INTERNAL_ERROR = 500


async def add(context: Context, request: web.Request) -> web.Response:
    """Answer POST /instances/add: each new engine joins once it answers a probe."""
    try:
        role, endpoints, _ = await targets(context, request)
        await _check_allowed(context, endpoints)
        changes = {str(e): await context.roster.add(role, e) for e in endpoints}
    except PDProxyError as error:
        return refusal(error)
    queued = [name for name, change in changes.items() if change is Change.WAITING]
    if queued:
        return reply(state_of(context, f"Instances {queued} are waiting to be added."))
    return reply(state_of(context, f"add {role} instances: {[str(e) for e in endpoints]}."))


async def remove(context: Context, request: web.Request) -> web.Response:
    """Answer POST /instances/remove: no new request goes there, running ones end as usual."""
    try:
        role, endpoints, _ = await targets(context, request)
        changes = {str(e): await context.roster.remove(role, e) for e in endpoints}
    except PDProxyError as error:
        return refusal(error)
    return reply(state_of(context, _removed(role, changes)))


def _removed(role: Role, changes: dict[str, Change]) -> str:
    """Say what became of each, in the example's words where it has any."""
    texts = {
        Change.DRAINING: "Instances {} are isolated and waiting to be removed.",
        Change.GONE: f"remove {role} instances: {{}}.",
        Change.UNKNOWN: f"There are no {role} instances {{}}.",
    }
    names = {change: [n for n, c in changes.items() if c is change] for change in texts}
    return " ".join(text.format(names[change]) for change, text in texts.items() if names[change])


async def reset_prefix_cache(context: Context, request: web.Request) -> web.Response:
    """Answer POST /reset_prefix_cache: tell every instance, with the query as it came."""
    try:
        check_admin(context, request)
    except PDProxyError as error:
        return refusal(error)
    headers = [p for p in engine_headers(context, request, None) if _is_for_engines(context, p)]
    instances = [i for role in Role for i in context.tools.fleet.instances(role)]
    target = request.rel_url.raw_path_qs
    results = await asyncio.gather(*(_reset(context, i, target, headers) for i in instances))
    failed = [i.endpoint.url for i, is_done in zip(instances, results, strict=True) if not is_done]
    return reply({"failed": failed}, INTERNAL_ERROR) if failed else web.Response()


def _is_for_engines(context: Context, header: tuple[str, str]) -> bool:
    """Tell whether a header may leave: the admin token, which came as Authorization, may not."""
    rules = context.rules
    return header[0] != "authorization" or not rules.admin_token or bool(rules.engine_key)


def check_admin(context: Context, request: web.Request) -> None:
    """Let pass who may administer: the token's holder, or without a token this machine.

    Raises:
        Unauthorized: a token is set and not given.
        Forbidden: none is set and `check_local` refuses.
    """
    token = context.rules.admin_token
    if token:
        if not has_key(request, (token,)):
            raise Unauthorized("the admin token is missing or wrong")
        return
    check_local(request, context.rules.own_name)


async def _check_allowed(context: Context, endpoints: list[Endpoint]) -> None:
    """Raise Forbidden, before anything is connected, if one may not be an instance."""
    verdicts = await asyncio.gather(*(is_admissible(context.allow, e) for e in endpoints))
    refused = [str(e) for e, verdict in zip(endpoints, verdicts, strict=True) if not verdict]
    if refused:
        raise Forbidden(f"instances: not in --instance-allow: {', '.join(refused)}")


async def targets(
    context: Context, request: web.Request
) -> tuple[Role, list[Endpoint], dict[str, Raw]]:
    """Return which instances a call is about, and all fields of its body.

    Raises:
        PDProxyError: the caller may not, or the body is wrong.
    """
    check_admin(context, request)
    fields = parse_object(await read_body(context, request))
    return _role(fields.get("type")), _endpoints(fields.get("instances")), fields


def _role(value: Raw | None) -> Role:
    name = _plain(value)
    for role in Role:
        if name == role.value:
            return role
    allowed = "Only 'prefill' and 'decode' are allowed."
    raise InvalidRequest(f"Instance type {name!r} is not supported. {allowed}", param="type")


def _endpoints(value: Raw | None) -> list[Endpoint]:
    """Read one address or a list of them; the same one twice counts once.

    Raises:
        InvalidRequest: it names every bad entry.
    """
    if value is None:
        text = "instances: the key is missing; it holds 'host:8100', or a list of such addresses"
        raise InvalidRequest(text, param="instances")
    plain = _plain(value)
    entries = plain if isinstance(plain, list) else [plain]
    endpoints: dict[tuple[str, int], Endpoint] = {}
    faults: list[str] = []
    for entry in entries:
        try:
            endpoint = _endpoint(entry)
        except ValueError as error:
            faults.append(str(error))
        else:
            endpoints.setdefault(endpoint.key, endpoint)
    if faults or not entries:
        text = "; ".join(faults) or "no instance is given"
        raise InvalidRequest(f"instances: {text}", param="instances")
    return list(endpoints.values())


def _plain(value: Raw | None) -> object:
    try:
        return None if value is None else decode(value)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _endpoint(entry: object) -> Endpoint:
    if not isinstance(entry, str):
        raise ValueError(f"{entry!r} is not an address such as 'host:8100'")
    return Endpoint.parse(entry)


def state_of(context: Context, message: str) -> dict[str, object]:
    """Return the answer of a change in the example's form."""
    return {
        "message": message,
        "current_prefill_instances": _labels(listed(context, Role.PREFILL)),
        "current_decode_instances": _labels(listed(context, Role.DECODE)),
    }


def _labels(instances: list[Instance]) -> list[str]:
    return [instance.label for instance in instances]


def refusal(error: PDProxyError) -> web.Response:
    """Return the answer to an administrative call that is refused."""
    failure = to_failure(error)
    return web.Response(status=failure.status, headers=failure.headers, body=failure.body)


async def _reset(
    context: Context, instance: Instance, target: str, headers: list[tuple[str, str]]
) -> bool:
    try:
        response = await context.tools.client.send(
            instance.endpoint, "POST", target, headers, b"", timeouts=RESET_TIMEOUTS
        )
        with response:
            await response.read()
            return response.status == OK
    except PDProxyError:  # unreachable, or headers that no engine can be sent
        return False
