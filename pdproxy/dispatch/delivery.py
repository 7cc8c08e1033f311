"""The answer of one decode attempt: from the decoder's head to the client's last byte."""

from __future__ import annotations

import asyncio

from pdproxy.core.api import GenerateRequest
from pdproxy.core.chunks import ChunkFacts, read_body, strip_internal, with_cached_tokens
from pdproxy.core.error_events import engine_error, refuse_error
from pdproxy.core.fleet import Lease
from pdproxy.core.jsonfields import join_object, split_object
from pdproxy.core.keeper import Keeper
from pdproxy.dispatch.account import Counts, Outcome
from pdproxy.dispatch.attempt import attempt
from pdproxy.dispatch.legs import Call, Handoff, Tools, decode
from pdproxy.dispatch.ports import Downstream
from pdproxy.dispatch.relay import StreamFacts, StreamRelay
from pdproxy.dispatch.round import CutReply, Round
from pdproxy.errors import Recomputed, UpstreamProtocol, UpstreamTimeout
from pdproxy.upstream.response import Response

EVENT_STREAM = "text/event-stream"
# Finish reasons by which an engine says that the answer failed.
FAILED_FINISHES = frozenset({"error", "abort"})


class Delivery:
    """Brings the answers of one exchange's decode attempts to its client."""

    def __init__(
        self,
        tools: Tools,
        request: GenerateRequest,
        call: Call,
        downstream: Downstream,
        round_: Round,
    ) -> None:
        self._tools = tools
        self._request = request
        self._call = call
        self._downstream = downstream
        self._round = round_

    async def answer(self, lease: Lease, handoff: Handoff) -> None:
        """Ask the leased decoder and pass on what it says.

        Raises:
            PDProxyError: it did not answer whole.
        """
        tools, request, call = self._tools, self._request, self._call
        started = tools.clock()
        with (
            attempt(tools, lease, call.span) as span,
            await decode(tools, request, call, lease, handoff, span) as response,
        ):
            if (response.header("content-type") or "").lower().startswith(EVENT_STREAM):
                await self._stream(response, handoff, started)
            else:
                handoff.release()
                await self._respond(response, handoff)

    async def _stream(self, response: Response, handoff: Handoff, started: float) -> None:
        """Pass an event stream on."""
        self._round.note(handoff)
        new_keeper = self._round.new_keeper
        keeper = None if new_keeper is None else new_keeper()
        relay = self._relay_for(response, handoff, keeper)
        await self._open(relay, started)
        handoff.is_pulled = True
        handoff.release()
        await self._downstream.start(response.headers)
        relay.attach(self._downstream)
        try:
            await relay.finished()
        finally:
            self._settle(relay.facts, handoff, keeper)
        if relay.facts.error is not None:
            error = engine_error(relay.facts.error)
            error.is_told = True
            raise error

    def _relay_for(
        self, response: Response, handoff: Handoff, keeper: Keeper | None
    ) -> StreamRelay:
        request, tools = self._request, self._tools
        account, observer = self._call.account, tools.observer
        relay = StreamRelay(
            response,
            choices=request.choices,
            cached_tokens=handoff.cached_tokens,
            stops=request.stops,
            max_event_bytes=tools.rules.max_event_bytes,
            pulse=account.pulse,
            clock=tools.clock,
            on_full=lambda: observer.pulse_full(account),
            keeper=keeper,
            is_enough=self._round.is_enough,
        )
        self._round.facts = relay.facts
        response.pipe(relay)
        return relay

    async def _open(self, relay: StreamRelay, started: float) -> None:
        """Wait for the first sign of generation, within what is left of the first-token timeout."""
        limit_s = self._tools.rules.first_token_s
        if limit_s is not None:
            limit_s = max(0.0, limit_s - (self._tools.clock() - started))
        try:
            async with asyncio.timeout(limit_s):
                await relay.opening()
        except TimeoutError:
            text = "the decoder sent no event within the first-token timeout"
            raise UpstreamTimeout(text, phase="first_token") from None

    def _settle(
        self, facts: StreamFacts | ChunkFacts, handoff: Handoff, keeper: Keeper | None = None
    ) -> None:
        """Write what the answer said into the account.

        Where it told no usage, since the client did not ask or it was cut, its ids may tell.
        """
        account, tools, request = self._call.account, self._tools, self._request
        usage = facts.usage
        prompt_tokens = handoff.prompt_tokens if usage is None else usage.prompt_tokens
        if usage is not None:
            output_tokens: int | None = usage.completion_tokens
            tools.outputs.observe(request.model, usage.completion_tokens // request.choices)
        else:
            output_tokens = None if keeper is None else keeper.answer.tokens_by_ids
        finished = tuple(facts.finished.values())
        counts = Counts(prompt_tokens, handoff.cached_tokens, output_tokens, finished)
        account.count(counts)
        self._round.counts = counts
        if FAILED_FINISHES.intersection(finished):
            account.fail(Outcome.ENGINE_ERROR, "an answer ended with finish_reason error or abort")

    async def _respond(self, response: Response, handoff: Handoff) -> None:
        """Pass a whole JSON answer on; only the prefiller's figure for cached tokens goes in."""
        clock, pulse = self._tools.clock, self._call.account.pulse
        body = await response.read(self._tools.rules.max_answer_bytes)
        began = clock()
        try:
            fields = split_object(body)
        except ValueError as error:
            text = "the decoder's answer is not JSON"
            raise UpstreamProtocol(text, detail=str(error)) from None
        refuse_error(fields)
        handoff.is_pulled = True
        facts = self._round.facts = read_body(fields, user_stops=self._request.stops)
        self._round.note(handoff)
        if facts.recomputed:
            self._round.cut = CutReply(response.headers, fields, facts.recomputed)
            raise Recomputed("the decoder ran out of KV cache before the answer ended")
        self._settle(facts, handoff)
        kept = strip_internal(fields)
        body = body if kept is fields else join_object(kept)
        if handoff.cached_tokens is not None:
            body = with_cached_tokens(body, handoff.cached_tokens)
        if self._round.new_keeper is not None:
            body = self._round.new_keeper().hide(body)
        pulse.work_s += clock() - began
        await self._downstream.respond(response.status, response.headers, body)
