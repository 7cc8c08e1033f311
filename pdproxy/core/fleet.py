"""The instances the proxy knows, and how a request gets one of them.

Rules: an instance that is joining, draining or gone gets no new lease, an ejected one only when
more than half of its role is ejected. Choosing and charging are one synchronous step, so no two
requests see the same idle instance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from pdproxy.core.health import HealthRules
from pdproxy.core.instance import Endpoint, Instance, Role, Source, State
from pdproxy.core.judge import Judge, Reports
from pdproxy.core.lease import Lease
from pdproxy.core.load import Board, Cost, Load
from pdproxy.core.member import Member
from pdproxy.core.members import Members
from pdproxy.core.policy import Candidate, Policy, Reason, reason_of
from pdproxy.core.record import NO_REPORT, EngineReport, InstanceRecord
from pdproxy.errors import NoInstance

__all__ = ["Fleet", "Lease"]


class Fleet:
    """All instances of both roles, their states and health.

    Args:
        board: where load is kept; the fleet opens and closes the slots.
        policies: one per role, not shared between roles.
        clock: a monotonic clock, in seconds.
        health: when failures eject.
        reports: who is told what requests learn of instances; by default what they tell changes
            the states here.

    Attributes:
        members: who is known, in which state.
        judge: applies what is learned to the states here.
    """

    def __init__(
        self,
        board: Board,
        policies: Mapping[Role, Policy],
        clock: Callable[[], float],
        health: HealthRules | None = None,
        reports: Reports | None = None,
    ) -> None:
        self._board = board
        self._policies = policies
        self._clock = clock
        self.members = Members(board, clock, health)
        self.judge = Judge(self.members, clock)
        self._reports: Reports = reports or self.judge

    # --- who is there

    def add(
        self,
        role: Role,
        endpoint: Endpoint,
        *,
        state: State = State.JOINING,
        source: Source = Source.CONFIGURED,
    ) -> tuple[Instance, bool]:
        """Register an engine, as `Members.add` does; return its instance, and whether it is new."""
        return self.members.add(role, endpoint, state, source)

    def find(self, role: Role, endpoint: Endpoint) -> Instance | None:
        """Return the instance at an address, however spelled, unless it is gone."""
        member = self.members.find(role, endpoint)
        return member.instance if member is not None else None

    def instances(self, role: Role) -> tuple[Instance, ...]:
        """Return all but those gone, in order of registration."""
        return tuple(member.instance for member in self.members.of_role(role))

    def records(self) -> list[InstanceRecord]:
        """Return all instances as operators are told of them, prefillers first."""
        return [self.record(m) for role in Role for m in self.members.of_role(role)]

    def record(self, member: Member) -> InstanceRecord:
        """Return one instance as operators are told of it."""
        now_s = self._clock()
        load, health = self._board.load(member.slot), member.health
        has_failed = bool(health.last_error)
        return InstanceRecord(
            role=member.instance.role,
            instance=member.instance.label,
            source=member.source,
            state=member.state,
            state_age_s=now_s - member.since_s,
            requests=load.requests,
            compute_tokens=load.compute_tokens,
            kv_tokens=load.kv_tokens,
            capacity_tokens=member.capacity_tokens,
            ramp=member.ramp.share(now_s) if member.ramp is not None else 1.0,
            ejections=health.ejections,
            is_dead=health.is_dead,
            last_error=health.last_error,
            last_error_age_s=now_s - health.last_error_s if has_failed else None,
            engine=member.engine,
        )

    def is_pending(self, instance: Instance) -> bool:
        """Whether it was added by a call and has not answered a probe yet."""
        member = self.members.get(instance)
        return member is not None and member.is_pending

    def state(self, instance: Instance) -> State:
        """Return its state; GONE for one that was forgotten."""
        member = self.members.get(instance)
        return member.state if member is not None else State.GONE

    def is_on_trial(self, instance: Instance) -> bool:
        """Whether it was ejected, and no request has gone well on it since."""
        member = self.members.get(instance)
        return member is not None and member.health.is_on_trial

    def state_age_s(self, instance: Instance) -> float:
        """Return for how long it has been in its state; 0 for one that was forgotten."""
        member = self.members.get(instance)
        return self._clock() - member.since_s if member is not None else 0.0

    def counts(self, role: Role) -> Mapping[State, int]:
        """Return how many instances are in each state; those gone are not counted."""
        return self.members.counts(role)

    def set_state(self, instance: Instance, state: State) -> None:
        """Change the state; no effect if it is in that state already.

        One that is set to DRAINING and holds no lease is GONE at once. One that is set to GONE
        takes no lease with it: those that run are released as usual.

        Raises:
            ValueError: `TRANSITIONS` does not allow it.
        """
        self.members.set_state(instance, state)

    def admit(self, instance: Instance) -> bool:
        """Make it active after a good probe, as `Judge.admit` does."""
        return self.judge.admit(instance)

    # --- what requests learn

    def report_success(self, instance: Instance) -> None:
        """Note that a leg went well on it."""
        self._reports.leg_succeeded(instance)

    def report_failure(self, instance: Instance, *, certain: bool, why: str = "") -> bool:
        """Note that a leg failed by its fault, as `Reports.leg_failed` says."""
        return self._reports.leg_failed(instance, certain=certain, why=why)

    def note_exhausted(self, instance: Instance) -> None:
        """Learn from a decoder that ran out of KV cache: it holds less than it was given."""
        self._reports.ran_out(instance, self.load(instance).kv_tokens)

    # --- load

    def policy(self, role: Role) -> str:
        """Return the name of the policy that chooses for a role."""
        return self._policies[role].name

    def available(self, role: Role, avoid: Collection[Instance] = ()) -> list[Instance]:
        """Return who may get a lease now, as `Members.available` says.

        Those in `avoid` are left out while another one is available.
        """
        return [member.instance for member in self._choosable(role, avoid)]

    def ready_count(self, role: Role) -> int:
        """Return how many can be expected to serve, as `Members.ready_count` says."""
        return self.members.ready_count(role)

    def lease(
        self,
        role: Role,
        cost: Cost,
        *,
        avoid: Collection[Instance] = (),
        why_avoided: Reason = Reason.OTHERS_FAILED,
    ) -> Lease:
        """Choose an instance and charge it; the caller owns the lease and must close it.

        Raises:
            NoInstance: nothing is available.
        """
        members = self._choosable(role, avoid) if avoid else self.members.available(role)
        if not members:
            raise NoInstance(f"no {role} instance is available")
        is_ejected = self.members.is_panicking(role)
        available = len(self.members.available(role))
        why = reason_of(len(members), available, is_ejected=is_ejected, left_out=why_avoided)
        members = self.members.offered(role, members)
        if len(members) == 1:
            return Lease(self.members, self._board, members[0], cost, why)
        load = self._board.load
        candidates = [
            Candidate(member.instance, load(member.slot), member.capacity_tokens)
            for member in members
        ]
        instance = self._policies[role].pick(candidates, cost).instance
        member = self.members.get(instance)
        assert member is not None, "a candidate is a member"
        return Lease(self.members, self._board, member, cost, why)

    def candidates(self, role: Role) -> list[Candidate]:
        """Return who may get a lease now, with what each holds and can hold."""
        load = self._board.load
        return [
            Candidate(member.instance, load(member.slot), member.capacity_tokens)
            for member in self.members.available(role)
        ]

    def knows_capacity(self, role: Role) -> bool:
        """Whether it is known of one that is available how much KV cache it holds."""
        return any(m.capacity_tokens is not None for m in self.members.available(role))

    def load(self, instance: Instance) -> Load:
        """Return what it holds now; nothing for one that was forgotten."""
        known = self.members.get(instance) is not None
        return self._board.load(instance.slot) if known else Load()

    def capacity_tokens(self, instance: Instance) -> int | None:
        """Return how many tokens its KV cache holds, None if unknown."""
        member = self.members.get(instance)
        return member.capacity_tokens if member is not None else None

    def engine_report(self, instance: Instance) -> EngineReport:
        """Return what the engine says of itself now, as far as it says anything."""
        member = self.members.get(instance)
        return member.engine or NO_REPORT if member is not None else NO_REPORT

    def set_capacity(self, instance: Instance, tokens: int | None) -> None:
        """Note how many tokens its KV cache holds, as its engine reports; None: unknown."""
        self.judge.engine_reported(instance, EngineReport(capacity_tokens=tokens))

    def _choosable(self, role: Role, avoid: Collection[Instance]) -> Sequence[Member]:
        members = self.members.available(role)
        return [member for member in members if member.instance not in avoid] or members
