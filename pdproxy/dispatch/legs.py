"""One attempt of one leg: body out, answer in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pdproxy.connectors.base import Connector
from pdproxy.core.api import GenerateRequest
from pdproxy.core.chunks import read_body
from pdproxy.core.error_events import refuse_error
from pdproxy.core.fleet import Fleet, Lease
from pdproxy.core.headers import DATA_PARALLEL_RANK, HeaderList, engine_request_id
from pdproxy.core.jsonfields import Raw, split_object
from pdproxy.core.load import Cost, OutputEstimator, TokenEstimator
from pdproxy.core.pauses import Pauses
from pdproxy.dispatch.abilities import AbilityBook
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.admission import Admission, Visit
from pdproxy.dispatch.attempt import attempt
from pdproxy.dispatch.orphans import Orphan, Orphans
from pdproxy.dispatch.ports import Observer
from pdproxy.dispatch.rules import DispatchRules
from pdproxy.dispatch.tracing import NO_SPAN, Span
from pdproxy.dispatch.turns import Turns
from pdproxy.errors import EngineAnswered, UpstreamProtocol
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.response import Response

OK = 200
MULTIPLE_CHOICES = 300


@dataclass(frozen=True, slots=True)
class Tools:
    """What every request shares; made once by the worker."""

    client: EngineClient
    fleet: Fleet
    connector: Connector
    tokens: TokenEstimator
    outputs: OutputEstimator
    rules: DispatchRules
    observer: Observer
    clock: Callable[[], float]
    rng: random.Random
    orphans: Orphans
    admission: Admission
    pauses: Pauses = field(default_factory=Pauses)
    abilities: AbilityBook = field(default_factory=AbilityBook)
    turns: Turns = field(default_factory=Turns)


@dataclass(slots=True)
class Call:
    """One client request on its way.

    Attributes:
        headers: for engines, without those that a leg adds.
        client_id: the client's own X-Request-Id, None if it sent none.
        span: what the legs belong into: the request's, or that of one of its rounds.
        visit: the request's admission; None outside of `batch.answer`.
    """

    account: Account
    headers: HeaderList
    client_id: str | None
    span: Span = NO_SPAN
    visit: Visit | None = None


@dataclass(slots=True)
class Handoff:
    """What a prefill leaves for the decode: the KV handle and its owner's account.

    The prefiller's lease stays charged with the pinned KV tokens until `release`.

    Attributes:
        is_spent: a decoder has answered to the handle, so no other one may get it.
        is_pulled: a decoder has begun to generate, so the prefiller holds nothing any more; or it
            has been asked to let go.
    """

    engine_id: str
    handle: Raw | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    made_at: float = 0.0
    lease: Lease | None = None
    is_spent: bool = False
    is_pulled: bool = False

    def release(self) -> None:
        """Take the charge off the prefiller; nothing happens the second time."""
        if self.lease is not None:
            self.lease.close()


async def prefill(tools: Tools, request: GenerateRequest, call: Call, lease: Lease) -> Handoff:
    """Make one prefill attempt on the leased instance; the hand-off takes the lease over.

    Raises:
        EngineAnswered: not a 2xx.
        UpstreamError: no answer.
    """
    account, clock = call.account, tools.clock
    engine_id = _engine_id(tools, call)
    account.prefiller, account.prefiller_reason = lease.instance.label, lease.reason
    account.timeline.mark_prefill_started(clock())
    headers = [p for p in call.headers if p[0] != DATA_PARALLEL_RANK]
    headers.append(("x-request-id", engine_id))
    body = tools.connector.prefill_body(request)
    rescue = _rescue(tools, request, call, Handoff(engine_id, lease=lease))
    with attempt(tools, lease, call.span) as span:
        headers = span.carry(headers)
        response = await tools.client.send(
            lease.instance.endpoint,
            "POST",
            request.api.value,
            headers,
            body,
            timeouts=tools.rules.prefill,
            rescue=rescue,
            on_start=lease.hold,
        )
        with response:
            try:
                answer = await response.read(tools.rules.max_answer_bytes)
            except asyncio.CancelledError:
                rescue(response)
                raise
            check_status(response, answer)
            fields = _split_reply(answer)
            refuse_error(fields)
    account.timeline.mark_prefill_done(clock())
    return _hand_off(tools, request, call, lease, engine_id, fields)


async def decode(
    tools: Tools, request: GenerateRequest, call: Call, lease: Lease, handoff: Handoff, span: Span
) -> Response:
    """Ask the leased decoder within an `attempt`; return its 2xx, whose body is still to come.

    Raises:
        EngineAnswered: not a 2xx.
        UpstreamError: no answer.
    """
    account, rules = call.account, tools.rules
    account.decoder, account.decoder_reason = lease.instance.label, lease.reason
    account.timeline.mark_decode_started(tools.clock(), is_stream=request.wants_stream)
    headers = [*call.headers, ("x-request-id", handoff.engine_id)]
    response = await tools.client.send(
        lease.instance.endpoint,
        "POST",
        request.api.value,
        span.carry(headers),
        tools.connector.decode_body(request, handoff.handle),
        timeouts=rules.decode_stream if request.wants_stream else rules.decode_whole,
        on_start=lease.hold,
    )
    handoff.is_spent = True
    if not OK <= response.status < MULTIPLE_CHOICES:
        with response:
            check_status(response, await response.read(rules.max_answer_bytes))
    account.is_model_known = True
    return response


def abandon(tools: Tools, request: GenerateRequest, call: Call, handoff: Handoff) -> None:
    """Have the prefiller free a handle that no decoder has pulled; nothing happens for others."""
    if handoff.handle is None or handoff.lease is None or handoff.is_pulled:
        return
    handoff.is_spent = handoff.is_pulled = True
    tools.orphans.adopt(
        Orphan(
            handle=handoff.handle,
            owner=handoff.lease.instance,
            headers=[p for p in call.headers if p[0] != DATA_PARALLEL_RANK],
            request_id=f"{handoff.engine_id}-release",
            model=request.fields.get("model"),
        )
    )


def _rescue(
    tools: Tools, request: GenerateRequest, call: Call, late: Handoff
) -> Callable[[Response], None]:
    """Return what lets go of a handle that arrived in the moment in which the client left."""

    def rescue(response: Response) -> None:
        answer = response.arrived() if response.status == OK else None
        if answer is None:
            return
        try:
            late.handle = tools.connector.handle_of(split_object(answer))
        except ValueError:
            return
        abandon(tools, request, call, late)

    return rescue


def prefill_cost(tools: Tools, request: GenerateRequest) -> Cost:
    """Return what a prefill of the request is estimated to take."""
    tokens = request.prompt_tokens
    if tokens is None:
        tokens = tools.tokens.estimate(request.model, request.text_bytes)
    return Cost(compute_tokens=tokens + request.media_tokens, body_bytes=request.body_bytes)


def decode_cost(tools: Tools, request: GenerateRequest, prompt_tokens: int) -> Cost:
    """Return what a decode is expected to hold: the prompt once, each choice's output."""
    output = tools.outputs.expect(request.model, request.max_output_tokens)
    kv_tokens = prompt_tokens + output * request.choices
    return Cost(kv_tokens=kv_tokens, body_bytes=request.body_bytes)


def check_status(response: Response, body: bytes) -> None:
    """Raise EngineAnswered unless the status is a 2xx."""
    if not OK <= response.status < MULTIPLE_CHOICES:
        raise EngineAnswered(response.status, response.headers, body)


def without_prefill(tools: Tools, request: GenerateRequest, call: Call, reason: str) -> Handoff:
    """Return the hand-off of a request that a decoder computes alone."""
    cost = prefill_cost(tools, request)
    tools.observer.prefill_skipped(reason)
    call.account.prefill_skipped = reason
    return Handoff(_engine_id(tools, call), prompt_tokens=cost.compute_tokens)


def _engine_id(tools: Tools, call: Call) -> str:
    return engine_request_id(call.client_id, f"{tools.rng.getrandbits(128):032x}")


def _split_reply(answer: bytes) -> dict[str, Raw]:
    try:
        return split_object(answer)
    except ValueError as error:
        raise UpstreamProtocol("the prefiller's answer is not JSON", detail=str(error)) from None


def _hand_off(
    tools: Tools,
    request: GenerateRequest,
    call: Call,
    lease: Lease,
    engine_id: str,
    fields: dict[str, Raw],
) -> Handoff:
    usage = read_body(fields).usage
    handle = tools.connector.handle_of(fields)
    call.account.is_model_known = True
    if usage is None:
        prompt_tokens = prefill_cost(tools, request).compute_tokens
    else:
        prompt_tokens = usage.prompt_tokens
        learn_from(tools, request, prompt_tokens)
    if handle is None:
        lease.close()
        tools.observer.handle_missing(lease.instance)
    else:
        # The leg is over; what is left of it is the KV cache that is held for the decoder.
        lease.recharge(Cost(requests=0, kv_tokens=prompt_tokens, body_bytes=request.body_bytes))
    return Handoff(
        engine_id,
        handle=handle,
        prompt_tokens=prompt_tokens,
        cached_tokens=(usage.cached_tokens if usage else None) or 0,
        made_at=tools.clock(),
        lease=lease,
    )


def learn_from(tools: Tools, request: GenerateRequest, prompt_tokens: int) -> None:
    """Let the token estimate of the model learn from an exact count."""
    if request.prompt_tokens is None:
        text_tokens = max(0, prompt_tokens - request.media_tokens)
        tools.tokens.observe(request.model, request.text_bytes, text_tokens)
