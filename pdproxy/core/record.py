"""An instance as it is told to operators: plain values, fit to travel between processes."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdproxy.core.instance import Role, State


class Change(StrEnum):
    """What an administrative call did to one instance."""

    WAITING = "waiting"  # it is new, and joins once it answers a probe
    RESTORED = "restored"  # it was draining and takes requests again
    UNCHANGED = "unchanged"  # it is as it was asked to be
    DRAINING = "draining"  # it gets nothing new and finishes its own
    GONE = "gone"  # it held nothing and is forgotten
    UNKNOWN = "unknown"  # nothing is known at that address


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at one moment.

    Attributes:
        role: what it is used for.
        instance: its name: the address as typed first.
        state: where it is in its life.
        state_age_s: for how long it has been in that state.
        requests: legs in flight.
        compute_tokens: prompt tokens still to be computed.
        kv_tokens: tokens whose KV is held for them.
        capacity_tokens: tokens its KV cache holds, None if unknown.
    """

    role: Role
    instance: str
    state: State
    state_age_s: float
    requests: int
    compute_tokens: int
    kv_tokens: int
    capacity_tokens: int | None
