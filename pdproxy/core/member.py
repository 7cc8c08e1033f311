"""What is kept of one instance."""

from __future__ import annotations

from typing import Protocol

from pdproxy.core.health import Health
from pdproxy.core.instance import Instance, Source, State
from pdproxy.core.ramp import Ramp
from pdproxy.core.record import EngineReport


class SupportsCut(Protocol):
    """A lease, as far as it matters here."""

    def cut(self) -> None:
        """End what runs by it."""
        ...


class Member:
    """One instance that the proxy knows."""

    __slots__ = (
        "capacity_tokens",
        "engine",
        "health",
        "instance",
        "is_cut",
        "kv_weight",
        "learned_s",
        "learned_tokens",
        "leases",
        "live",
        "ramp",
        "since_s",
        "slot",
        "source",
        "state",
    )

    def __init__(
        self, instance: Instance, source: Source, state: State, health: Health, since_s: float
    ) -> None:
        self.instance = instance
        self.source = source
        self.slot = instance.slot
        self.state = state
        self.health = health
        self.since_s = since_s
        self.leases = 0  # live ones; a slot may only be given back at zero
        self.live: set[SupportsCut] = set()  # the same
        self.is_cut = False  # its time for draining is over
        self.ramp: Ramp | None = None  # while it starts slowly
        self.engine: EngineReport | None = None  # what the engine says of itself
        self.kv_weight = 1.0  # what a token counted here takes there, as shared prefixes are one
        self.learned_tokens: int | None = None  # what it held when it ran out
        self.capacity_tokens: int | None = None
        self.learned_s: float | None = None  # when that was learned from its running out

    def settle_capacity(self) -> None:
        """Find the capacity to go by: what the engine reports, unless less was learned.

        Both are in tokens as they are counted here, for each request apart.
        """
        reported = self.engine.capacity_tokens if self.engine is not None else None
        if reported is not None:
            reported = int(reported / self.kv_weight)
        known = [tokens for tokens in (reported, self.learned_tokens) if tokens is not None]
        self.capacity_tokens = min(known, default=None)

    @property
    def is_pending(self) -> bool:
        """Whether it was added by a call and has not answered a probe yet."""
        return self.state is State.JOINING and self.source is Source.CALL
