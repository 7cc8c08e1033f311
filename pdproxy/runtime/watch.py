"""Probes every instance: lets those that answer in, finds those that do not, gives up strangers.

Rule: an instance is routable only after a good probe. Each has a task of its own, so one that
hangs holds up no other. Those of the configuration are waited for without end; those added by a
call are given up after some probes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_attempt, wait_fixed

from pdproxy.core.engine_metrics import read_report
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, State
from pdproxy.core.wording import counted
from pdproxy.tasks import spawn
from pdproxy.upstream.prober import Prober, ProbeResult

logger = logging.getLogger(__name__)

# Spread of the time between two probes, so that neither several proxies nor the instances of one
# are probed in step.
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RosterRules:
    """When instances are probed.

    Attributes:
        probe_interval_s: between two probes of an instance.
        add_interval_s: the same for one that was added by a call and has not answered yet.
        scrape_interval_s: between two looks at an engine's metrics; 0: none.
        add_attempts: probes after which one that was added by a call is given up.
    """

    probe_interval_s: float
    add_interval_s: float
    add_attempts: int
    scrape_interval_s: float = 0.0


class Watch:
    """Owns a task for each instance."""

    def __init__(
        self, fleet: Fleet, prober: Prober, rules: RosterRules, rng: random.Random
    ) -> None:
        self._fleet = fleet
        self._prober = prober
        self._rules = rules
        self._rng = rng
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._told: dict[Instance, str] = {}  # why those that are joining do not answer

    def begin(self, instance: Instance) -> None:
        """Watch an instance until it is gone."""
        self._tasks[instance] = spawn(self._follow(instance), name=f"watch {instance.label}")

    def end(self, instance: Instance) -> None:
        """Stop watching one that is gone."""
        self._told.pop(instance, None)
        task = self._tasks.pop(instance, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def stop(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def probe(self, instance: Instance, *, is_warm: bool = False) -> ProbeResult:
        """Probe once, and let the fleet know."""
        found = await self._prober.probe(instance.endpoint)
        judge = self._fleet.judge
        if found.is_serving:
            judge.probe_succeeded(instance, is_warm=is_warm)
            self._told.pop(instance, None)
        else:
            judge.probe_failed(instance, certain=found.is_refused, why=found.why)
            self._tell_once(instance, found.why)
        return found

    def _tell_once(self, instance: Instance, why: str) -> None:
        """Log why one that has yet to join does not; again only when the reason changes."""
        if self._fleet.state(instance) is State.JOINING and self._told.get(instance) != why:
            self._told[instance] = why
            logger.info("%s %s does not join yet: %s", instance.role, instance.label, why)

    async def _follow(self, instance: Instance) -> None:
        if self._fleet.is_pending(instance) and not await self._has_joined(instance):
            return
        # Those in service are probed spread over the whole interval, a new one at once.
        is_new = self._fleet.state(instance) is State.JOINING
        spread = 0.0 if is_new else self._rng.uniform(0, 1)
        scraped_s = -math.inf
        while True:
            await asyncio.sleep(self._rules.probe_interval_s * spread)
            spread = self._rng.uniform(1 - JITTER, 1 + JITTER)
            try:
                scraped_s = await self._look(instance, scraped_s)
            except Exception:
                # A watch that dies would leave an ejected instance out for ever.
                logger.exception("a probe of %s failed by a bug; the next one goes on", instance)

    async def _look(self, instance: Instance, scraped_s: float) -> float:
        """Probe it, and read its metrics when that is due; return when they were read last.

        What one that does not answer said last is soon old, so it is read with the next answer.
        """
        found = await self.probe(instance)
        is_due = self._is_scrape_due(scraped_s)
        if not found.is_serving:
            if is_due:
                self._fleet.judge.engine_silent(instance)
            return -math.inf
        if is_due:
            scraped_s = self._now_s()
            await self._scrape(instance)
        return scraped_s

    async def _scrape(self, instance: Instance) -> None:
        """Learn what the engine says of itself; if nothing, only its capacity is kept."""
        page = await self._prober.metrics(instance.endpoint)
        # Not on the loop: a long page takes milliseconds.
        if report := await asyncio.to_thread(read_report, page):
            held_tokens = self._fleet.load(instance).kv_tokens
            self._fleet.judge.engine_reported(instance, report, held_tokens)
        else:
            self._fleet.judge.engine_silent(instance)

    def _is_scrape_due(self, scraped_s: float) -> bool:
        interval_s = self._rules.scrape_interval_s
        return interval_s > 0 and self._now_s() - scraped_s >= interval_s

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    async def _has_joined(self, instance: Instance) -> bool:
        """Probe one that was added by a call until it answers or its attempts are spent."""
        attempts = max(1, self._rules.add_attempts)
        retrying = AsyncRetrying(
            stop=stop_after_attempt(attempts),
            wait=wait_fixed(self._rules.add_interval_s),
            retry=retry_if_result(lambda found: not found.is_serving),
        )
        try:
            await retrying(self.probe, instance)
        except RetryError:
            logger.warning(
                "%s %s did not answer %s and is dropped; add it again once it is up",
                instance.role,
                instance.label,
                counted(attempts, "probe"),
            )
            self._fleet.set_state(instance, State.GONE)
            return False
        return True
