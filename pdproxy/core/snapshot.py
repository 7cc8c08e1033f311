"""The states of all instances at one moment, as one process gives them and others follow.

Rule: one process owns the states. A `Replica` repeats them in another process's fleet, whole and
in one step, and never changes one by itself; a snapshot older than the last one changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdproxy.core.instance import Endpoint, Instance, Role, Source, State
from pdproxy.core.member import Member
from pdproxy.core.members import Members
from pdproxy.core.record import EngineReport


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        role, host, port, tls: what it is; the address as typed first.
        slot: its row on the load board.
        serial: unique per registration.
        state: where it is in its life.
        source: who asked for it.
        since_s: since when it is in that state, on the machine's monotonic clock.
        capacity_tokens: tokens its KV cache holds, if known.
        engine: what the engine says of itself; None if it has said nothing.
        is_cut: its time for draining is over.
        is_dead: it is known to serve nobody.
        is_on_trial: it was ejected, and no request has gone well since.
        ramp_s: when its slow start began, None if it is over.
        is_blemished: it has failed since its last success, so that a success is worth telling.
    """

    role: Role
    host: str
    port: int
    tls: bool
    slot: int
    serial: int
    state: State
    source: Source
    since_s: float
    capacity_tokens: int | None
    engine: EngineReport | None
    is_cut: bool
    is_dead: bool
    is_on_trial: bool
    ramp_s: float | None
    is_blemished: bool


class Snapshot(msgspec.Struct, frozen=True):
    """All instances but those gone, in order of registration, and how often they have changed."""

    version: int
    instances: tuple[InstanceState, ...]


def take(members: Members) -> tuple[InstanceState, ...]:
    """Return the states of all instances but those gone."""
    return tuple(_state_of(member) for role in Role for member in members.of_role(role))


class Replica:
    """A fleet's members that follow snapshots.

    Args:
        members: empty yet; from now on only changed here.
        open_slot: called with each slot that an instance brings, before it can be charged.
    """

    def __init__(self, members: Members, open_slot: Callable[[int], None]) -> None:
        members.is_replica = True
        self._members = members
        self._open_slot = open_slot
        self._version = -1
        self._blemished: frozenset[int] = frozenset()

    def apply(self, snapshot: Snapshot) -> list[Instance]:
        """Take over all states; return the instances that are gone by that."""
        if snapshot.version <= self._version:
            return []
        self._version = snapshot.version
        known = {m.instance.serial: m for role in Role for m in self._members.of_role(role)}
        now_there = {state.serial for state in snapshot.instances}
        gone = [member for serial, member in known.items() if serial not in now_there]
        for member in gone:
            self._members.move(member, State.GONE)
        for state in snapshot.instances:
            self._follow(known.get(state.serial), state)
        for role in Role:
            self._members.refresh(role)
        self._blemished = frozenset(s.serial for s in snapshot.instances if s.is_blemished)
        return [member.instance for member in gone]

    def is_blemished(self, instance: Instance) -> bool:
        """Whether it has failed since its last success, as far as was told."""
        return instance.serial in self._blemished

    def _follow(self, member: Member | None, state: InstanceState) -> None:
        if member is None:
            self._open_slot(state.slot)
            endpoint = Endpoint(state.host, state.port, state.tls)
            instance = Instance(state.role, endpoint, state.slot, state.serial)
            member = self._members.adopt(instance, state.source, state.state, state.since_s)
        self._members.assume(member, state.state, state.since_s)
        member.capacity_tokens = state.capacity_tokens
        member.engine = state.engine
        member.health.is_dead = state.is_dead
        member.health.is_on_trial = state.is_on_trial
        if state.is_cut:
            self._members.cut(member)
        self._members.start_slowly(member, state.ramp_s)


def _state_of(member: Member) -> InstanceState:
    instance = member.instance
    endpoint = instance.endpoint
    return InstanceState(
        role=instance.role,
        host=endpoint.host,
        port=endpoint.port,
        tls=endpoint.tls,
        slot=instance.slot,
        serial=instance.serial,
        state=member.state,
        source=member.source,
        since_s=member.since_s,
        capacity_tokens=member.capacity_tokens,
        engine=member.engine,
        is_cut=member.is_cut,
        is_dead=member.health.is_dead,
        is_on_trial=member.health.is_on_trial,
        ramp_s=member.ramp.start_s if member.ramp is not None else None,
        is_blemished=member.health.is_blemished,
    )
