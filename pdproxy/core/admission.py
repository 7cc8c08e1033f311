"""Who is let in now, who waits, and in which order: decisions from numbers, nothing else.

Rules: a limit of 0 is none. What waits is let in strictly by rank, so a long prompt that waits for
room is not overtaken for ever by short ones. Priority moves a rank by a bounded time, so whoever
has waited half of the longest wait goes before all that come later: nothing starves.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from pdproxy.core.instance import Instance
from pdproxy.core.policy import Candidate

T = TypeVar("T")

# What one level of priority is worth, in seconds of waiting.
LEVEL_S = 1.0
# The most that priority moves a rank, as a part of the longest wait; either way.
MAX_HEAD_START = 0.25
# Stands in for the longest wait if there is none.
ENDLESS_S = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's limits; 0 is none.

    Attributes:
        max_in_flight: client requests that are worked on at once.
        max_queue: that wait.
        queue_s: for so long at most; None for no end.
        max_per_prefiller, max_per_decoder: legs on one instance at once.
        waits_for_kv: requests wait while no decoder has room for their KV cache.
    """

    max_in_flight: int = 0
    max_queue: int = 1024
    queue_s: float | None = 30.0
    max_per_prefiller: int = 0
    max_per_decoder: int = 0
    waits_for_kv: bool = True


class Blocker(StrEnum):
    """What a request waits for."""

    TURN = "turn"  # as many requests are worked on as may
    PREFILLERS = "prefillers"  # all have as many legs as they may
    DECODERS = "decoders"
    KV = "kv"  # no decoder has room


@dataclass(frozen=True, slots=True)
class Need:
    """What one prompt is going to take.

    Attributes:
        prefill: a prefiller is one of it.
        kv_tokens: of a decoder's KV cache.
        is_due: it goes to a decoder next, so those that are still prefilled come after it.
    """

    prefill: bool
    kv_tokens: int
    is_due: bool = False


@dataclass(slots=True)
class Pending:
    """What was let in and is not charged to an instance yet: sums over those requests."""

    prefills: int = 0
    decodes: int = 0
    kv_tokens: int = 0


@dataclass(slots=True)
class Place:
    """What one prompt was let in with; counted until it is charged to the instances."""

    pending: Pending
    need: Need
    _is_prefilled: bool = field(default=False, init=False)
    _is_decoded: bool = field(default=False, init=False)

    def prefill_leased(self) -> None:
        """The prefiller is charged; nothing happens the second time."""
        if self.need.prefill and not self._is_prefilled:
            self.pending.prefills -= 1
        self._is_prefilled = True

    def decode_leased(self) -> None:
        """The decoder is charged, or never will be."""
        self.prefill_leased()
        if not self._is_decoded:
            self._is_decoded = True
            self.pending.decodes -= 1
            self.pending.kv_tokens -= self.need.kv_tokens


def blocker(
    limits: Limits,
    prefillers: Sequence[Candidate],
    decoders: Sequence[Candidate],
    pending: Pending,
    need: Need,
) -> Blocker | None:
    """Return what stands in the way of a prompt, None if nothing does.

    Without any instance of a role nothing does, since who asks for one is told so at once; nor for
    a prompt that no decoder could hold: the least full one gets it.
    """
    if need.prefill and not _has_slot(prefillers, limits.max_per_prefiller, pending.prefills):
        return Blocker.PREFILLERS
    before = Pending() if need.is_due else pending
    if not _has_slot(decoders, limits.max_per_decoder, before.decodes):
        return Blocker.DECODERS
    if limits.waits_for_kv and not _has_room(decoders, before.kv_tokens, need.kv_tokens):
        return Blocker.KV
    return None


def queue_full(limits: Limits, held_by: Blocker | None) -> str:
    """Return what a client is told that may not even wait."""
    return f"the queue is full (--max-queue {limits.max_queue}): {_reason(limits, held_by)}"


def waited_too_long(limits: Limits, held_by: Blocker | None) -> str:
    """Return what a client is told that has waited for the longest time."""
    waited = f"--queue-timeout {limits.queue_s:g}"
    return f"the request's turn did not come in time ({waited}): {_reason(limits, held_by)}"


def _reason(limits: Limits, held_by: Blocker | None) -> str:
    """Name the limit that a request waits for by its flag, as who set it can change it."""
    match held_by:
        case Blocker.TURN:
            return (
                f"no more requests are worked on at once (--max-in-flight {limits.max_in_flight})"
            )
        case Blocker.PREFILLERS:
            return (
                f"no prefiller takes more at once (--max-per-prefiller {limits.max_per_prefiller})"
            )
        case Blocker.DECODERS:
            return f"no decoder takes more at once (--max-per-decoder {limits.max_per_decoder})"
        case Blocker.KV:
            return "no decoder has room for its KV cache (--kv-queue on)"
        case None:
            return "those that came before go first"


def full(candidates: Sequence[Candidate], most: int, kv_tokens: int) -> Collection[Instance]:
    """Return those that should not get one more leg that takes so many tokens of KV cache."""
    return [
        each.instance
        for each in candidates
        if (most and each.load.requests >= most) or not _fits(each, kv_tokens)
    ]


def rank(priority: int, arrived_s: float, queue_s: float | None) -> float:
    """Return where in the line a request stands; the lowest goes first.

    It is the time of arrival, moved by the priority: one level is worth LEVEL_S, all together at
    most a quarter of the longest wait. A lower value is more important, as in vLLM.
    """
    most_s = MAX_HEAD_START * (ENDLESS_S if queue_s is None else queue_s)
    # Bounded before it is multiplied: an integer of JSON may be too large for a float.
    most_levels = int(most_s / LEVEL_S) + 1
    levels = max(-most_levels, min(most_levels, priority))
    return arrived_s + max(-most_s, min(most_s, levels * LEVEL_S))


class Line(Generic[T]):
    """What waits, in order of rank; those of equal rank in order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._gone: set[int] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def push(self, rank_: float, item: T) -> int:
        """Put an item in its place; return its number."""
        self._next += 1
        heapq.heappush(self._heap, (rank_, self._next, item))
        return self._next

    def first(self) -> T | None:
        """Return whose turn it is, None if nobody waits."""
        while self._heap and self._heap[0][1] in self._gone:
            self._gone.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Take out whose turn it is."""
        if self.first() is not None:
            heapq.heappop(self._heap)

    def remove(self, number: int) -> None:
        """Take out one that waits."""
        self._gone.add(number)
        self.first()


def _has_slot(candidates: Sequence[Candidate], most: int, pending: int) -> bool:
    if not most or not candidates:
        return True
    free = sum(max(0, most - each.load.requests) for each in candidates)
    return free > pending


def _has_room(decoders: Sequence[Candidate], pending_tokens: int, tokens: int) -> bool:
    """Tell whether a decoder has room, those on their way included, or none can ever have."""
    if not decoders or any(each.capacity_tokens is None for each in decoders):
        return True
    if all(tokens > (each.capacity_tokens or 0) for each in decoders):
        return True
    free = sum(max(0, (each.capacity_tokens or 0) - each.load.kv_tokens) for each in decoders)
    return free >= pending_tokens + tokens and any(_fits(each, tokens) for each in decoders)


def _fits(candidate: Candidate, tokens: int) -> bool:
    capacity = candidate.capacity_tokens
    if capacity is None or not tokens:
        return True
    return candidate.load.kv_tokens + tokens <= capacity
