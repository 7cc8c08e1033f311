"""The metrics of a process, and the log line and the history that are due at the same moment."""

from __future__ import annotations

import logging

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.admission import InFlight
from pdproxy.runtime.logs import log_access
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.recorder import Recorder

logger = logging.getLogger(__name__)


class Reporter(Metrics):
    """Metrics that also write the log line that is due at the same moment."""

    def __init__(self, fleet: Fleet, recorder: Recorder, running: InFlight) -> None:
        """Make all metrics; `running` counts the client requests of the whole proxy."""
        super().__init__(fleet)
        self._running = running
        self._recorder = recorder
        self._handing_nothing: set[str] = set()

    @property
    def in_flight(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self,
    ) -> int:
        """Requests begun and not finished, in all processes of the proxy."""
        return self._running.count()

    def request_started(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, endpoint: str
    ) -> None:
        """Count a request that has come in."""
        self._running.add(1)
        super().request_started(endpoint)

    def request_finished(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, account: Account
    ) -> None:
        """Count and log a request that has ended."""
        self._running.add(-1)
        super().request_finished(account)
        self._recorder.request_finished(account)
        log_access(account)

    def attempt_finished(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, instance: Instance, outcome: str, seconds: float, reason: str = ""
    ) -> None:
        """Count an attempt; keep the reason of one that failed."""
        super().attempt_finished(instance, outcome, seconds, reason)
        if reason:
            self._recorder.attempt_failed(instance, reason)

    def recompute_ended(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, decoder: str, result: str
    ) -> None:
        """Count a further round of an answer."""
        super().recompute_ended(decoder, result)
        self._recorder.recompute_ended()

    def handle_missing(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, instance: Instance
    ) -> None:
        """Count a prefill without a KV handle; warn of each instance once, not per request."""
        super().handle_missing(instance)
        if instance.label not in self._handing_nothing:
            self._handing_nothing.add(instance.label)
            logger.warning(
                "prefiller %s answered without kv_transfer_params: decoders compute its prompts "
                "again (from now on only counted)",
                instance.label,
            )
