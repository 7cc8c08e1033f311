"""Failures on demand: what the next requests are to suffer, for tests of what stands in front.

Each list holds one entry per coming generation request, None for none; an empty list does nothing.
Set them on the object, or send the same names to `POST /sim/faults`. A request can ask for its own
end as recomputed with the header `x-sim-recompute-after: 3`; engines that only prefill ignore it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdproxy.sim.config import Role


@dataclass(frozen=True, slots=True)
class Fault:
    """What one request suffers."""

    status: int | None = None
    recompute_after: int | None = None
    drop_after: int | None = None
    stall_after: int | None = None
    error_after: int | None = None


@dataclass(slots=True)
class Faults:
    """The plan.

    Attributes:
        status: Answer with this HTTP status and an error body.
        recompute_after: End as recomputed after so many output tokens.
        drop_after: Break the connection after so many events; 0 is before any response byte.
        stall_after: Stop sending after so many events, until the client leaves.
        error_after: Send an error event after so many events, then `[DONE]`.
        retry_after_s: `Retry-After` beside an injected status.
    """

    status: list[int | None] = field(default_factory=list)
    recompute_after: list[int | None] = field(default_factory=list)
    drop_after: list[int | None] = field(default_factory=list)
    stall_after: list[int | None] = field(default_factory=list)
    error_after: list[int | None] = field(default_factory=list)
    retry_after_s: int | None = None

    def take(self) -> Fault:
        """What the next request suffers."""
        return Fault(
            status=_next(self.status),
            recompute_after=_next(self.recompute_after),
            drop_after=_next(self.drop_after),
            stall_after=_next(self.stall_after),
            error_after=_next(self.error_after),
        )


def asked_for(fault: Fault, headers: Mapping[str, str], role: Role) -> Fault:
    """What the request suffers if its headers ask for more."""
    wanted = headers.get("x-sim-recompute-after", "")
    if role == "prefill" or not wanted.isdecimal():
        return fault
    return replace(fault, recompute_after=int(wanted))


def _next(plan: list[int | None]) -> int | None:
    return plan.pop(0) if plan else None
