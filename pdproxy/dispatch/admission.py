"""The door: requests within the limits go through, others wait in order or are told to come back.

Rules: with no limit and no known capacity the door costs next to nothing. Who leaves while waiting
leaves nothing behind. What has begun is never refused: it waits in front of all others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from pdproxy.core.admission import (
    Blocker,
    Limits,
    Line,
    Need,
    Pending,
    Place,
    blocker,
    full,
    queue_full,
    rank,
    waited_too_long,
)
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Instance, Role
from pdproxy.core.timeline import Stage, Timeline
from pdproxy.dispatch.in_flight import InFlight, OwnInFlight
from pdproxy.errors import QueueFull, QueueTimeout

# What other processes let go, and what has been learned, is seen by looking.
LOOK_S = 0.05
# Of what has begun, at most: its client sees the answer stand still, or its KV handle grows old.
MAX_STANDSTILL_S = 5.0


class AdmissionObserver(Protocol):
    """Who is told of the queue."""

    def queue_changed(self, change: int) -> None:
        """So many requests more wait, or less."""
        ...

    def queue_left(self, seconds: float) -> None:
        """A request has waited so long, whatever came of it."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    """One that waits: for its turn as a request, or for a place of one of its prompts."""

    need: Need | None
    turn: asyncio.Future[None]
    is_let_in: bool = False


@dataclass(slots=True)
class Visit:
    """A client request behind the door; leaves it when its block ends."""

    admission: Admission
    priority: int
    timeline: Timeline

    async def __aenter__(self) -> Self:
        await self.admission.enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.admission.leave()


class Admission:
    """One process's door, with its queue."""

    def __init__(
        self,
        limits: Limits,
        fleet: Fleet,
        observer: AdmissionObserver,
        clock: Callable[[], float],
        in_flight: InFlight | None = None,
        queued: InFlight | None = None,
    ) -> None:
        self._limits = limits
        self._fleet = fleet
        self._observer = observer
        self._clock = clock
        self._in_flight = in_flight or OwnInFlight()
        self._queued = queued or OwnInFlight()
        self._pending = Pending()
        self._requests: Line[_Waiter] = Line()
        self._places: Line[_Waiter] = Line()
        # Asked for several times per request, and seldom changing: found out now and then.
        self._minds_instances = False
        self._asked_s = -math.inf
        self._look: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests, and prompts of such that are in flight, that wait in this process."""
        return len(self._requests) + len(self._places)

    def admitted(self, priority: int, timeline: Timeline) -> Visit:
        """Return the visit of a client request, to be entered with `async with`.

        Raises:
            QueueFull: on entry; as many wait as may.
            QueueTimeout: on entry; it waited too long.
        """
        return Visit(self, priority, timeline)

    async def enter(self, visit: Visit) -> None:
        """Let a request in, at once or in its turn."""
        if self._requests or not self._has_turn():
            waiter = _Waiter(None, asyncio.get_running_loop().create_future())
            await self._wait(self._requests, waiter, visit)
            if not waiter.is_let_in:
                raise QueueTimeout(waited_too_long(self._limits, Blocker.TURN))
            return
        self._in_flight.add(1)

    def leave(self) -> None:
        """A request that was let in has ended."""
        self._in_flight.add(-1)
        self.step()

    async def place(
        self, visit: Visit, need: Need, *, has_begun: bool = False, limit_s: float = math.inf
    ) -> Place | None:
        """Wait until the instances can take one prompt; None if there is nothing to keep to.

        `limit_s` bounds the wait where it is less than the longest one.

        Raises:
            QueueFull: as many wait as may; not if the request `has_begun`.
            QueueTimeout: the instances had too many legs for too long; not if it `has_begun`.
                One that waited for KV cache only goes to the least full decoder then.
        """
        if not self.minds_instances:
            return None
        if (has_begun or not self._places) and self._blocker(need) is None:
            return self._take(need)
        waiter = _Waiter(need, asyncio.get_running_loop().create_future())
        await self._wait(self._places, waiter, visit, has_begun=has_begun, limit_s=limit_s)
        if not waiter.is_let_in:
            stands = self._blocker(need)
            if stands is not None and stands is not Blocker.KV and not has_begun:
                raise QueueTimeout(waited_too_long(self._limits, stands))
            return self._take(need)
        return Place(self._pending, need)

    def avoided(self, role: Role, kv_tokens: int) -> Collection[Instance]:
        """Return the instances that should not get one more such leg."""
        limits = self._limits
        if not self.minds_instances or (role is Role.PREFILL and not limits.max_per_prefiller):
            return ()
        candidates = self._fleet.candidates(role)
        if role is Role.PREFILL:
            return full(candidates, limits.max_per_prefiller, 0)
        return full(candidates, limits.max_per_decoder, kv_tokens if limits.waits_for_kv else 0)

    def step(self) -> None:
        """Let in whose turn it is."""
        if not self.waiting:
            return
        while (waiter := self._places.first()) is not None:
            assert waiter.need is not None, "waits for a place"
            if self._blocker(waiter.need) is not None:
                break
            self._places.pop()
            self._take(waiter.need)
            _let_in(waiter)
        while (waiter := self._requests.first()) is not None and self._has_turn():
            self._requests.pop()
            self._in_flight.add(1)
            _let_in(waiter)

    # --- inside

    def _has_turn(self) -> bool:
        most = self._limits.max_in_flight
        return not most or self._in_flight.count() < most

    @property
    def minds_instances(self) -> bool:
        """Whether there is anything that could keep a prompt from the instances."""
        now_s = self._clock()
        if now_s >= self._asked_s + LOOK_S:
            self._asked_s = now_s
            limits = self._limits
            has_caps = bool(limits.max_per_decoder or limits.max_per_prefiller)
            has_known = limits.waits_for_kv and self._fleet.knows_capacity(Role.DECODE)
            self._minds_instances = has_caps or has_known
        return self._minds_instances

    def _blocker(self, need: Need) -> Blocker | None:
        minds_prefillers = need.prefill and self._limits.max_per_prefiller
        prefillers = self._fleet.candidates(Role.PREFILL) if minds_prefillers else ()
        decoders = self._fleet.candidates(Role.DECODE)
        return blocker(self._limits, prefillers, decoders, self._pending, need)

    def _held_by(self, need: Need | None) -> Blocker | None:
        """Return what a request waits for; if only for others, what the first of them waits for."""
        if need is None:
            return Blocker.TURN
        first = self._places.first()
        others = first.need if first is not None else None
        return self._blocker(need) or (self._blocker(others) if others is not None else None)

    def _take(self, need: Need) -> Place:
        self._pending.prefills += need.prefill
        self._pending.decodes += 1
        self._pending.kv_tokens += need.kv_tokens
        return Place(self._pending, need)

    async def _wait(
        self,
        line: Line[_Waiter],
        waiter: _Waiter,
        visit: Visit,
        *,
        has_begun: bool = False,
        limit_s: float = math.inf,
    ) -> None:
        """Wait in a line until let in, or for the longest time; takes nothing along on a cancel."""
        limits, began_s = self._limits, self._clock()
        if self._queued.count() >= limits.max_queue and not has_begun:
            raise QueueFull(queue_full(limits, self._held_by(waiter.need)))
        # What has begun holds KV cache, or has shown a client half an answer.
        rank_ = -math.inf if has_begun else rank(visit.priority, began_s, limits.queue_s)
        number = line.push(rank_, waiter)
        own_s = MAX_STANDSTILL_S if has_begun else math.inf
        longest_s = min(limit_s, own_s, math.inf if limits.queue_s is None else limits.queue_s)
        self._count_queued(1)
        self._look_soon()
        try:
            async with asyncio.timeout(None if longest_s == math.inf else longest_s):
                await waiter.turn
        except TimeoutError:
            pass
        except BaseException:
            if waiter.is_let_in:
                self._give_back(waiter)
            raise
        finally:
            if not waiter.is_let_in:
                line.remove(number)
            waited_s = self._clock() - began_s
            self._count_queued(-1)
            self._observer.queue_left(waited_s)
            if visit.timeline.stage in {Stage.QUEUE, Stage.HANDOFF}:
                visit.timeline.waited_s += waited_s

    def _count_queued(self, change: int) -> None:
        self._queued.add(change)
        self._observer.queue_changed(change)

    def _give_back(self, waiter: _Waiter) -> None:
        """Undo what a client was let in with that left in the same moment."""
        if waiter.need is None:
            self.leave()
        else:
            Place(self._pending, waiter.need).decode_leased()
            self.step()

    def _look_soon(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        self.step()
        if self.waiting:
            self._look_soon()


def _let_in(waiter: _Waiter) -> None:
    waiter.is_let_in = True
    if not waiter.turn.done():  # else it is being cancelled, and gives back
        waiter.turn.set_result(None)
