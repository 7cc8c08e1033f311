"""The last quarter of an hour in counts: what the dashboard draws, within bounded memory.

Rule: everything counted is additive and its buckets lie on the wall clock, so what several
processes counted at the same time is the sum of their buckets (`merge`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from pdproxy.core.durations import step_of

T = TypeVar("T")

BUCKET_S = 5
WINDOW_S = 900
BUCKETS = WINDOW_S // BUCKET_S

# Newest failures kept of each kind, so that faulty clients do not push out engines' faults.
MAX_FAILURES = 50
# Instances whose last error is kept; more than one fleet has.
MAX_ERRORS = 512
# Of a text that a client or an engine chose.
MAX_TEXT_CHARACTERS = 300


class Bucket(msgspec.Struct):
    """What ended within BUCKET_S seconds.

    Attributes:
        index: wall-clock seconds since 1970 divided by BUCKET_S.
        outcomes: requests by outcome.
        output_tokens: of requests that ended in it, as engines counted.
        recomputes: further rounds of answers.
        ttft, tpot: durations by step, see `core.durations`.
    """

    index: int
    outcomes: dict[str, int] = {}
    output_tokens: int = 0
    recomputes: int = 0
    ttft: dict[int, int] = {}
    tpot: dict[int, int] = {}

    def add(self, other: Bucket) -> None:
        """Add what another process counted in the same time."""
        self.output_tokens += other.output_tokens
        self.recomputes += other.recomputes
        add_counts(self.outcomes, other.outcomes)
        add_counts(self.ttft, other.ttft)
        add_counts(self.tpot, other.tpot)


class Failure(msgspec.Struct, frozen=True):
    """One request that did not succeed; no prompt and no key is in it."""

    at_s: float
    request_id: str
    endpoint: str
    model: str
    outcome: str
    status: int
    prefiller: str
    decoder: str
    why: str


class InstanceError(msgspec.Struct, frozen=True):
    """The last attempt that failed on an instance, and how many did since the start."""

    role: str
    name: str
    at_s: float
    reason: str
    count: int


class Recent(msgspec.Struct):
    """What one process counted, or several together; a plain value that can be sent.

    Attributes:
        now_s: wall-clock time at which this was true.
        started_s: the same since which it counts.
        buckets: by index; empty ones are missing.
        failures: newest last.
        errors: one per instance that has had any.
    """

    now_s: float
    started_s: float
    buckets: dict[int, Bucket]
    failures: list[Failure]
    errors: list[InstanceError]


class History:
    """Counts what happens; each call takes a time that does not depend on the traffic.

    Args:
        clock: the wall clock, seconds since 1970; it may be set back, which loses what is "later".
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        # A ring: a bucket's place is its index modulo the length.
        self._ring: list[Bucket | None] = [None] * BUCKETS
        self._failures: dict[bool, deque[Failure]] = {
            is_clients: deque(maxlen=MAX_FAILURES) for is_clients in (False, True)
        }
        self._errors: dict[tuple[str, str], InstanceError] = {}

    def count_request(
        self,
        outcome: str,
        *,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        output_tokens: int = 0,
    ) -> None:
        """Count a request that has ended."""
        bucket = self._bucket()
        bucket.outcomes[outcome] = bucket.outcomes.get(outcome, 0) + 1
        bucket.output_tokens += output_tokens
        if ttft_s is not None:
            step = step_of(ttft_s)
            bucket.ttft[step] = bucket.ttft.get(step, 0) + 1
        if tpot_s is not None:
            step = step_of(tpot_s)
            bucket.tpot[step] = bucket.tpot.get(step, 0) + 1

    def count_recompute(self) -> None:
        """Count a further round of an answer."""
        self._bucket().recomputes += 1

    def keep_failure(self, failure: Failure, *, is_clients: bool) -> None:
        """Keep a failure; the oldest of its kind makes room."""
        self._failures[is_clients].append(failure)

    def keep_error(self, role: str, name: str, reason: str) -> None:
        """Keep the last failed attempt of an instance; the one longest without makes room."""
        before = self._errors.pop((role, name), None)
        if len(self._errors) >= MAX_ERRORS:
            del self._errors[next(iter(self._errors))]
        count = before.count + 1 if before is not None else 1
        self._errors[role, name] = InstanceError(role, name, self._clock(), reason, count)

    def recent(self) -> Recent:
        """Return what was counted; the buckets are the live ones, to be read at once."""
        now_s = self._clock()
        self._started_s = min(self._started_s, now_s)
        newest = int(now_s // BUCKET_S)
        found = (bucket for bucket in self._ring if bucket is not None)
        return Recent(
            now_s=now_s,
            started_s=self._started_s,
            buckets={b.index: b for b in found if newest - BUCKETS < b.index <= newest},
            failures=_in_order(failure for kept in self._failures.values() for failure in kept),
            errors=list(self._errors.values()),
        )

    def _bucket(self) -> Bucket:
        index = int(self._clock() // BUCKET_S)
        place = index % BUCKETS
        bucket = self._ring[place]
        if bucket is None or bucket.index != index:
            bucket = self._ring[place] = Bucket(index)
        return bucket


def merge(parts: Iterable[Recent]) -> Recent:
    """Return what several processes counted together; the parts are left as they are."""
    known = list(parts)
    buckets: dict[int, Bucket] = {}
    for part in known:
        for index, bucket in part.buckets.items():
            if index not in buckets:
                buckets[index] = Bucket(index)
            buckets[index].add(bucket)
    return Recent(
        now_s=max(part.now_s for part in known),
        started_s=min(part.started_s for part in known),
        buckets=buckets,
        failures=_in_order(failure for part in known for failure in part.failures),
        errors=_merged_errors(error for part in known for error in part.errors),
    )


def add_counts(into: dict[T, int], counts: Mapping[T, int], times: int = 1) -> None:
    """Add counts to others in place; `times` -1 takes away what was added before."""
    for key, count in counts.items():
        into[key] = into.get(key, 0) + times * count


def shown(text: str) -> str:
    """Return a text that somebody else chose, cut to a length and fit for UTF-8."""
    return text[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode("utf-8")


def _in_order(failures: Iterable[Failure]) -> list[Failure]:
    return sorted(failures, key=lambda failure: failure.at_s)


def _merged_errors(errors: Iterable[InstanceError]) -> list[InstanceError]:
    merged: dict[tuple[str, str], InstanceError] = {}
    for error in errors:
        known = merged.get((error.role, error.name))
        if known is None:
            merged[error.role, error.name] = error
            continue
        last = max(known, error, key=lambda each: each.at_s)
        count = known.count + error.count
        merged[error.role, error.name] = msgspec.structs.replace(last, count=count)
    return list(merged.values())
