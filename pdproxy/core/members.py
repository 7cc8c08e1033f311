"""Who the proxy knows: registration, states, and who may get a lease now.

Rules: an instance that is joining, draining or gone gets no new lease. One that is set to DRAINING
is GONE as soon as it holds no lease, and its slot of the load board is given back then, not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdproxy.core.health import Health, HealthRules
from pdproxy.core.instance import TRANSITIONS, Endpoint, Instance, Role, Source, State
from pdproxy.core.load import NO_LOAD, Board
from pdproxy.core.member import Member
from pdproxy.core.ramp import Ramp


class Members:
    """All instances of both roles.

    Args:
        board: where load is kept; slots are opened and closed here.
        clock: a monotonic clock, in seconds.
        health: when failures eject.

    Attributes:
        is_replica: the states are another process's, and are changed by `core.snapshot` only.
    """

    def __init__(
        self, board: Board, clock: Callable[[], float], health: HealthRules | None
    ) -> None:
        self._board = board
        self._clock = clock
        self._health = health or HealthRules()
        self._serial = 0
        self.is_replica = False
        self._on_move: Callable[[Member, State], None] = lambda _member, _was: None
        # Those with a state other than GONE, in order of registration.
        self._known: dict[Role, dict[tuple[str, int], Member]] = {role: {} for role in Role}
        # These, and those gone whose last leases still run.
        self._members: dict[Instance, Member] = {}
        # Who may get a lease now, kept up to date so that leasing does not filter.
        self._available: dict[Role, tuple[Member, ...]] = dict.fromkeys(Role, ())
        # How many of these are not known to be dead.
        self._ready: dict[Role, int] = dict.fromkeys(Role, 0)
        self._panicking: set[Role] = set()
        # How many of those start slowly.
        self._ramps: dict[Role, int] = dict.fromkeys(Role, 0)

    def add(
        self, role: Role, endpoint: Endpoint, state: State, source: Source
    ) -> tuple[Instance, bool]:
        """Register an engine; return its instance, and whether it is a new one.

        One that is known already stays as it is, under the name typed first. One that is draining
        is active again, with the load it has.
        """
        member = self._known[role].get(endpoint.key)
        if member is not None:
            if member.state is State.DRAINING:
                self.move(member, State.ACTIVE)
            return member.instance, False
        self._serial += 1
        instance = Instance(role, endpoint, self._board.open(), self._serial)
        member = Member(instance, source, state, Health(self._health), self._clock())
        self._known[role][endpoint.key] = self._members[instance] = member
        self.refresh(role)
        return instance, True

    def adopt(self, instance: Instance, source: Source, state: State, since_s: float) -> Member:
        """Register what another process has registered; its slot is open already."""
        member = Member(instance, source, state, Health(self._health), since_s)
        self._known[instance.role][instance.endpoint.key] = self._members[instance] = member
        self.refresh(instance.role)
        return member

    def assume(self, member: Member, state: State, since_s: float) -> None:
        """Take over the state that another process has set."""
        if state is not member.state:
            self.move(member, state)
        member.since_s = since_s

    def on_move(self, callback: Callable[[Member, State], None]) -> None:
        """Call `callback` with each member whose state has changed, and the state before."""
        self._on_move = callback

    def find(self, role: Role, endpoint: Endpoint) -> Member | None:
        """Return the one at an address, however spelled, unless it is gone."""
        return self._known[role].get(endpoint.key)

    def get(self, instance: Instance) -> Member | None:
        """Return what is kept of it; None for one that was forgotten."""
        return self._members.get(instance)

    def of_role(self, role: Role) -> Iterator[Member]:
        """Return all but those gone, in order of registration."""
        return iter(self._known[role].values())

    def all(self) -> Iterator[Member]:
        """Return all, those included that are gone and whose last leases still run."""
        return iter(self._members.values())

    def available(self, role: Role) -> tuple[Member, ...]:
        """Return who may get a lease now.

        These are the active ones. When more than half of a role is ejected, the cause is more
        likely something that they share than each of them, and the rest would not carry the load:
        then those ejected serve as well, but for those known to be dead; and when these are all
        that is left, they too.
        """
        return self._available[role]

    def ready_count(self, role: Role) -> int:
        """Return how many of those available can be expected to serve.

        When only dead ones are left, requests try them, but there is none.
        """
        return self._ready[role]

    def is_panicking(self, role: Role) -> bool:
        """Whether ejected instances serve, for lack of others."""
        return role in self._panicking

    def offered(self, role: Role, members: Sequence[Member]) -> Sequence[Member]:
        """Return those of `members` that take part in the next choice: of a slow start, some."""
        if not self._ramps[role]:
            return members
        now_s = self._clock()
        chosen = []
        for member in members:
            ramp = member.ramp
            if ramp is None:
                chosen.append(member)
                continue
            share = ramp.share(now_s)
            if share >= 1:
                member.ramp = None
                self._ramps[role] -= 1
            if share >= 1 or ramp.takes_part(share, len(members)):
                chosen.append(member)
        return chosen or members

    def counts(self, role: Role) -> Mapping[State, int]:
        """Return how many instances are in each state; those gone are not counted."""
        found = Counter(member.state for member in self._known[role].values())
        return {state: found[state] for state in State if state is not State.GONE}

    def set_state(self, instance: Instance, state: State) -> None:
        """Change the state, as `Fleet.set_state` says.

        Raises:
            ValueError: `TRANSITIONS` does not allow it.
        """
        member = self._members.get(instance)
        current = member.state if member is not None else State.GONE
        if state is current:
            return
        if member is None or state not in TRANSITIONS[current]:
            raise ValueError(f"{instance.label} cannot go from {current} to {state}")
        self.move(member, state)

    def move(self, member: Member, state: State) -> None:
        """Change the state of one; the caller knows that it is allowed."""
        if state is State.DRAINING and not self.is_replica and self._is_idle(member):
            state = State.GONE
        was, member.state = member.state, state
        member.since_s = self._clock()
        member.is_cut = False
        if state is not State.ACTIVE:
            member.ramp = None
        role = member.instance.role
        if state is State.GONE:
            del self._known[role][member.instance.endpoint.key]
            self._forget_if_idle(member)
        self.refresh(role)
        self._on_move(member, was)

    def admit(self, member: Member, *, is_warm: bool = False) -> None:
        """Make it active; unless it is warm, it starts slowly."""
        if not is_warm:
            self.start_slowly(member, self._clock())
        self.move(member, State.ACTIVE)

    def start_slowly(self, member: Member, start_s: float | None) -> None:
        """Let a slow start begin at a moment, or end it; `refresh` is due after."""
        if start_s is None or not self._health.slow_start_s:
            member.ramp = None
        elif member.ramp is None or member.ramp.start_s != start_s:
            member.ramp = Ramp(start_s, self._health.slow_start_s)

    def cut(self, member: Member) -> None:
        """End the exchanges of one that is draining: they are made elsewhere, or fail."""
        if member.state is State.DRAINING and not member.is_cut:
            member.is_cut = True
            for lease in tuple(member.live):
                lease.cut()

    def last_lease_closed(self, member: Member) -> None:
        """Let one leave that only waited for its last lease."""
        if member.state is State.DRAINING and not self.is_replica:
            self._settle_one(member)
        else:
            self._forget_if_idle(member)

    def settle(self) -> None:
        """Let all leave that hold no lease in any process any more."""
        for member in tuple(self._members.values()):
            self._settle_one(member)

    def _settle_one(self, member: Member) -> None:
        if member.state is State.DRAINING and self._is_idle(member):
            self.move(member, State.GONE)
        elif member.state is State.GONE:
            self._forget_if_idle(member)

    def _is_idle(self, member: Member) -> bool:
        """Whether no lease is left; in a replica, none of this process."""
        if member.leases:
            return False
        return self.is_replica or self._board.load(member.slot) == NO_LOAD

    def _forget_if_idle(self, member: Member) -> None:
        """Forget one that is gone, and give its slot back, once no lease is left."""
        if member.state is State.GONE and self._is_idle(member):
            del self._members[member.instance]
            self._board.close(member.slot)

    def refresh(self, role: Role) -> None:
        """Find out anew who may get a lease; due after any change of state or of `is_dead`."""
        members = self._known[role].values()
        active = tuple(member for member in members if member.state is State.ACTIVE)
        ejected = tuple(member for member in members if member.state is State.EJECTED)
        chosen = active
        if len(ejected) > len(active):
            chosen += tuple(member for member in ejected if not member.health.is_dead)
        self._available[role] = chosen or ejected
        self._ready[role] = len(chosen)
        if len(self._available[role]) > len(active):
            self._panicking.add(role)
        else:
            self._panicking.discard(role)
        self._ramps[role] = sum(member.ramp is not None for member in chosen)
