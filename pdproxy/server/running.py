"""The requests in flight, for administrators: who is where, and for how long."""

from __future__ import annotations

from aiohttp import web

from pdproxy.dispatch.account import Account
from pdproxy.errors import PDProxyError
from pdproxy.server.admin import check_admin, refusal
from pdproxy.server.context import Context
from pdproxy.server.operations import reply


async def running(context: Context, request: web.Request) -> web.Response:
    """Answer GET /debug/requests, the oldest first; prompts are no part of it."""
    try:
        check_admin(context, request)
    except PDProxyError as error:
        return refusal(error)
    now = context.clock()
    accounts = sorted(context.running.values(), key=lambda account: account.timeline.received)
    return reply({"requests": [_shown(account, now) for account in accounts]})


def _shown(account: Account, now: float) -> dict[str, object]:
    return {
        "request_id": account.request_id,
        "client": account.client,
        "endpoint": account.endpoint,
        "model": account.model,
        "stream": account.is_stream,
        "stage": account.timeline.stage,
        "age_s": round(account.timeline.age_s(now), 3),
        "prefiller": account.prefiller or None,
        "decoder": account.decoder or None,
        "prefill_attempts": account.prefill_attempts,
        "decode_attempts": account.decode_attempts,
        "rounds": account.rounds,
    }
