"""Writes the history that the dashboard shows, as one more observer beside the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdproxy.core.history import Failure, History, Recent, shown
from pdproxy.core.instance import Instance
from pdproxy.dispatch.account import Account, Outcome

CLIENTS_FAULT = "status_4xx"


def wall_clock() -> float:
    """Return the seconds since 1970, by which the buckets of several processes agree."""
    return time.time()  # noqa: TID251 - a date, no duration; datetime's way to it takes ten times longer


class Recorder:
    """Fills the history of this process."""

    def __init__(self, clock: Callable[[], float] = wall_clock) -> None:
        """Make a recorder with an empty history; `clock` is the wall clock."""
        self._clock = clock
        self._history = History(clock)

    async def recent(self) -> Recent:
        """Return what this process counted."""
        return self._history.recent()

    def request_finished(self, account: Account) -> None:
        """Count a request that has ended, and keep it if it failed."""
        tokens, timeline = account.output_tokens, account.timeline
        is_timed = account.is_stream and tokens is not None
        self._history.count_request(
            account.outcome.value,
            ttft_s=timeline.ttft_s if account.is_stream else None,
            tpot_s=timeline.tpot_s(tokens) if is_timed and tokens is not None else None,
            output_tokens=tokens or 0,
        )
        if account.outcome is not Outcome.SUCCESS:
            self._keep(account)

    def attempt_failed(self, instance: Instance, reason: str) -> None:
        """Keep the last error of an instance, unless it refused what a client sent."""
        if reason != CLIENTS_FAULT:
            self._history.keep_error(instance.role.value, instance.label, shown(reason))

    def recompute_ended(self) -> None:
        """Count a further round of an answer."""
        self._history.count_recompute()

    def _keep(self, account: Account) -> None:
        failure = Failure(
            at_s=self._clock(),
            request_id=shown(account.request_id),
            endpoint=account.endpoint,
            model=shown(account.model),
            outcome=account.outcome.value,
            status=account.status,
            prefiller=account.prefiller,
            decoder=account.decoder,
            why=shown(account.why),
        )
        self._history.keep_failure(failure, is_clients=account.outcome.is_clients)
