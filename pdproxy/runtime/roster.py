"""Owns who is an instance: the configuration's, those added by calls, and how each leaves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Instance, Role, Source, State
from pdproxy.core.members import Member
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.runtime.watch import RosterRules, Watch
from pdproxy.tasks import spawn
from pdproxy.upstream.prober import Prober

logger = logging.getLogger(__name__)

LESSONS_INTERVAL_S = 10.0  # far below the time for which a lesson is believed


class FleetRoster:
    """The one writer of a fleet's states."""

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        rules: RosterRules,
        rng: random.Random,
        on_gone: Callable[[Instance], None],
    ) -> None:
        """Make a roster; `on_gone` is told of each instance that has left the fleet."""
        self._fleet = fleet
        self.watch = Watch(fleet, prober, rules, rng)
        self._on_gone = on_gone
        self._forgetting: asyncio.Task[None] | None = None
        self._panicking: set[Role] = set()
        fleet.members.on_move(self._moved)

    async def start(self, configured: Iterable[tuple[Role, Endpoint]], wait_s: float) -> None:
        """Register the configured instances and probe them once, for at most `wait_s` seconds.

        Engines that are up already then serve from the first request on.
        """
        instances = [self._fleet.add(role, endpoint)[0] for role, endpoint in configured]
        self._forgetting = spawn(self._forget_lessons(), name="lessons")
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.gather(*(self.watch.probe(i, is_warm=True) for i in instances))
        except TimeoutError:
            logger.info("some engines do not answer yet; each joins as soon as it does")
        for instance in instances:
            self.watch.begin(instance)

    async def stop(self) -> None:
        """End all tasks."""
        await self.watch.stop()
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)

    async def add(self, role: Role, endpoint: Endpoint) -> Change:
        """Let an engine join once it answers; one that is draining takes requests again."""
        known = self._fleet.find(role, endpoint)
        was = self._fleet.state(known) if known is not None else State.GONE
        instance, is_new = self._fleet.add(role, endpoint, source=Source.CALL)
        if is_new:
            logger.info("%s %s is waited for", role, instance.label)
            self.watch.begin(instance)
            return Change.WAITING
        return Change.RESTORED if was is State.DRAINING else Change.UNCHANGED

    async def remove(self, role: Role, endpoint: Endpoint) -> Change:
        """Take an instance out of service; its running requests end as usual."""
        instance = self._fleet.find(role, endpoint)
        if instance is None:
            return Change.UNKNOWN
        is_new = self._fleet.state(instance) is State.JOINING
        self._fleet.set_state(instance, State.GONE if is_new else State.DRAINING)
        is_gone = self._fleet.state(instance) is State.GONE
        return Change.GONE if is_gone else Change.DRAINING

    async def drain(self, role: Role, endpoint: Endpoint, deadline_s: float | None) -> Change:
        """Do as `remove` does; `deadline_s` has no effect yet."""
        return await self.remove(role, endpoint)

    async def undrain(self, role: Role, endpoint: Endpoint) -> Change:
        """Let a draining instance take requests again."""
        if self._fleet.find(role, endpoint) is None:
            return Change.UNKNOWN
        return await self.add(role, endpoint)

    async def describe(self) -> list[InstanceRecord]:
        """Return all instances, prefillers first, in order of registration."""
        return [self._record(i) for role in Role for i in self._fleet.instances(role)]

    def _record(self, instance: Instance) -> InstanceRecord:
        fleet = self._fleet
        load = fleet.load(instance)
        return InstanceRecord(
            role=instance.role,
            instance=instance.label,
            state=fleet.state(instance),
            state_age_s=fleet.state_age_s(instance),
            requests=load.requests,
            compute_tokens=load.compute_tokens,
            kv_tokens=load.kv_tokens,
            capacity_tokens=fleet.capacity_tokens(instance),
        )

    def _moved(self, member: Member, was: State) -> None:
        """Log each change of a state, and what follows from it."""
        instance, state = member.instance, member.state
        if state is State.EJECTED:
            logger.warning(
                "%s %s is ejected, for the %s. time: %s",
                instance.role,
                instance.label,
                member.health.ejections,
                member.health.last_error or "its requests fail",
            )
        else:
            logger.info("%s %s is %s, was %s", instance.role, instance.label, state, was)
        self._note_panic(instance.role)
        if state is State.GONE:
            self.watch.end(instance)
            self._on_gone(instance)

    def _note_panic(self, role: Role) -> None:
        is_panicking = self._fleet.members.is_panicking(role)
        if is_panicking and role not in self._panicking:
            self._panicking.add(role)
            logger.warning(
                "more than half of the %s instances are ejected: those that may be alive get "
                "requests again; look for a cause that they share",
                role,
            )
        elif not is_panicking:
            self._panicking.discard(role)

    async def _forget_lessons(self) -> None:
        while True:
            await asyncio.sleep(LESSONS_INTERVAL_S)
            self._fleet.judge.forget_old_lessons()
