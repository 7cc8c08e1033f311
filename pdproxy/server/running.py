"""The requests in flight, for administrators: who is where, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from aiohttp import web

from pdproxy.dispatch.account import Account
from pdproxy.errors import PDProxyError
from pdproxy.server.admin import check_admin, refusal
from pdproxy.server.context import Context, RunningRequest
from pdproxy.server.operations import reply


async def running(context: Context, request: web.Request) -> web.Response:
    """Answer GET /debug/requests, the oldest first; prompts are no part of it."""
    try:
        check_admin(context, request)
        found = await context.requests()
    except PDProxyError as error:
        return refusal(error)
    found.sort(key=lambda each: each.age_s, reverse=True)
    return reply({"requests": [msgspec.to_builtins(each) for each in found]})


def shown(accounts: Iterable[Account], now: float) -> list[RunningRequest]:
    """Return what is told of these requests at that moment of their clock."""
    return [
        RunningRequest(
            request_id=account.request_id,
            client=account.client,
            endpoint=account.endpoint,
            model=account.model,
            stream=account.is_stream,
            stage=account.timeline.stage,
            age_s=round(account.timeline.age_s(now), 3),
            prefiller=account.prefiller or None,
            decoder=account.decoder or None,
            prefill_attempts=account.prefill_attempts,
            decode_attempts=account.decode_attempts,
            rounds=account.rounds,
        )
        for account in accounts
    ]
