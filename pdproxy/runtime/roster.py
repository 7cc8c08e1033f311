"""Lets instances join: the proxy starts before its engines, and picks each up when it answers.

Rule: an instance is routable only after a good probe. Those of the configuration are waited for
without end; those added by a call are given up after some probes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_attempt, wait_fixed

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Instance, Role, Source, State
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.tasks import spawn
from pdproxy.upstream.prober import Prober

logger = logging.getLogger(__name__)

# Spread of the time between two rounds of probes, so that several proxies do not probe in step.
JITTER = 0.2
_WAITING = frozenset({State.JOINING, State.EJECTED})


@dataclass(frozen=True, slots=True)
class RosterRules:
    """When instances are probed.

    Attributes:
        probe_interval_s: between two probes of an instance that has not joined or was ejected.
        add_interval_s: the same for one that was added by a call.
        add_attempts: probes after which one that was added by a call is given up.
    """

    probe_interval_s: float
    add_interval_s: float
    add_attempts: int


class FleetRoster:
    """Owns the tasks by which instances join."""

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
        self._prober = prober
        self._rules = rules
        self._rng = rng
        self._on_gone = on_gone
        self._joining: dict[Instance, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    async def start(self, configured: Iterable[tuple[Role, Endpoint]], wait_s: float) -> None:
        """Register the configured instances and probe them once, for at most `wait_s` seconds.

        Engines that are up already then serve from the first request on.
        """
        for role, endpoint in configured:
            self._fleet.add(role, endpoint)
        self._watch = spawn(self._keep_watching(), name="roster")
        try:
            async with asyncio.timeout(wait_s):
                await self._probe_waiting()
        except TimeoutError:
            logger.info("some engines do not answer yet; each joins as soon as it does")

    async def stop(self) -> None:
        """End all tasks."""
        tasks = [*self._joining.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, role: Role, endpoint: Endpoint) -> Change:
        """Let an engine join once it answers; one that is draining takes requests again."""
        known = self._fleet.find(role, endpoint)
        was = self._fleet.state(known) if known is not None else State.GONE
        instance, is_new = self._fleet.add(role, endpoint, source=Source.CALL)
        if is_new:
            logger.info("%s %s is waited for", role, instance.label)
            self._joining[instance] = spawn(self._join(instance), name=f"join {instance.label}")
            return Change.WAITING
        if was is not State.DRAINING:
            return Change.UNCHANGED
        logger.info("%s %s takes requests again", role, instance.label)
        return Change.RESTORED

    async def remove(self, role: Role, endpoint: Endpoint) -> Change:
        """Take an instance out of service; its running requests end as usual."""
        instance = self._fleet.find(role, endpoint)
        if instance is None:
            return Change.UNKNOWN
        if (task := self._joining.pop(instance, None)) is not None:
            task.cancel()
        was = self._fleet.state(instance)
        self._fleet.set_state(instance, State.GONE if was is State.JOINING else State.DRAINING)
        state = self._fleet.state(instance)
        if state is not was:
            logger.info("%s %s is %s", role, instance.label, state)
        if state is State.GONE:
            self._on_gone(instance)
            return Change.GONE
        return Change.DRAINING

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

    async def _join(self, instance: Instance) -> None:
        """Probe one that was added by a call until it answers or its attempts are spent."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(max(1, self._rules.add_attempts)),
            wait=wait_fixed(self._rules.add_interval_s),
            retry=retry_if_result(lambda is_serving: not is_serving),
        )
        try:
            await retrying(self._prober.is_serving, instance.endpoint)
        except RetryError:
            logger.warning(
                "%s %s did not answer %d probes and is dropped; add it again once it is up",
                instance.role,
                instance.label,
                self._rules.add_attempts,
            )
            self._fleet.set_state(instance, State.GONE)
            self._on_gone(instance)
        else:
            self._admit(instance)
        finally:
            self._joining.pop(instance, None)

    async def _keep_watching(self) -> None:
        while True:
            spread = self._rng.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(self._rules.probe_interval_s * spread)
            try:
                await self._probe_waiting()
                self._fleet.judge.forget_old_lessons()
            except Exception:
                # A watch that dies would leave ejected instances out for ever.
                logger.exception("a round of probes failed by a bug; the next one goes on")

    async def _probe_waiting(self) -> None:
        """Probe all that have yet to join or come back, side by side."""
        waiting = [
            instance
            for role in Role
            for instance in self._fleet.instances(role)
            if self._fleet.state(instance) in _WAITING and instance not in self._joining
        ]
        await asyncio.gather(*(self._probe(instance) for instance in waiting))

    async def _probe(self, instance: Instance) -> None:
        if await self._prober.is_serving(instance.endpoint):
            self._admit(instance)

    def _admit(self, instance: Instance) -> None:
        if self._fleet.admit(instance):
            logger.info("%s %s serves", instance.role, instance.label)
