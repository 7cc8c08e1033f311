"""The life cycle of instances for operators: what each is doing, drain and undrain.

Rule: a call is done whole or not at all, can be repeated, and says for each instance what it did.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
from aiohttp import web

from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import Raw, decode
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.errors import InvalidRequest, PDProxyError
from pdproxy.server.admin import check_admin, refusal, state_of, targets
from pdproxy.server.context import Context
from pdproxy.server.operations import reply

_TOLD = {
    Change.WAITING: "joins once it answers a probe",
    Change.RESTORED: "takes requests again",
    Change.UNCHANGED: "was not draining",
    Change.DRAINING: "gets no new request and finishes its own",
    Change.GONE: "held no request and is gone",
    Change.UNKNOWN: "is not known",
}
_KEYS = frozenset({"type", "instances", "deadline_s"})  # of a drain, and what takes it back
MAX_DEADLINE_S = 7 * 24 * 3600.0


async def list_instances(context: Context, request: web.Request) -> web.Response:
    """Answer GET /instances: every instance of each role, and those that have gone of late."""
    try:
        check_admin(context, request)
    except PDProxyError as error:
        return refusal(error)
    records = await context.roster.describe()
    now = datetime.now(UTC)
    return reply({role.value: _role(context, role, records, now) for role in Role})


async def drain(context: Context, request: web.Request) -> web.Response:
    """Answer POST /instances/drain: no new request goes there; after `deadline_s`, none stays."""
    try:
        role, endpoints, fields = await targets(context, request)
        _refuse_others(fields)
        deadline_s = _deadline_s(fields.get("deadline_s"))
    except PDProxyError as error:
        return refusal(error)
    changes = {str(e): await context.roster.drain(role, e, deadline_s) for e in endpoints}
    return _answer(context, changes)


async def undrain(context: Context, request: web.Request) -> web.Response:
    """Answer POST /instances/undrain: a drain is taken back, whether it has ended or not."""
    try:
        role, endpoints, fields = await targets(context, request)
        _refuse_others(fields)
    except PDProxyError as error:
        return refusal(error)
    changes = {str(e): await context.roster.undrain(role, e) for e in endpoints}
    return _answer(context, changes)


def _answer(context: Context, changes: dict[str, Change]) -> web.Response:
    message = "; ".join(f"{name} {_TOLD[change]}" for name, change in changes.items())
    results = {name: change.value for name, change in changes.items()}
    return reply({**state_of(context, f"{message}."), "results": results})


def _refuse_others(fields: dict[str, Raw]) -> None:
    """Refuse a key that is not known: a drain without the deadline that was meant is none."""
    others = sorted(fields.keys() - _KEYS)
    if others:
        text = f"{', '.join(others)}: not known; keys are {', '.join(sorted(_KEYS))}"
        raise InvalidRequest(text, param=others[0])


def _deadline_s(value: Raw | None) -> float | None:
    try:
        plain = None if value is None else decode(value)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if plain is None:
        return None
    is_switch = isinstance(plain, bool)  # a number to Python
    if isinstance(plain, int | float) and not is_switch and 0 <= plain <= MAX_DEADLINE_S:
        return float(plain)
    text = f"deadline_s: must be seconds from 0 to {MAX_DEADLINE_S:g}"
    raise InvalidRequest(text, param="deadline_s")


def _role(
    context: Context, role: Role, records: list[InstanceRecord], now: datetime
) -> dict[str, object]:
    fleet = context.tools.fleet
    return {
        "available": fleet.ready_count(role),
        "panic": fleet.members.is_panicking(role),
        "instances": [_told(record, now) for record in records if record.role is role],
    }


def _told(record: InstanceRecord, now: datetime) -> dict[str, object]:
    """Return a record with its moments in words: a clock's time is what one compares with a log."""
    plain: dict[str, object] = msgspec.to_builtins(record)
    plain["since"] = _moment(now, record.state_age_s)
    if record.last_error_age_s is not None:
        plain["last_error_at"] = _moment(now, record.last_error_age_s)
    return plain


def _moment(now: datetime, age_s: float) -> str:
    return (now - timedelta(seconds=age_s)).isoformat(timespec="milliseconds")
