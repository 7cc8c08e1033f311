"""The metrics of a process, and the log line and the history that are due at the same moment.

Rule: while a request runs, its end is only noted. Some that have ended are counted and logged
together, which costs a fraction of one at a time; whoever reads the counts has them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdproxy.core.fleet import Fleet
from pdproxy.core.history import Recent
from pdproxy.core.instance import Instance
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.in_flight import InFlight
from pdproxy.runtime.access_line import log_access
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.recorder import Recorder

logger = logging.getLogger(__name__)


# After a request has ended, those that end within this time are reported together.
PAUSE_S = 0.1
# So many are reported at once; it takes about a millisecond.
MOST = 64


class Reporter(Metrics):
    """Metrics that also write the log line that is due at the same moment."""

    def __init__(
        self, fleet: Fleet, recorder: Recorder, running: InFlight, clock: Callable[[], float]
    ) -> None:
        """Make all metrics; `running` counts the client requests of the whole proxy.

        `clock` is that of the requests' timelines.
        """
        super().__init__(fleet)
        self._running = running
        self._recorder = recorder
        self._clock = clock
        self._handing_nothing: set[str] = set()
        self._ended: list[Account] = []
        self._pause: asyncio.TimerHandle | None = None

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
        """Count and log a request that has ended: at once after a pause, else with others."""
        self._running.add(-1)
        self._ended.append(account)
        if self._pause is None:
            self._report_and_pause()
        elif len(self._ended) >= MOST:
            self._report()

    def flush(self) -> None:  # type: ignore[explicit-override] # typing.override is new in 3.12
        """Log all requests that have ended, and let the metrics have all counts."""
        self._report()
        super().flush()

    async def recent(self) -> Recent:
        """Return the history with all requests that have ended."""
        self._report()
        return await self._recorder.recent()

    def attempt_failed(  # type: ignore[explicit-override] # typing.override is new in 3.12
        self, instance: Instance, reason: str
    ) -> None:
        """Keep the reason."""
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

    # --- inside

    def _report(self) -> None:
        """Count and log those that have ended."""
        ended, self._ended = self._ended, []
        for account in ended:
            super().request_finished(account)
            self._recorder.request_finished(account)
        if ended:
            log_access(ended, self._clock())

    def _report_and_pause(self) -> None:
        self._report()
        self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._paused)

    def _paused(self) -> None:
        self._pause = None
        if self._ended:
            self._report_and_pause()
