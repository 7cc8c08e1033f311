"""One generate request from start to end: prefill, hand-off, decode, relay, what may be retried.

Rule: an attempt is repeated only while the client was sent nothing, at most `max_attempts` times
per leg, and on an instance that has not failed this request while there is one.
"""

from __future__ import annotations

import asyncio
import logging

from pdproxy.core.api import GenerateRequest
from pdproxy.core.chunks import ChunkFacts, read_body, strip_internal, with_cached_tokens
from pdproxy.core.error_events import engine_error
from pdproxy.core.fleet import Lease
from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import join_object, split_object
from pdproxy.core.retry import Verdict, delay_s, judge
from pdproxy.dispatch.account import Outcome
from pdproxy.dispatch.attempts import Attempts
from pdproxy.dispatch.legs import (
    Call,
    Handoff,
    Tools,
    decode,
    decode_cost,
    failure_reason,
    prefill,
    prefill_cost,
    without_prefill,
)
from pdproxy.dispatch.ports import Downstream
from pdproxy.dispatch.relay import StreamFacts, StreamRelay
from pdproxy.dispatch.round import CutReply, Round
from pdproxy.errors import (
    EngineAnswered,
    NoInstance,
    PDProxyError,
    Recomputed,
    UpstreamProtocol,
    UpstreamTimeout,
)
from pdproxy.upstream.response import Response

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
# Finish reasons by which an engine says that the answer failed.
FAILED_FINISHES = frozenset({"error", "abort"})
_ELSEWHERE_ONLY = frozenset({Verdict.ONLY_ELSEWHERE, Verdict.FRESH_PREFILL_ONLY_ELSEWHERE})
_FRESH = frozenset({Verdict.FRESH_PREFILL, Verdict.FRESH_PREFILL_ONLY_ELSEWHERE})


class Exchange:
    """One request for one prompt: its attempts, its hand-off, its answer."""

    def __init__(
        self,
        tools: Tools,
        request: GenerateRequest,
        call: Call,
        downstream: Downstream,
        round_: Round | None = None,
    ) -> None:
        self._tools = tools
        self._request = request
        self._call = call
        self._downstream = downstream
        self._round = round_ or Round()
        self._attempts = Attempts()
        self._attempts.failed[Role.DECODE].extend(self._round.avoid)

    async def run(self) -> None:
        """Answer the request.

        Raises:
            PDProxyError: it could not be answered; `downstream.is_committed` says how much the
                client has seen.
        """
        if not self._tools.fleet.available(Role.DECODE):
            raise NoInstance("no decoder is available")
        handoff: Handoff | None = None
        try:
            while True:
                if handoff is None or self._is_stale(handoff):
                    self._drop(handoff)
                    handoff = None
                    handoff = await self._prefill()
                verdict = await self._decode(handoff)
                if verdict is None:
                    return
                if verdict is Verdict.FRESH_PREFILL:
                    self._suspect_owner(handoff)
                if verdict in _FRESH:
                    self._drop(handoff)
                    handoff = None
        finally:
            self._drop(handoff)

    async def _prefill(self) -> Handoff:
        """Prefill on one instance after the other until one has a hand-off."""
        tools, request, call = self._tools, self._request, self._call
        if request.is_decode_only:
            return without_prefill(tools, request, call)
        cost, attempts = prefill_cost(tools, request), self._attempts
        # A handle that has grown too old asks for one more prefill, which needs to be left.
        if attempts.last is not None and attempts.made[Role.PREFILL] >= tools.rules.max_attempts:
            raise attempts.last
        while True:
            lease = attempts.lease(tools.fleet, Role.PREFILL, cost)
            call.account.prefill_attempts += 1
            try:
                with attempts.following(Role.PREFILL, tools.observer):
                    return await prefill(tools, request, call, lease)
            except PDProxyError as error:
                lease.close()
                attempts.note_failure(lease.instance, error)
                await self._before_retry(Role.PREFILL, error)
            except BaseException:
                lease.close()
                raise

    async def _decode(self, handoff: Handoff) -> Verdict | None:
        """Make one decode attempt; return how to go on, None when the answer is complete."""
        tools, request, call = self._tools, self._request, self._call
        cost = decode_cost(tools, request, handoff.prompt_tokens)
        with self._attempts.lease(tools.fleet, Role.DECODE, cost) as lease:
            call.account.decode_attempts += 1
            try:
                with self._attempts.following(Role.DECODE, tools.observer):
                    await self._answer(lease, handoff)
            except PDProxyError as error:
                if isinstance(error, Recomputed):
                    self._round.exhausted = lease.instance
                    tools.fleet.note_exhausted(lease.instance)
                    tools.observer.ran_out(lease.instance)
                if self._downstream.is_committed:
                    raise
                failure = error
                self._attempts.note_failure(lease.instance, error)
            else:
                return None
        return await self._before_retry(Role.DECODE, failure)

    async def _answer(self, lease: Lease, handoff: Handoff) -> None:
        tools, request = self._tools, self._request
        started = tools.clock()
        async with decode(tools, request, self._call, lease, handoff) as response:
            if not (response.header("content-type") or "").lower().startswith(EVENT_STREAM):
                handoff.release()
                await self._respond(response, handoff)
                return
            self._round.note(handoff)
            relay = self._relay_for(response, handoff)
            await self._open(relay, started)
            handoff.release()
            await self._downstream.start(response.headers)
            relay.attach(self._downstream)
            try:
                await relay.finished()
            finally:
                self._settle(relay.facts, handoff)
            if relay.facts.error is not None:
                error = engine_error(relay.facts.error)
                error.is_told = True
                raise error

    def _relay_for(self, response: Response, handoff: Handoff) -> StreamRelay:
        request, tools = self._request, self._tools
        account, observer = self._call.account, tools.observer
        new_keeper = self._round.new_keeper
        relay = StreamRelay(
            response,
            choices=request.choices,
            cached_tokens=handoff.cached_tokens,
            stops=request.stops,
            max_event_bytes=tools.rules.max_event_bytes,
            pulse=account.pulse,
            clock=tools.clock,
            on_full=lambda: observer.pulse_full(account),
            keeper=None if new_keeper is None else new_keeper(),
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

    def _settle(self, facts: StreamFacts | ChunkFacts, handoff: Handoff) -> None:
        """Write what the answer said into the account."""
        account, tools, request = self._call.account, self._tools, self._request
        account.finish_reasons.extend(facts.finished.values())
        usage = facts.usage
        prompt_tokens = handoff.prompt_tokens if usage is None else usage.prompt_tokens
        output_tokens = None if usage is None else usage.completion_tokens
        account.count(prompt_tokens, handoff.cached_tokens, output_tokens)
        if output_tokens is not None:
            tools.outputs.observe(request.model, output_tokens // request.choices)
        if FAILED_FINISHES.intersection(facts.finished.values()):
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

    async def _before_retry(self, role: Role, error: PDProxyError) -> Verdict:
        """Return how to go on after a failure, having waited if the instance must have a pause.

        Raises:
            PDProxyError: `error`, if there is nothing left to try; if all are busy, what one said.
        """
        tools, attempts = self._tools, self._attempts
        verdict = judge(role, error)
        if verdict is Verdict.GIVE_UP:
            raise error
        made, failed = attempts.made[role], attempts.failed[role]
        is_other_free = attempts.is_other_free(tools.fleet, role)
        busy_answer = attempts.busy_answer(tools.fleet, role)
        is_last = busy_answer is not None or self._is_last(
            role, verdict, is_other_free=is_other_free
        )
        logger.warning(
            "request %s: %s attempt %d on %s failed, %s: %s",
            self._call.account.request_id,
            role,
            made,
            failed[-1].label,
            "the last one" if is_last else "trying again",
            describe(error),
        )
        if is_last:
            raise busy_answer or error
        tools.observer.retried(role, failure_reason(error))
        if not is_other_free:
            await asyncio.sleep(delay_s(made, tools.rules.retry_delay_s, tools.rng))
        return verdict

    def _is_last(self, role: Role, verdict: Verdict, *, is_other_free: bool) -> bool:
        """Tell whether nothing is left to try after a failure that another attempt could mend."""
        made, most = self._attempts.made, self._tools.rules.max_attempts
        if made[role] >= most or (verdict in _ELSEWHERE_ONLY and not is_other_free):
            return True
        needs_prefill = verdict in _FRESH and not self._request.is_decode_only
        return needs_prefill and made[Role.PREFILL] >= most

    def _suspect_owner(self, handoff: Handoff) -> None:
        """Leave out the prefiller of a handle that was no good, while there is one without fault.

        Its KV transfer may be broken though it answers.
        """
        if handoff.handle is None or handoff.lease is None:
            return
        owner, failed = handoff.lease.instance, self._attempts.failed[Role.PREFILL]
        others = self._tools.fleet.available(Role.PREFILL)
        if any(other is not owner and other not in failed for other in others):
            failed.append(owner)

    def _is_stale(self, handoff: Handoff) -> bool:
        if handoff.handle is None:
            return False
        age_s = self._tools.clock() - handoff.made_at
        return handoff.is_spent or age_s > self._tools.rules.kv_handle_ttl_s

    def _drop(self, handoff: Handoff | None) -> None:
        """Take the charge off the prefiller, and tell if the handle was never used."""
        if handoff is None:
            return
        handoff.release()
        if handoff.handle is not None and not handoff.is_spent and handoff.lease is not None:
            handoff.is_spent = True
            self._tools.observer.handle_abandoned(handoff.lease.instance)


def describe(error: PDProxyError) -> str:
    """Return one line for the log; never a body, which may quote the prompt."""
    if isinstance(error, EngineAnswered):
        return f"it answered {error.engine_status}"
    return f"{error.message} ({error.detail})" if error.detail else error.message
