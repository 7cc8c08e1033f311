"""The two generate routes and the frame that every counted request runs in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from pdproxy.core.api import Api, parse_generate
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.dispatch.batch import answer
from pdproxy.dispatch.generate import describe
from pdproxy.dispatch.legs import Call
from pdproxy.dispatch.ports import Headers
from pdproxy.dispatch.tracing import NO_SPAN
from pdproxy.errors import PDProxyError, untraced
from pdproxy.server.context import Context
from pdproxy.server.downstream import ClientDownstream
from pdproxy.server.failures import error_body, outcome_of, to_failure
from pdproxy.server.intake import (
    check_admission,
    engine_headers,
    open_account,
    read_aside,
    read_body,
)
from pdproxy.server.told import ASKING_HEADER, told_headers, traced

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json"
CLIENT_CLOSED = 499  # the status nginx logs for a client that left
Work = Callable[[Account, ClientDownstream], Awaitable[None]]


async def generate(context: Context, request: web.Request, api: Api) -> web.StreamResponse:
    """Answer POST /v1/chat/completions and /v1/completions."""

    async def work(account: Account, downstream: ClientDownstream) -> None:
        body = await read_body(context, request)
        account.timeline.mark_received(context.clock())
        generate_request = await read_aside(partial(parse_generate, api), body)
        account.model = generate_request.model
        account.is_stream = generate_request.wants_stream
        call = Call(
            account,
            engine_headers(context, request, JSON_TYPE),
            request.headers.get("X-Request-Id"),
            account.span,
        )
        await answer(context.tools, generate_request, call, downstream)

    return await counted(context, request, api.value, work)


async def counted(
    context: Context, request: web.Request, endpoint: str, work: Work
) -> web.StreamResponse:
    """Run `work` as one counted and logged request; turn its failure into a truthful answer."""
    account = open_account(context, request, endpoint)
    about = {"http.request.method": request.method, "http.route": endpoint}
    with context.tracer.request(f"{request.method} {endpoint}", request.headers, about) as span:
        account.span = span
        try:
            return await _answered(context, request, account, work)
        finally:
            if span is not NO_SPAN:
                span.note(traced(account))


async def _answered(
    context: Context, request: web.Request, account: Account, work: Work
) -> web.StreamResponse:
    endpoint, downstream = account.endpoint, _downstream(context, request, account)
    context.observer.request_started(endpoint)
    context.running[id(account)] = account
    try:
        with context.shutdown.running():
            check_admission(context.rules, request)
            await work(account, downstream)
            await downstream.finish()
        account.status = downstream.status
    except PDProxyError as error:
        await _answer_failure(account, downstream, untraced(error))
    except asyncio.CancelledError:
        _note_departure(account, downstream)
        raise
    except ConnectionError:
        # Not raised again: the library would log it as a fault.
        _note_departure(account, downstream)
    except Exception as error:
        logger.exception("request %s failed by a bug", account.request_id)
        await _answer_failure(
            account, downstream, PDProxyError("internal error", detail=str(error))
        )
    finally:
        account.timeline.mark_finished(context.clock())
        del context.running[id(account)]
        context.observer.request_finished(account)
    return downstream.response or web.Response(status=CLIENT_CLOSED)


def _downstream(context: Context, request: web.Request, account: Account) -> ClientDownstream:
    rules = context.rules
    is_asked = rules.debug_headers and request.headers.get(ASKING_HEADER) == "1"

    def told(is_stream: bool) -> Headers:
        now = context.clock()
        return told_headers(account, now, is_stream=is_stream, is_asked=is_asked)

    return ClientDownstream(
        request,
        account.request_id,
        buffer_bytes=rules.buffer_bytes,
        write_stall_s=rules.write_stall_s,
        told=told,
        is_ending=lambda: context.shutdown.has_begun,
    )


def _note_departure(account: Account, downstream: ClientDownstream) -> None:
    account.fail(Outcome.CLIENT_DISCONNECTED, "the client closed its connection")
    account.status = downstream.status or CLIENT_CLOSED


async def _answer_failure(
    account: Account, downstream: ClientDownstream, error: PDProxyError
) -> None:
    account.fail(outcome_of(error), describe(error), error.code)
    try:
        await _tell(account, downstream, error)
    except ConnectionError:
        logger.debug("request %s: the client left before it was told", account.request_id)


async def _tell(account: Account, downstream: ClientDownstream, error: PDProxyError) -> None:
    """Tell the client: by a status if nothing was sent yet, else by an error event."""
    if not downstream.is_committed:
        failure = to_failure(error)
        account.status = failure.status
        await downstream.respond(failure.status, failure.headers, failure.body)
        return
    account.status = downstream.status
    if not error.is_told:
        downstream.fail(error_body(error))
    await downstream.finish()
