"""The series that requests of one kind count in: looked up once, as each look-up costs."""

from __future__ import annotations

from pdproxy.core.api import Api
from pdproxy.core.timeline import Stage
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.instruments import STREAM_LABELS, Instruments
from pdproxy.runtime.tally import Count, Tally

GENERATE = frozenset(api.value for api in Api)


class RequestSeries:
    """Counts the requests of one endpoint and model that are streamed, or those that are not."""

    def __init__(
        self, made: Instruments, tally: Tally, endpoint: str, model: str, *, is_stream: bool
    ) -> None:
        """Find the series; those of all outcomes begin with zero."""
        self._made = made
        self._tally = tally
        self._labels = (endpoint, model, STREAM_LABELS[is_stream])
        self._is_stream = is_stream
        made.begin_requests(*self._labels)
        self._in_flight = tally.counted(made.in_flight, endpoint)
        self._ended: dict[tuple[int, Outcome], Count] = {}
        self._duration = tally.observed(made.duration, *self._labels)
        self._stages = {
            stage: tally.observed(made.stages, stage.value, model)
            for stage in Stage
            if stage is not Stage.BODY
        }
        self._own = tally.observed(made.own, endpoint)
        self._ttft = tally.observed(made.ttft, endpoint, model)
        self._itl = tally.observed(made.itl, endpoint, model)
        self._tpot = tally.observed(made.tpot, endpoint, model)
        self._prompt = tally.counted(made.tokens["prompt"], model)
        self._cached = tally.counted(made.tokens["cached_prompt"], model)
        self._uncounted = (
            tally.counted(made.without_usage, endpoint) if endpoint in GENERATE else None
        )
        self._generation = tally.counted(made.tokens["generation"], model)

    def count(self, account: Account) -> None:
        """Count a request that has ended, once, under its outcome."""
        timeline = account.timeline
        self._in_flight.amount -= 1
        self._of_end(account).amount += 1
        self._duration.add(timeline.total_s or 0.0)
        stages = self._stages
        for stage, seconds in timeline.stages_s.items():
            if stage in stages:
                stages[stage].add(seconds)
        own_s = account.own_s
        if own_s is not None:
            self._own.add(own_s)
        self._prompt.amount += account.prompt_tokens or 0
        self._cached.amount += account.cached_tokens or 0
        self._generation.amount += account.output_tokens or 0
        if self._uncounted is not None and account.is_uncounted:
            self._uncounted.amount += 1
        if self._is_stream:
            self._observe_stream(account)

    def count_gaps(self, account: Account) -> None:
        """Count the gaps of a stream, which may still run."""
        pulse = account.pulse
        if pulse.noted and self._is_stream:
            self._itl.add_all(pulse.counts, pulse.sum_s)
            pulse.clear()

    def _of_end(self, account: Account) -> Count:
        """Return what counts the requests that ended as this one did."""
        key = (account.status, account.outcome)
        found = self._ended.get(key)
        if found is None:
            labels = (*self._labels, str(account.status), account.outcome.value)
            found = self._ended[key] = self._tally.counted(self._made.requests, *labels)
        return found

    def _observe_stream(self, account: Account) -> None:
        timeline, tokens = account.timeline, account.output_tokens
        if timeline.ttft_s is not None:
            self._ttft.add(timeline.ttft_s)
        self.count_gaps(account)
        tpot_s = None if tokens is None else timeline.tpot_s(tokens)
        if tpot_s is not None:
            self._tpot.add(tpot_s)
