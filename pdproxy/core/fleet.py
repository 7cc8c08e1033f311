"""The instances the proxy knows, and the leases that requests hold on them.

Rules: an instance that is joining, draining or gone gets no new lease, an ejected one only when
its role has no active one. Choosing and charging are one synchronous step, so no two requests see
the same idle instance. A lease is released exactly once, on whatever way its request ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType

from pdproxy.core.health import Health, HealthRules
from pdproxy.core.instance import TRANSITIONS, Endpoint, Instance, Role, State
from pdproxy.core.load import Cost, Load, LoadBoard
from pdproxy.core.policy import Candidate, Policy
from pdproxy.errors import NoInstance

# Of what a decoder held when it ran out; a little less is what it can hold.
LEARNED_SHARE = 0.9
# For how long that is believed: what else it held, such as prefix caches, has changed since.
LESSON_S = 300.0


class _Member:
    """What the fleet keeps of one instance."""

    __slots__ = (
        "capacity_tokens",
        "health",
        "instance",
        "learned_s",
        "leases",
        "since_s",
        "slot",
        "state",
    )

    def __init__(self, instance: Instance, state: State, health: Health, since_s: float) -> None:
        self.instance = instance
        self.slot = instance.slot
        self.state = state
        self.health = health
        self.since_s = since_s
        self.leases = 0  # live ones; a slot may only be given back at zero
        self.capacity_tokens: int | None = None
        self.learned_s: float | None = None  # when that was learned from its running out


class Fleet:
    """All instances of both roles, their states and health.

    Args:
        board: where load is kept; the fleet opens and closes the slots.
        policies: one per role, not shared between roles.
        clock: a monotonic clock, in seconds.
        health: when failures eject.
    """

    def __init__(
        self,
        board: LoadBoard,
        policies: Mapping[Role, Policy],
        clock: Callable[[], float],
        health: HealthRules | None = None,
    ) -> None:
        self._board = board
        self._policies = policies
        self._clock = clock
        self._health = health or HealthRules()
        self._serial = 0
        # Those with a state other than GONE, in order of registration.
        self._known: dict[Role, dict[tuple[str, int], _Member]] = {role: {} for role in Role}
        # These, and those gone whose last leases still run.
        self._members: dict[Instance, _Member] = {}
        # Who may get a lease now, kept up to date so that leasing does not filter.
        self._available: dict[Role, tuple[_Member, ...]] = dict.fromkeys(Role, ())

    # --- membership

    def add(
        self, role: Role, endpoint: Endpoint, *, state: State = State.JOINING
    ) -> tuple[Instance, bool]:
        """Register an engine; return its instance, and whether it is a new one.

        One that is known already stays as it is, under the name typed first. One that is draining
        is active again, with the load it has.
        """
        member = self._known[role].get(endpoint.key)
        if member is not None:
            if member.state is State.DRAINING:
                self._move(member, State.ACTIVE)
            return member.instance, False
        self._serial += 1
        instance = Instance(role, endpoint, self._board.open(), self._serial)
        member = _Member(instance, state, Health(self._health), self._clock())
        self._known[role][endpoint.key] = self._members[instance] = member
        self._refresh(role)
        return instance, True

    def find(self, role: Role, endpoint: Endpoint) -> Instance | None:
        """Return the instance at an address, however spelled, unless it is gone."""
        member = self._known[role].get(endpoint.key)
        return member.instance if member is not None else None

    def instances(self, role: Role) -> tuple[Instance, ...]:
        """Return all but those gone, in order of registration."""
        return tuple(member.instance for member in self._known[role].values())

    def state(self, instance: Instance) -> State:
        """Return its state; GONE for one that was forgotten."""
        member = self._members.get(instance)
        return member.state if member is not None else State.GONE

    def state_age_s(self, instance: Instance) -> float:
        """Return for how long it has been in its state; 0 for one that was forgotten."""
        member = self._members.get(instance)
        return self._clock() - member.since_s if member is not None else 0.0

    def counts(self, role: Role) -> Mapping[State, int]:
        """Return how many instances are in each state; those gone are not counted."""
        found = Counter(member.state for member in self._known[role].values())
        return {state: found[state] for state in State if state is not State.GONE}

    def set_state(self, instance: Instance, state: State) -> None:
        """Change the state; no effect if it is in that state already.

        One that is set to DRAINING and holds no lease is GONE at once. One that is set to GONE
        takes no lease with it: those that run are released as usual.

        Raises:
            ValueError: `TRANSITIONS` does not allow it.
        """
        current = self.state(instance)
        if state is current:
            return
        if state not in TRANSITIONS[current]:
            raise ValueError(f"{instance.label} cannot go from {current} to {state}")
        self._move(self._members[instance], state)

    def admit(self, instance: Instance) -> bool:
        """Make it active after a good probe; return whether that changed its state.

        Without effect on one that is neither joining nor ejected, as the operator's removal may
        come while a probe runs, and on one whose ejection is not over.
        """
        member = self._members.get(instance)
        if member is None or member.state not in {State.JOINING, State.EJECTED}:
            return False
        if member.state is State.EJECTED and not member.health.can_return(self._clock()):
            return False
        self._move(member, State.ACTIVE)
        return True

    # --- health

    def report_success(self, instance: Instance) -> None:
        """Note that a leg went well on it."""
        member = self._members.get(instance)
        if member is not None and member.state is State.ACTIVE:
            member.health.succeed()

    def report_failure(self, instance: Instance, *, certain: bool) -> bool:
        """Note that a leg failed by its fault; return whether this has ejected it.

        Args:
            instance: the one that failed.
            certain: it surely does not serve now, such as a refused connection.
        """
        member = self._members.get(instance)
        if member is None or member.state is not State.ACTIVE:
            return False
        if not member.health.fail(self._clock(), certain=certain):
            return False
        self._move(member, State.EJECTED)
        return True

    # --- load

    def available(self, role: Role, avoid: Collection[Instance] = ()) -> list[Instance]:
        """Return who may get a lease now: the active ones, if there are none the ejected ones.

        Those in `avoid` are left out while another one is available.
        """
        return [member.instance for member in self._choosable(role, avoid)]

    def lease(self, role: Role, cost: Cost, *, avoid: Collection[Instance] = ()) -> Lease:
        """Choose an instance and charge it; the caller owns the lease and must close it.

        Raises:
            NoInstance: nothing is available.
        """
        members = self._choosable(role, avoid) if avoid else self._available[role]
        if not members:
            raise NoInstance(f"no {role} instance is available")
        if len(members) == 1:
            return Lease(self, self._board, members[0], cost)
        load = self._board.load
        candidates = [
            Candidate(member.instance, load(member.slot), member.capacity_tokens)
            for member in members
        ]
        instance = self._policies[role].pick(candidates, cost).instance
        return Lease(self, self._board, self._members[instance], cost)

    def load(self, instance: Instance) -> Load:
        """Return what it holds now; nothing for one that was forgotten."""
        return self._board.load(instance.slot) if instance in self._members else Load()

    def capacity_tokens(self, instance: Instance) -> int | None:
        """Return how many tokens its KV cache holds, None if unknown."""
        member = self._members.get(instance)
        return member.capacity_tokens if member is not None else None

    def set_capacity(self, instance: Instance, tokens: int | None) -> None:
        """Note how many tokens its KV cache holds, as scraped or learned; None: unknown."""
        member = self._members.get(instance)
        if member is not None:
            member.capacity_tokens = tokens

    def note_exhausted(self, instance: Instance) -> None:
        """Learn from a decoder that ran out of KV cache: it holds less than it was given."""
        held = self.load(instance).kv_tokens
        member = self._members.get(instance)
        if member is not None and held:
            member.capacity_tokens = int(held * LEARNED_SHARE)
            member.learned_s = self._clock()

    def forget_old_lessons(self) -> None:
        """Take back what was learned from decoders that have long not run out again."""
        latest_s = self._clock() - LESSON_S
        for member in self._members.values():
            if member.learned_s is not None and member.learned_s < latest_s:
                member.capacity_tokens = member.learned_s = None

    # --- within this module

    def _choosable(self, role: Role, avoid: Collection[Instance]) -> Sequence[_Member]:
        members = self._available[role]
        return [member for member in members if member.instance not in avoid] or members

    def _move(self, member: _Member, state: State) -> None:
        if state is State.DRAINING and not member.leases:
            state = State.GONE
        member.state = state
        member.since_s = self._clock()
        role = member.instance.role
        if state is State.GONE:
            del self._known[role][member.instance.endpoint.key]
            self._settle(member)
        self._refresh(role)

    def _settle(self, member: _Member) -> None:
        """Forget one that is gone, and give its slot back, once no lease is left."""
        if member.state is State.GONE and not member.leases:
            del self._members[member.instance]
            self._board.close(member.instance.slot)

    def _refresh(self, role: Role) -> None:
        members = self._known[role].values()
        self._available[role] = tuple(
            member for member in members if member.state is State.ACTIVE
        ) or tuple(member for member in members if member.state is State.EJECTED)

    def _lease_closed(self, member: _Member) -> None:
        if member.state is State.DRAINING:
            self._move(member, State.GONE)
        else:
            self._settle(member)


class Lease:
    """The right to use one instance, and the charge for it; made by `Fleet.lease` only.

    Use it as a context manager, or close it on every way out.
    """

    __slots__ = ("_board", "_cost", "_fleet", "_member", "instance")

    def __init__(self, fleet: Fleet, board: LoadBoard, member: _Member, cost: Cost) -> None:
        self.instance = member.instance
        self._fleet = fleet
        self._board = board
        self._member = member
        self._cost: Cost | None = cost
        board.charge(member.instance.slot, cost)
        member.leases += 1

    @property
    def cost(self) -> Cost | None:
        """What is charged now; None once closed."""
        return self._cost

    def recharge(self, cost: Cost) -> None:
        """Charge `cost` in place of what is charged; a closed lease stays closed."""
        charged = self._cost
        if charged is None:
            return
        # In this order no reader of the board sees less than what is held.
        self._board.charge(self.instance.slot, cost)
        self._board.release(self.instance.slot, charged)
        self._cost = cost

    def close(self) -> None:
        """Release what is charged; closing again has no effect."""
        charged = self._cost
        if charged is None:
            return
        self._cost = None
        self._board.release(self.instance.slot, charged)
        self._member.leases -= 1
        if not self._member.leases:
            self._fleet._lease_closed(self._member)  # noqa: SLF001 # one unit, two classes

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
