"""Which of the available instances gets a leg: one method, `pick`.

Rule: a policy compares what it is shown. Membership, health and load live elsewhere, so every
policy works the same under drains, failures and restarts. Scores are compared within one pick
only, lower is better, and equal scores rotate: no instance is favoured for its place in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from pdproxy.core.instance import Instance, Role
from pdproxy.core.load import Cost, Load

if TYPE_CHECKING:
    import random

# --- least_load on prefillers, in tokens to compute

# Weight of a token whose KV is only held against one that is still to be computed. Held KV costs
# no compute; it takes blocks that a long prompt may have to wait for. So it decides between
# equally busy prefillers and never outweighs a queued prompt of like size.
PINNED_KV_WEIGHT = 0.1
# Fixed work of one more prompt (scheduling, sampling, its HTTP exchange): a few milliseconds, at
# the 10 to 20 thousand tokens a second of a prefiller. Prompts without an estimate count thereby.
TOKENS_PER_REQUEST = 64

# --- least_load on decoders, in requests: one unit is the step time that one more request costs

# Reading a full KV cache slows a step about as much as this many requests do: a decoder whose
# cache is full of requests of average length runs 64 to 128 of them.
FULL_CACHE_REQUESTS = 64.0
# Weight of k/(1-k), k the part of the KV cache in use: 4 requests at half full, 36 at 0.9. Beyond
# that the engine preempts or ends requests for recomputation, which costs a whole prefill.
PRESSURE_REQUESTS = 4.0
FULLEST_USE = 0.95  # a decoder beyond it is taken only when all are
_LAST_RESORT = 1e9  # added beyond FULLEST_USE: above any real score, and order stays
# Stands in while no capacity is known: an 8B model's KV on the rest of an 80 GB device.
UNKNOWN_CAPACITY_TOKENS = 400_000

# --- reference, in milliseconds as the fit of the script that it reproduces: bytes / 4 stands for
# tokens there, and every request adds the constant. Source: vllm-ascend,
# examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py.
_REFERENCE_MS_PER_BYTE = 0.0345 / 4
_REFERENCE_MS_PER_REQUEST = 120.0745


# Rotations start anywhere, so that restarted or parallel proxies do not all start with the first
# instance: a range far above any number of instances, to be taken modulo that number.
_FIRST_TURNS = 1 << 16


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An instance as a policy sees it.

    A struct that the garbage collector ignores, because one is made per instance and pick; it is
    never part of a cycle.

    Attributes:
        instance: what would get the leg.
        load: what it holds now.
        capacity_tokens: tokens its KV cache holds, if known.
        cached_tokens: tokens of this prompt that its prefix cache likely holds.
    """

    instance: Instance
    load: Load
    capacity_tokens: int | None = None
    cached_tokens: int = 0


class Reason(StrEnum):
    """Why an instance got a leg; a closed set, since it is a label of metrics."""

    POLICY = "policy"  # the policy's choice of all that were available
    ONLY_ONE = "only_one"  # no other was available
    OTHERS_FAILED = "others_failed"  # chosen of those that had not failed this request
    OTHERS_FULL = "others_full"  # chosen of those that may take more
    LAST_RESORT = "last_resort"  # more than half of its role is ejected


def reason_of(
    candidates: int, available: int, *, is_ejected: bool, left_out: Reason = Reason.OTHERS_FAILED
) -> Reason:
    """Return why one of so many candidates, of so many that are available, is chosen.

    `left_out` is why the others are no candidates.
    """
    if is_ejected:
        return Reason.LAST_RESORT
    if candidates < available:
        return left_out
    return Reason.ONLY_ONE if available == 1 else Reason.POLICY


class Policy(Protocol):
    """Chooses one of the candidates."""

    name: ClassVar[str]

    def pick(self, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
        """Return one of `candidates`, which are not empty, for a leg that costs `cost`."""
        ...


Scores = Callable[[Sequence[Candidate], Cost], list[float]]


def prefill_scores(candidates: Sequence[Candidate], cost: Cost) -> list[float]:
    """Tokens to compute before this prompt is done, per candidate.

    `queued + own uncached + 0.1 * pinned KV + 64 * requests`: the predicted finish time at equal
    speed, with one shared cost per token. Source: time to first token as queue plus own prefill,
    as in Mooncake (FAST '25) and the token-load scorers of llm-d and Dynamo.
    """
    own = cost.compute_tokens
    scores = []
    for candidate in candidates:
        load = candidate.load
        cached = candidate.cached_tokens
        scores.append(
            load.compute_tokens
            + (own - cached if cached < own else 0)
            + PINNED_KV_WEIGHT * load.kv_tokens
            + TOKENS_PER_REQUEST * load.requests
        )
    return scores


def decode_scores(candidates: Sequence[Candidate], cost: Cost) -> list[float]:
    """Step time that this request would see, in requests, per candidate.

    `(R + 1) + 64 * k + 4 * k / (1 - k)` with `k = (T + need) / C`: R requests and T tokens held, C
    the capacity. The first two terms are the step time, which is affine in batch size and resident
    KV; the last is the price of running out of blocks. Source: DistServe (OSDI '24) for the step,
    smg's least_load for the pressure term.

    A candidate without a known capacity counts as the mean of the known ones. With none known the
    capacity is a stand-in that orders by tokens held and says nothing of pressure.
    """
    known = [c.capacity_tokens for c in candidates if c.capacity_tokens is not None]
    if not known:
        return _decode_scores_by_size(candidates)
    mean = sum(known) / len(known)
    need = cost.kv_tokens
    scores = []
    for candidate in candidates:
        load = candidate.load
        full = (load.kv_tokens + need) / (candidate.capacity_tokens or mean)
        if full <= FULLEST_USE:
            weight = FULL_CACHE_REQUESTS + PRESSURE_REQUESTS / (1 - full)
            scores.append(load.requests + 1 + weight * full)
        else:
            scores.append(load.requests + 1 + FULL_CACHE_REQUESTS * full + _LAST_RESORT)
    return scores


def _decode_scores_by_size(candidates: Sequence[Candidate]) -> list[float]:
    weight = FULL_CACHE_REQUESTS / UNKNOWN_CAPACITY_TOKENS
    return [candidate.load.requests + weight * candidate.load.kv_tokens for candidate in candidates]


def reference_prefill_scores(candidates: Sequence[Candidate], cost: Cost) -> list[float]:
    """Milliseconds: `sum(bytes) / 4 * 0.0345 + 120.0745 * requests` of what is held."""
    return [
        _REFERENCE_MS_PER_BYTE * candidate.load.body_bytes
        + _REFERENCE_MS_PER_REQUEST * candidate.load.requests
        for candidate in candidates
    ]


def reference_decode_scores(candidates: Sequence[Candidate], cost: Cost) -> list[float]:
    """Bytes of request bodies held."""
    return [candidate.load.body_bytes for candidate in candidates]


class _LowestScore:
    """Takes the lowest score of all; equal ones take turns."""

    def __init__(self, scores: Scores, rng: random.Random) -> None:
        self._scores = scores
        self._turn = rng.randrange(_FIRST_TURNS)

    def pick(self, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
        scores = self._scores(candidates, cost)
        lowest = min(scores)
        place = scores.index(lowest)
        if scores.count(lowest) > 1:
            # The next of the equal ones after the last that won by turn, round the end.
            turn = self._turn % len(scores)
            if lowest in scores[turn:]:
                place = scores.index(lowest, turn)
            self._turn = place + 1
        return candidates[place]


class LeastLoad(_LowestScore):
    """The least predicted finish time on prefillers, the least step time on decoders."""

    name: ClassVar[str] = "least_load"

    def __init__(self, role: Role, rng: random.Random) -> None:
        super().__init__(_least_load_scores(role), rng)


class Reference(_LowestScore):
    """Scores of the example script that pdproxy replaces, kept for comparison."""

    name: ClassVar[str] = "reference"

    def __init__(self, role: Role, rng: random.Random) -> None:
        is_prefill = role is Role.PREFILL
        super().__init__(reference_prefill_scores if is_prefill else reference_decode_scores, rng)


class RoundRobin:
    """Each in turn, whatever the load."""

    name: ClassVar[str] = "round_robin"

    def __init__(self, role: Role, rng: random.Random) -> None:
        self._turn = rng.randrange(_FIRST_TURNS)

    def pick(self, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
        """Return the one after the last."""
        place = self._turn % len(candidates)
        self._turn = place + 1
        return candidates[place]


class RandomChoice:
    """Any, with equal chances, whatever the load."""

    name: ClassVar[str] = "random"

    def __init__(self, role: Role, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
        """Return any."""
        return self._rng.choice(candidates)


class PowerOfTwo:
    """The less loaded of two, scored as in `least_load`; the first by turn, the second by chance.

    Two of many keep several proxies, which do not see each other's load, from all choosing the
    same idle instance. A turn in place of the first chance makes equal loads rotate exactly.
    """

    name: ClassVar[str] = "power_of_two"

    def __init__(self, role: Role, rng: random.Random) -> None:
        self._scores = _least_load_scores(role)
        self._rng = rng
        self._turn = rng.randrange(_FIRST_TURNS)

    def pick(self, candidates: Sequence[Candidate], cost: Cost) -> Candidate:
        """Return the better of the two drawn, the first if they are equal."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        self._turn += 1
        first = self._turn % count
        second = (first + 1 + int(self._rng.random() * (count - 1))) % count
        pair = (candidates[first], candidates[second])
        first_score, second_score = self._scores(pair, cost)
        return pair[0] if first_score <= second_score else pair[1]


def _least_load_scores(role: Role) -> Scores:
    return prefill_scores if role is Role.PREFILL else decode_scores


POLICIES: Mapping[str, Callable[[Role, random.Random], Policy]] = MappingProxyType(
    {policy.name: policy for policy in (LeastLoad, RoundRobin, RandomChoice, PowerOfTwo, Reference)}
)
