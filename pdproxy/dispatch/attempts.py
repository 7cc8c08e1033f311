"""Who was asked for a request already, and so who is asked next.

Rule: an instance that failed a request is not asked again while another is available, and one that
said "not now" is not asked again at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from pdproxy.core.fleet import Fleet, Lease
from pdproxy.core.instance import Instance, Role
from pdproxy.core.load import Cost
from pdproxy.core.policy import Reason
from pdproxy.core.retry import Phase, is_busy, phase_of
from pdproxy.dispatch.ports import Observer
from pdproxy.errors import PDProxyError, Recomputed, untraced


@dataclass(slots=True)
class Attempts:
    """Attempts of one round: how many per leg, who failed, and who is too busy to be asked again.

    Attributes:
        made: attempts begun.
        failed: instances that failed, in order.
        busy: those of them that said "not now", with what they said.
        last: the last failure of any leg.
        moved: how far the failed attempt had come, if the one that runs now is on another instance.
    """

    made: dict[Role, int] = field(default_factory=lambda: {Role.PREFILL: 0, Role.DECODE: 0})
    failed: dict[Role, list[Instance]] = field(
        default_factory=lambda: {Role.PREFILL: [], Role.DECODE: []}
    )
    busy: dict[Role, dict[Instance, PDProxyError]] = field(
        default_factory=lambda: {Role.PREFILL: {}, Role.DECODE: {}}
    )
    last: PDProxyError | None = None
    moved: Phase | None = None
    _last: dict[Role, tuple[Instance, Phase]] = field(default_factory=dict)

    def lease(
        self, fleet: Fleet, role: Role, cost: Cost, avoid: Collection[Instance] = ()
    ) -> Lease:
        """Lease an instance for the next attempt: one that has not failed, if there is one.

        Those in `avoid` are left out, too, as long as one remains that has not failed.

        Raises:
            NoInstance: there is none at all.
        """
        failures: Collection[Instance] = self.failed[role]
        if failures and not self.is_other_free(fleet, role):
            failures = self.busy[role]
        both: Collection[Instance] = {*failures, *avoid} if avoid else failures
        if avoid and all(instance in both for instance in fleet.available(role)):
            both = failures
        why = Reason.OTHERS_FAILED if failures else Reason.OTHERS_FULL
        lease = fleet.lease(role, cost, avoid=both, why_avoided=why)
        self.made[role] += 1
        failed, phase = self._last.get(role, (lease.instance, None))
        self.moved = phase if failed is not lease.instance else None
        return lease

    def following(self, role: Role, observer: Observer) -> AbstractContextManager[None]:
        """Tell how an attempt ends that follows one that failed on another instance."""
        return nullcontext() if self.moved is None else _telling(role, self.moved, observer)

    def note_failure(self, instance: Instance, error: PDProxyError) -> None:
        """Remember why the last attempt ended."""
        self.failed[instance.role].append(instance)
        self.last = untraced(error)
        self._last[instance.role] = instance, phase_of(error)
        if is_busy(error):
            self.busy[instance.role][instance] = error

    def is_other_free(self, fleet: Fleet, role: Role) -> bool:
        """Tell whether an instance is available that has not failed."""
        failed = self.failed[role]
        return any(instance not in failed for instance in fleet.available(role))

    def busy_answer(self, fleet: Fleet, role: Role) -> PDProxyError | None:
        """Return what a busy instance said if all that are available are busy, else None."""
        busy = self.busy[role]
        if not busy or any(instance not in busy for instance in fleet.available(role)):
            return None
        return next(reversed(busy.values()))


@contextmanager
def _telling(role: Role, phase: Phase, observer: Observer) -> Iterator[None]:
    result = "abandoned"
    try:
        yield
        result = "recovered"
    except PDProxyError as error:
        result = "recovered" if isinstance(error, Recomputed) else "failed"
        raise
    finally:
        observer.failed_over(role, phase, result)
