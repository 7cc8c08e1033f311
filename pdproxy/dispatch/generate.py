"""One generate request from start to end: prefill, hand-off, decode, relay, what may be retried.

Rule: an attempt is repeated only while the client was sent nothing, at most `max_attempts` times
per leg, and on an instance that has not failed this request while there is one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from pdproxy.core.api import GenerateRequest
from pdproxy.core.fleet import Lease
from pdproxy.core.instance import Role
from pdproxy.core.load import Cost
from pdproxy.core.retry import Verdict, delay_s, is_instance_fault, is_reply_lost, judge
from pdproxy.dispatch.attempt import failure_reason
from pdproxy.dispatch.attempts import Attempts
from pdproxy.dispatch.delivery import Delivery
from pdproxy.dispatch.legs import (
    Call,
    Handoff,
    Tools,
    abandon,
    decode_cost,
    prefill,
    prefill_cost,
    without_prefill,
)
from pdproxy.dispatch.ports import Downstream
from pdproxy.dispatch.round import Round
from pdproxy.dispatch.standing import Standing
from pdproxy.errors import (
    EngineAnswered,
    NoInstance,
    PDProxyError,
    Recomputed,
)

logger = logging.getLogger(__name__)

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
        self._standing = Standing(tools, request, call)
        self._is_alone = request.is_decode_only
        self._attempts.failed[Role.DECODE].extend(self._round.avoid)

    async def run(self) -> None:
        """Answer the request.

        Raises:
            PDProxyError: it could not be answered; `downstream.is_committed` says how much the
                client has seen.
        """
        with self._call.span.child("round", {"pdproxy.round": self._call.account.rounds}) as span:
            if span is not self._call.span:
                self._call = replace(self._call, span=span)  # the legs belong into this one
            await self._run()

    async def _run(self) -> None:
        if not self._tools.fleet.available(Role.DECODE):
            raise NoInstance("no decoder is available")
        handoff: Handoff | None = None
        try:
            await self._standing.take_place()
            while True:
                if handoff is None or self._is_stale(handoff):
                    self._drop(handoff)
                    handoff = None
                    async with self._turn():
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
            self._standing.leave()
            self._drop(handoff)

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """Let the prefills of answers that do not get on be one per prefiller."""
        if not self._round.is_stuck:
            return nullcontext()
        return self._tools.turns.turn(len(self._tools.fleet.available(Role.PREFILL)))

    async def _prefill(self) -> Handoff:
        """Prefill on one instance after the other until one has a hand-off."""
        tools, request = self._tools, self._request
        if self._is_alone:
            is_asked = request.is_decode_only
            return self._without_prefill("decode_only" if is_asked else "prefill_failed")
        cost, attempts = prefill_cost(tools, request), self._attempts
        # A handle that has grown too old asks for one more prefill, which needs to be left.
        if attempts.last is not None and attempts.made[Role.PREFILL] >= tools.rules.max_attempts:
            raise attempts.last
        while True:
            lease = self._lease_prefiller(cost)
            if lease is None:
                return self._without_prefill("no_prefiller")
            handoff = await self._try_prefill(lease)
            if handoff is not None:
                return handoff

    def _lease_prefiller(self, cost: Cost) -> Lease | None:
        """Lease a prefiller; None if a decoder is to do without."""
        tools, avoid = self._tools, self._standing.avoided(Role.PREFILL)
        try:
            lease = self._attempts.lease(tools.fleet, Role.PREFILL, cost, avoid)
        except NoInstance:
            if tools.rules.decode_alone:
                return None
            raise
        self._standing.prefill_leased()
        return lease

    async def _try_prefill(self, lease: Lease) -> Handoff | None:
        """Make one prefill attempt; None if another one is to follow."""
        tools, attempts, call = self._tools, self._attempts, self._call
        call.account.prefill_attempts += 1
        try:
            with attempts.following(Role.PREFILL, tools.observer):
                return await prefill(tools, self._request, call, lease)
        except PDProxyError as error:
            lease.close()
            attempts.note_failure(lease.instance, error)
            if is_reply_lost(error):
                tools.observer.prefill_reply_lost(lease.instance)
            if await self._goes_on(error):
                return None
            return self._without_prefill("prefill_failed")
        except BaseException:
            lease.close()
            raise

    async def _decode(self, handoff: Handoff) -> Verdict | None:
        """Make one decode attempt; return how to go on, None when the answer is complete."""
        tools, request, call = self._tools, self._request, self._call
        cost = decode_cost(tools, request, handoff.prompt_tokens)
        await self._standing.await_room(handoff, cost)
        avoid = self._standing.avoided(Role.DECODE, cost.kv_tokens)
        delivery = Delivery(tools, request, call, self._downstream, self._round)
        with self._attempts.lease(tools.fleet, Role.DECODE, cost, avoid) as lease:
            self._standing.leave()
            call.account.decode_attempts += 1
            self._round.decoder = lease.instance
            try:
                with self._attempts.following(Role.DECODE, tools.observer):
                    await delivery.answer(lease, handoff)
            except PDProxyError as error:
                if isinstance(error, Recomputed):
                    handoff.is_pulled = True
                    tools.fleet.note_exhausted(lease.instance)
                    tools.observer.ran_out(lease.instance)
                if self._downstream.is_committed:
                    raise
                failure = error
                self._attempts.note_failure(lease.instance, error)
            else:
                return None
        return await self._before_retry(Role.DECODE, failure)

    # --- what goes wrong

    def _without_prefill(self, reason: str) -> Handoff:
        """Let the decoder compute the prompt."""
        self._is_alone = True
        self._standing.prefill_leased()
        return without_prefill(self._tools, self._request, self._call, reason)

    async def _goes_on(self, error: PDProxyError) -> bool:
        """Tell whether the prefill is tried again; False if a decoder is to do it alone."""
        try:
            await self._before_retry(Role.PREFILL, error)
        except PDProxyError:
            if self._tools.rules.decode_alone and is_instance_fault(error):
                return False
            raise
        return True

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
            "request %s: round %d, %s attempt %d on %s failed, %s: %s",
            self._call.account.request_id,
            self._call.account.rounds,
            role,
            made,
            failed[-1].label,
            "the last one" if is_last else "trying again",
            describe(error),
        )
        if is_last:
            raise busy_answer or error
        tools.observer.retried(role, failure_reason(error))
        # One failure is one engine's; after two, others may be as badly off.
        if not is_other_free or made > 1:
            await asyncio.sleep(delay_s(made, tools.rules.retry_delay_s, tools.rng))
        return verdict

    def _is_last(self, role: Role, verdict: Verdict, *, is_other_free: bool) -> bool:
        """Tell whether nothing is left to try after a failure that another attempt could mend."""
        made, most = self._attempts.made, self._tools.rules.max_attempts
        if made[role] >= most or (verdict in _ELSEWHERE_ONLY and not is_other_free):
            return True
        needs_prefill = verdict in _FRESH and not self._is_alone
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
        """Take the charge off the prefiller, and have it free a handle that was not used."""
        if handoff is None:
            return
        handoff.release()
        abandon(self._tools, self._request, self._call, handoff)


def describe(error: PDProxyError) -> str:
    """Return one line for the log; never a body, which may quote the prompt."""
    if isinstance(error, EngineAnswered):
        return f"the engine answered {error.engine_status}"
    return f"{error.message} ({error.detail})" if error.detail else error.message
