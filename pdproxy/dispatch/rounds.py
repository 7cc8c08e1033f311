"""The rounds of one request: what a decoder gave back, or lost, is prefilled again and decoded on.

Rules: the client sees one answer, or an error that says why there is none; rounds are bounded in
number, and come more slowly while they bring nothing; one round of a request runs at a time.
"""

from __future__ import annotations

import asyncio

import msgspec

from pdproxy.core import sse
from pdproxy.core.answer import Answer
from pdproxy.core.api import GenerateRequest
from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import Raw, decode, encode
from pdproxy.core.keeper import Keeper
from pdproxy.core.planner import Complete, GiveUp, Resume, Way, note_echo, plan
from pdproxy.core.recount import recount
from pdproxy.core.reply import Reply
from pdproxy.core.resume import asks_ids, with_ids
from pdproxy.core.retry import Phase, delay_s
from pdproxy.core.seam import RoundEnd, Seam, ending, head
from pdproxy.core.stops import hidden_stops
from pdproxy.dispatch.account import Counts
from pdproxy.dispatch.cuts import Cuts
from pdproxy.dispatch.generate import Exchange
from pdproxy.dispatch.legs import Call, Tools
from pdproxy.dispatch.part import Part
from pdproxy.dispatch.ports import Downstream, Headers
from pdproxy.dispatch.relay import StreamFacts
from pdproxy.dispatch.round import CutReply, Round
from pdproxy.dispatch.rules import TokenIds
from pdproxy.dispatch.tokenizer import Tokenizer
from pdproxy.errors import (
    PDProxyError,
    Recomputed,
    RecomputeUnsupported,
    UpstreamError,
)

# One cut may need rounds for the end of the reasoning, for the content, and for other choices. The
# factor bounds what a decoder that is lost under a large `n` can set off.
ROUNDS_PER_CUT = 4
OK = 200
_WENT_ON = frozenset({"resumed", "cut"})


class Rounds:
    """One request for one prompt, over all its rounds."""

    def __init__(
        self, tools: Tools, request: GenerateRequest, call: Call, downstream: Downstream
    ) -> None:
        self._tools = tools
        self._request = request
        self._call = call
        self._downstream = downstream
        self._answer = Answer()
        self._reply: Reply | None = None
        self._headers: Headers = ()
        self._cuts = Cuts(call.account)
        self._rounds = 1
        self._has_told_usage = False
        self._counted: list[Counts] = []

    async def run(self) -> None:
        """Answer the request.

        Raises:
            PDProxyError: it could not be answered whole; `downstream.is_committed` says how much
                the client has seen.
        """
        if await self._first():
            return
        note_echo(self._request, self._answer)
        try:
            for index in range(self._request.choices):
                if self._answer.choice(index).finish_reason is None:
                    self._forget_uncounted(index)
                    await self._finish_choice(index)
        finally:
            self._count()
        await self._end()

    async def _first(self) -> bool:
        """Run the first round, again while nothing came of it; return whether all is said."""
        while True:
            this = self._new_round()
            this.new_keeper = self._new_keeper
            try:
                await self._play(self._asked(), self._downstream, this)
            except PDProxyError as error:
                if not self._is_resumable(error, has_begun=self._downstream.is_committed):
                    raise
                self._note_first(this)
                self._note_cut(error, this, made=_total(self._answer))
                if self._downstream.is_committed or this.cut is not None:
                    self._begin_reply(this.cut)
                    return False
                await self._before_round()
            else:
                return True

    def _new_round(self) -> Round:
        return Round(avoid=self._cuts.decoders, is_stuck=self._cuts.idle > 0)

    async def _play(self, request: GenerateRequest, downstream: Downstream, this: Round) -> None:
        """Run one round.

        No round is kept, since it leads back here: a request with a big body would stay until the
        next collection of garbage.
        """
        try:
            await Exchange(self._tools, request, self._call, downstream, this).run()
        finally:
            if this.counts is not None:
                self._counted.append(this.counts)

    def _new_keeper(self) -> Keeper:
        """Begin the answer anew: what an attempt said of which nothing was delivered is none."""
        self._answer = Answer()
        stops = hidden_stops(self._request)
        return Keeper(self._answer, shows_ids=asks_ids(self._request), stops=stops)

    def _asked(self) -> GenerateRequest:
        """Return the request of the first round, with token ids asked for where they may serve."""
        request, mode = self._request, self._tools.rules.token_ids
        if mode is TokenIds.NEVER:
            return request
        is_likely = request.prompt_tokens is not None
        is_likely = is_likely or self._tools.abilities.gives_back(request.model)
        return with_ids(request) if is_likely or mode is TokenIds.ALWAYS else request

    async def _finish_choice(self, index: int) -> None:
        """Continue one choice until it has its finish reason."""
        tools = self._tools
        tokenizer = Tokenizer(tools.client, tools.fleet, self._call.headers)
        abilities = await tools.abilities.find(self._request.model, tokenizer.ask)
        end_id = abilities.reasoning_end_id
        while True:
            await tokenizer.settle(recount(self._request, self._answer, index, end_id))
            found = plan(
                self._request,
                self._answer,
                index,
                abilities,
                is_delivered=self._reply is None,
            )
            if isinstance(found, GiveUp):
                self._tell_end("failed")
                raise RecomputeUnsupported(f"the answer cannot be continued: {found.why}")
            if isinstance(found, Complete):
                self._deliver(ending(self._request, self._answer, index, found.finish_reason))
                return
            await self._before_round()
            end = await self._round(index, found)
            if end.is_final:
                return

    async def _round(self, index: int, resume: Resume) -> RoundEnd:
        """Run one further round of a choice, and what follows from its failure."""
        if resume.way is Way.AGAIN and self._reply is not None:
            self._reply.restart(index)
        tools, choice = self._tools, self._answer.choice(index)
        seam = Seam(self._request, self._answer, index, resume)
        before = choice.tokens
        part = Part(self._downstream, seam, self._deliver, self._call.account.pulse)
        this = self._new_round()
        this.is_enough = lambda: seam.end.is_stopped
        try:
            await self._play(resume.request, part, this)
        except PDProxyError as error:
            if not self._is_resumable(error, has_begun=part.is_committed):
                self._tell_end("failed")
                error.is_told = error.is_told and self._reply is None
                cause = self._cuts.cause(error)
                if cause is error:
                    raise
                raise cause from error
            self._tell_end("cut")
            self._note_cut(error, this, made=choice.tokens - before)
            if isinstance(error, Recomputed):
                self._answer.give_back([index])
        else:
            self._tell_end("resumed")
            self._answer.give_back([index])
        if seam.end.has_ids is not None:
            tools.abilities.note_ids(self._request.model, are_given=seam.end.has_ids)
        computed = max(0, this.prompt_tokens - (this.cached_tokens or 0))
        tools.observer.recomputed_tokens(self._request.model, computed)
        return seam.end

    def _is_resumable(self, error: PDProxyError, *, has_begun: bool) -> bool:
        """Tell whether a failure is one that another round may mend.

        A decoder that is lost before its first output is replaced by the attempts of its round.
        """
        if isinstance(error, Recomputed):
            return True
        return has_begun and isinstance(error, UpstreamError) and self._tools.rules.continue_lost

    def _note_cut(self, error: PDProxyError, this: Round, made: int) -> None:
        """Keep in mind why a round did not end the answer."""
        if isinstance(error, Recomputed):
            self._tools.abilities.note_recompute(self._request.model)
        self._cuts.note(error, this.decoder, made=made, kept=_total(self._answer))

    async def _before_round(self) -> None:
        """Count the round to come; wait if the last ones brought nothing.

        Raises:
            PDProxyError: the limit of rounds is reached.
        """
        tools, account = self._tools, self._call.account
        cuts, limit = self._cuts, tools.rules.max_rounds
        is_cut, cuts.is_pending = cuts.is_pending, False
        is_cut_out = is_cut and cuts.count >= limit
        if is_cut_out or self._rounds >= limit * ROUNDS_PER_CUT:
            self._tell_end("limit")
            text = f"the answer was cut {cuts.count} times; the limit of rounds is reached"
            raise RecomputeUnsupported(text) from cuts.last
        account.rounds += 1
        self._rounds += 1
        if is_cut and cuts.idle:
            await asyncio.sleep(delay_s(cuts.idle, tools.rules.retry_delay_s, tools.rng))

    def _tell_end(self, result: str) -> None:
        """Tell the observer how a further round ended: "resumed", "cut", "failed" or "limit"."""
        self._tools.observer.recompute_ended(self._call.account.decoder, result)
        self._tell_failover("recovered" if result in _WENT_ON else "failed")

    def _tell_failover(self, result: str) -> None:
        if self._cuts.is_lost:
            self._cuts.is_lost = False
            self._tools.observer.failed_over(Role.DECODE, Phase.MID_STREAM, result)

    def _note_first(self, this: Round) -> None:
        facts = this.facts
        self._answer.prompt_tokens = this.prompt_tokens
        if self._request.is_decode_only and facts is not None and facts.usage is not None:
            # Without a prefill there is only an estimate.
            self._answer.prompt_tokens = facts.usage.prompt_tokens
        self._answer.cached_tokens = this.cached_tokens
        self._has_told_usage = isinstance(facts, StreamFacts) and facts.has_told_usage

    def _begin_reply(self, cut: CutReply | None) -> None:
        """Take up a whole reply that was cut; the client was sent nothing of it."""
        if cut is not None:
            self._headers = cut.headers
            indexes = set(cut.indexes)
            self._reply = Reply(self._request, self._answer, cut.fields, indexes)

    def _forget_uncounted(self, index: int) -> None:
        """Let a choice be made again of which the first reply does not tell how long it is.

        A whole reply has one count for all of its choices; only ids count each.
        """
        choice = self._answer.choice(index)
        if self._reply is not None and self._request.choices > 1 and not choice.has_all_ids:
            self._reply.restart(index)

    def _deliver(self, block: bytes) -> None:
        """Give the client whole events of the answer; one that does not stream gets them later."""
        if self._reply is None:
            self._downstream.write(block)
            return
        for event in sse.split_block(block):
            self._reply.add(msgspec.json.decode(sse.data_of(event)))

    def _count(self) -> None:
        """Let the account have the counts of the answer instead of those of its rounds."""
        answer = self._answer
        ends = [choice.finish_reason for _, choice in sorted(answer.choices.items())]
        reasons = tuple(reason for reason in ends if reason is not None)
        whole = Counts(answer.prompt_tokens, answer.cached_tokens, _total(answer), reasons)
        self._call.account.recount(self._counted, whole)

    async def _end(self) -> None:
        """Tell the client the end of an answer of several rounds."""
        usage = self._answer.usage()
        if self._reply is not None:
            await self._downstream.respond(OK, self._headers, self._reply.composed())
            return
        end = sse.DONE
        if _wants_usage(self._request) and not self._has_told_usage:
            last = {**head(self._request, self._answer), "choices": [], "usage": usage}
            end = sse.encode_data(encode(last)) + end
        self._downstream.write(end)


def _total(answer: Answer) -> int:
    return sum(choice.tokens for choice in answer.choices.values())


def _wants_usage(request: GenerateRequest) -> bool:
    options = decode(request.fields.get("stream_options", Raw(b"null")))
    return isinstance(options, dict) and options.get("include_usage") is True
