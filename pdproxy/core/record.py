"""An instance as it is told to operators: plain values, fit to travel between processes."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdproxy.core.instance import Role, Source, State


class Change(StrEnum):
    """What an administrative call did to one instance."""

    WAITING = "waiting"  # it is new, and joins once it answers a probe
    RESTORED = "restored"  # it was draining and takes requests again
    UNCHANGED = "unchanged"  # it is as it was asked to be
    DRAINING = "draining"  # it gets nothing new and finishes its own
    GONE = "gone"  # it held nothing and is forgotten
    UNKNOWN = "unknown"  # nothing is known at that address


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself; None for what it does not say.

    Attributes:
        capacity_tokens: tokens its KV cache holds.
        kv_usage: part of the KV cache in use, 0..1.
        running: requests that it works on, whoever sent them.
        waiting: requests in its queue.
    """

    capacity_tokens: int | None = None
    kv_usage: float | None = None
    running: int | None = None
    waiting: int | None = None


NO_REPORT = EngineReport()


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at one moment.

    Attributes:
        role: what it is used for.
        instance: its name: the address as typed first.
        source: who wants it.
        state: where it is in its life.
        state_age_s: for how long it has been in that state.
        requests: legs in flight.
        compute_tokens: prompt tokens still to be computed.
        kv_tokens: tokens whose KV is held for them.
        capacity_tokens: tokens its KV cache holds, as reported or learned; None if unknown.
        ramp: how far its slow start has come, 1 if it is over.
        ejections: how often it was ejected.
        is_dead: as far as known it serves nobody.
        last_error: why a request or a probe failed last; "" if none has.
        last_error_age_s: how long ago that was; None if none has.
        engine: what the engine says of itself; None if it has said nothing.
        deadline_left_s: until its requests are cut, if it drains and has a deadline.
    """

    role: Role
    instance: str
    source: Source
    state: State
    state_age_s: float
    requests: int
    compute_tokens: int
    kv_tokens: int
    capacity_tokens: int | None
    ramp: float
    ejections: int
    is_dead: bool
    last_error: str
    last_error_age_s: float | None
    engine: EngineReport | None
    deadline_left_s: float | None = None
