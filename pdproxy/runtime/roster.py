"""Owns who is an instance: the configuration's, those added by calls, and how each leaves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

import msgspec

from pdproxy.core.departed import Departed
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Instance, Role, Source, State
from pdproxy.core.member import Member
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.core.wording import counted
from pdproxy.runtime.watch import RosterRules, Watch
from pdproxy.tasks import spawn
from pdproxy.upstream.prober import Prober

logger = logging.getLogger(__name__)

FILE_GROUP = "configuration"  # flags, environment and file
LESSONS_INTERVAL_S = 10.0  # far below the time for which a lesson is believed


class FleetRoster:
    """The one writer of a fleet's states."""

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        rules: RosterRules,
        rng: random.Random,
        on_gone: Callable[[Endpoint], None],
        clock: Callable[[], float],
    ) -> None:
        """Make a roster; `on_gone` is told where each instance was that has left the fleet."""
        self._fleet = fleet
        self.watch = Watch(fleet, prober, rules, rng)
        self._on_gone = on_gone
        self._forgetting: asyncio.Task[None] | None = None
        self._panicking: set[Role] = set()
        self._served: set[Role] = set()  # roles of which somebody could serve
        self._timers: dict[Instance, asyncio.TimerHandle] = {}
        self._departed = Departed(clock)
        # Who is wanted by the configuration and by each name.
        self._groups: dict[tuple[Role, str], tuple[Endpoint, ...]] = {}
        fleet.members.on_move(self._moved)

    async def start(self, configured: Iterable[tuple[Role, Endpoint]], wait_s: float) -> None:
        """Register the configured instances and probe them once, for at most `wait_s` seconds.

        Engines that are up already then serve from the first request on.
        """
        configured = tuple(configured)
        instances = [self._fleet.add(role, endpoint)[0] for role, endpoint in configured]
        for role in Role:
            self._groups[role, FILE_GROUP] = tuple(e for r, e in configured if r is role)
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
        for timer in self._timers.values():
            timer.cancel()
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)

    async def add(self, role: Role, endpoint: Endpoint) -> Change:
        """Let an engine join once it answers; one that is draining takes requests again."""
        return self._register(role, endpoint, Source.CALL)

    async def remove(self, role: Role, endpoint: Endpoint) -> Change:
        """Take an instance out of service; its running requests end as usual."""
        return await self.drain(role, endpoint, None)

    async def drain(self, role: Role, endpoint: Endpoint, deadline_s: float | None) -> Change:
        """Do as `remove` does; what still runs after `deadline_s` is cut."""
        member = self._fleet.members.find(role, endpoint)
        if member is None:
            return Change.UNKNOWN
        instance = member.instance
        is_new = member.state is State.JOINING
        self._fleet.set_state(instance, State.GONE if is_new else State.DRAINING)
        self._stop_timer(instance)
        if member.state is State.GONE:
            return Change.GONE
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._timers[instance] = loop.call_later(deadline_s, self._cut, member)
        return Change.DRAINING

    async def undrain(self, role: Role, endpoint: Endpoint) -> Change:
        """Let a draining instance take requests again; one that has drained joins again."""
        departed = self._departed.find(role, endpoint)
        if self._fleet.find(role, endpoint) is None and departed is None:
            return Change.UNKNOWN
        return self._register(role, endpoint, departed.source if departed else Source.CALL)

    async def follow(
        self, role: Role, group: str, endpoints: Iterable[Endpoint], source: Source
    ) -> int:
        """Let what is new in a group join, and drain what it no longer has.

        Whoever another group has as well, or a call has added, stays. What is in the group
        already is left as it is, drained by a call or not.

        Returns:
            How many instances have changed.
        """
        wanted = {endpoint.key: endpoint for endpoint in endpoints}
        before = {endpoint.key: endpoint for endpoint in self._groups.get((role, group), ())}
        self._groups[role, group] = tuple(wanted.values())
        changes = 0
        for key in wanted.keys() - before.keys():
            was = self._fleet.find(role, wanted[key])
            changes += self._register(role, wanted[key], source) is not Change.UNCHANGED
            logger.info("%s %s: %s is new%s", group, role, wanted[key], " here" if was else "")
        others = {e.key for (r, _), all_of in self._groups.items() if r is role for e in all_of}
        for key in before.keys() - wanted.keys() - others:
            member = self._fleet.members.find(role, before[key])
            if member is not None and member.source is not Source.CALL:
                logger.info("%s %s: %s is no longer there", group, role, before[key])
                await self.drain(role, before[key], None)
                changes += 1
        return changes

    async def describe(self) -> list[InstanceRecord]:
        """Return all instances, prefillers first, then those that have gone of late."""
        members = [member for role in Role for member in self._fleet.members.of_role(role)]
        return [*map(self._record, members), *self._departed.records()]

    def _record(self, member: Member) -> InstanceRecord:
        record, timer = self._fleet.record(member), self._timers.get(member.instance)
        if timer is None:
            return record
        left_s = timer.when() - asyncio.get_running_loop().time()
        return msgspec.structs.replace(record, deadline_left_s=max(0.0, left_s))

    def _register(self, role: Role, endpoint: Endpoint, source: Source) -> Change:
        known = self._fleet.members.find(role, endpoint)
        was = known.state if known is not None else State.GONE
        instance, is_new = self._fleet.add(role, endpoint, source=source)
        if is_new:
            logger.info("%s %s is waited for", role, instance.label)
            self._departed.forget(role, endpoint)
            self.watch.begin(instance)
            return Change.WAITING
        self._stop_timer(instance)
        return Change.RESTORED if was is State.DRAINING else Change.UNCHANGED

    def _cut(self, member: Member) -> None:
        instance = member.instance
        held = counted(self._fleet.load(instance).requests, "request")
        text = "%s %s has not drained in time, which cuts %s"
        logger.warning(text, instance.role, instance.label, held)
        self._fleet.members.cut(member)

    def _stop_timer(self, instance: Instance) -> None:
        if (timer := self._timers.pop(instance, None)) is not None:
            timer.cancel()

    def _moved(self, member: Member, was: State) -> None:
        """Log each change of a state, and what follows from it."""
        instance, state = member.instance, member.state
        if state is State.EJECTED:
            logger.warning(
                "%s %s is ejected (%s so far): %s",
                instance.role,
                instance.label,
                counted(member.health.ejections, "ejection"),
                member.health.last_error or "its requests fail",
            )
        else:
            logger.info("%s %s is %s, was %s", instance.role, instance.label, state, was)
        self._note_ready(instance.role)
        self._note_panic(instance.role)
        if state is State.GONE:
            self.watch.end(instance)
            self._stop_timer(instance)
            self._departed.note(self._fleet.record(member))
            self._on_gone(instance.endpoint)

    def _note_ready(self, role: Role) -> None:
        """Log that nobody of a role is left, and that somebody is back."""
        is_served = self._fleet.ready_count(role) > 0
        if not is_served and role in self._served:
            self._served.discard(role)
            logger.warning("no %s instance is left that can serve", role)
        elif is_served and role not in self._served:
            self._served.add(role)
            logger.info("there is a %s instance that can serve", role)

    def _note_panic(self, role: Role) -> None:
        is_alive = self._fleet.ready_count(role) > 0
        is_panicking = is_alive and self._fleet.members.is_panicking(role)
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
