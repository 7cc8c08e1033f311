"""What requests and probes learn of an instance, and what follows for its state.

`Reports` is where that enters a fleet. In the process that owns the states it is a `Judge`; a
fleet that only follows another process's states has one that sends the reports there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdproxy.core.engine_metrics import kv_weight
from pdproxy.core.instance import Instance, State
from pdproxy.core.members import Members
from pdproxy.core.record import EngineReport

# Of what a decoder held when it ran out; a little less is what it can hold.
LEARNED_SHARE = 0.9
# For how long that is believed: what else it held, such as prefix caches, has changed since.
LESSON_S = 300.0


class Reports(Protocol):
    """Who is told what requests learn of an instance."""

    def leg_succeeded(self, instance: Instance) -> None:
        """A leg went well on it."""
        ...

    def leg_failed(self, instance: Instance, *, certain: bool, why: str) -> bool:
        """A leg failed by its fault; return whether this has ejected it, as far as is known.

        Args:
            instance: the one that failed.
            certain: it surely does not serve now, such as a refused connection.
            why: in words for an operator; nothing of the request.
        """
        ...

    def ran_out(self, instance: Instance, held_tokens: int) -> None:
        """A decoder ran out of KV cache while it held so many tokens of this proxy."""
        ...


class Judge:
    """Applies reports to the states of the instances that it owns."""

    def __init__(self, members: Members, clock: Callable[[], float]) -> None:
        self._members = members
        self._clock = clock

    def leg_succeeded(self, instance: Instance) -> None:
        """Forgive an active one."""
        member = self._members.get(instance)
        if member is not None and member.state is State.ACTIVE:
            member.health.succeed()

    def leg_failed(self, instance: Instance, *, certain: bool, why: str) -> bool:
        """Count against an active one; return whether this has ejected it."""
        member = self._members.get(instance)
        if member is None or member.state is not State.ACTIVE:
            return False
        if not member.health.fail(self._clock(), certain=certain, why=why):
            return False
        if member.health.is_dead:
            self.engine_silent(instance)
        self._members.move(member, State.EJECTED)
        return True

    def ran_out(self, instance: Instance, held_tokens: int) -> None:
        """Learn from a decoder that ran out of KV cache: it holds less than it was given."""
        member = self._members.get(instance)
        if member is not None and held_tokens:
            member.learned_tokens = int(held_tokens * LEARNED_SHARE)
            member.learned_s = self._clock()
            member.settle_capacity()

    def probe_failed(self, instance: Instance, *, certain: bool, why: str) -> bool:
        """Count a failed probe; return whether it has ejected the instance."""
        member = self._members.get(instance)
        if member is None:
            return False
        was_dead = member.health.is_dead
        is_dead = member.health.probe_failed(self._clock(), certain=certain, why=why)
        if is_dead:
            self.engine_silent(instance)
        if is_dead and member.state is State.ACTIVE:
            member.health.eject_dead(self._clock())
            self._members.move(member, State.EJECTED)
            return True
        if is_dead is not was_dead:
            self._members.refresh(instance.role)
        return False

    def probe_succeeded(self, instance: Instance, *, is_warm: bool = False) -> bool:
        """Note a good probe; return whether the instance has become active by it."""
        member = self._members.get(instance)
        if member is None:
            return False
        was_dead = member.health.is_dead
        member.health.probe_succeeded()
        if was_dead:
            self._members.refresh(instance.role)
        return self.admit(instance, is_warm=is_warm)

    def admit(self, instance: Instance, *, is_warm: bool = False) -> bool:
        """Make it active after a good probe; return whether that changed its state.

        Without effect on one that is neither joining nor ejected, as the operator's removal may
        come while a probe runs, and on one whose ejection is not over.
        """
        member = self._members.get(instance)
        if member is None or member.state not in {State.JOINING, State.EJECTED}:
            return False
        if member.state is State.EJECTED and not member.health.can_return(self._clock()):
            return False
        member.health.probe_succeeded()
        self._members.admit(member, is_warm=is_warm)
        return True

    def engine_reported(
        self, instance: Instance, report: EngineReport, held_tokens: int = 0
    ) -> None:
        """Note what an engine says of itself, while requests hold so many tokens by our count."""
        member = self._members.get(instance)
        if member is not None:
            member.engine = report
            member.kv_weight = kv_weight(report, held_tokens, member.kv_weight)
            member.settle_capacity()

    def engine_silent(self, instance: Instance) -> None:
        """Forget what an engine said of its work; how much its KV cache holds stays."""
        member = self._members.get(instance)
        if member is not None and member.engine is not None:
            member.engine = EngineReport(capacity_tokens=member.engine.capacity_tokens)

    def forget_old_lessons(self) -> None:
        """Take back what was learned from decoders that have long not run out again."""
        latest_s = self._clock() - LESSON_S
        for member in self._members.all():
            if member.learned_s is not None and member.learned_s < latest_s:
                member.learned_tokens = member.learned_s = None
                member.settle_capacity()
