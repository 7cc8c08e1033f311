"""Load: what an instance holds now, as the sum of its live leases; and estimates in tokens.

Rule: load changes by `charge` and `release` of whole costs only. All amounts are integers, so sums
are exact and come back to zero. Nothing is ever clamped: a negative amount is a bug, it stays
visible and is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

T = TypeVar("T")
OnAnomaly = Callable[[int, str], None]

START_TOKENS_PER_BYTE = 0.25  # English text on today's vocabularies: about four bytes a token
START_OUTPUT_TOKENS = 256  # a chat answer of two or three paragraphs

# What a model's estimate starts with counts as one prompt of this size: it outweighs a greeting,
# whose chat template is longer than its text, and yields to the first real prompts.
_START_BYTES = 4096.0
_TEXT_WEIGHT = 1 / 16  # of the newest prompt: settles within some tens of requests
_OUTPUT_WEIGHT = 1 / 32  # of the newest answer: lengths scatter widely, so it is slower
_MAX_MODELS = 64  # more than one fleet serves, adapters included; the least recent is forgotten


@dataclass(frozen=True, slots=True)
class Cost:
    """What one leg adds to its instance while its lease lives.

    Attributes:
        requests: legs in flight.
        compute_tokens: prompt tokens still to be computed, those in the prefix cache left out.
        kv_tokens: tokens whose KV is held; on a decoder the expected output included.
        body_bytes: size of the request's body, which the `reference` policy counts in.
    """

    requests: int = 1
    compute_tokens: int = 0
    kv_tokens: int = 0
    body_bytes: int = 0


class Load(msgspec.Struct, frozen=True, gc=False):
    """Sums of the live costs of an instance; the attributes are those of `Cost`.

    A struct and not a dataclass: one is made per charge and release, at a sixth of the time.
    """

    requests: int = 0
    compute_tokens: int = 0
    kv_tokens: int = 0
    body_bytes: int = 0

    @property
    def is_negative(self) -> bool:
        """Whether any sum is below zero, which only a bug can cause."""
        return (
            self.requests < 0
            or self.compute_tokens < 0
            or self.kv_tokens < 0
            or self.body_bytes < 0
        )


NO_LOAD = Load()


class LoadAnomalyError(AssertionError):
    """Charges and releases do not match: a bug of the proxy."""


def raise_anomaly(slot: int, text: str) -> None:
    """Raise: what a board does about an anomaly unless told otherwise."""
    raise LoadAnomalyError(f"slot {slot}: {text}")


class Board(Protocol):
    """Where load is kept: a slot belongs to one instance from `open` to `close`."""

    def open(self) -> int:
        """Return a slot with no load."""
        ...

    def close(self, slot: int) -> None:
        """Give a slot back; one that still holds load is reported and stays open."""
        ...

    def charge(self, slot: int, cost: Cost) -> None:
        """Add a cost to a slot."""
        ...

    def release(self, slot: int, cost: Cost) -> None:
        """Take back a cost that was charged to the slot."""
        ...

    def load(self, slot: int) -> Load:
        """Return what the slot holds now; nothing for a closed one."""
        ...


class LoadBoard:
    """The `Board` of one process: a row of sums per slot.

    Args:
        on_anomaly: called with slot and text when charges and releases do not match. The board
            goes on with the exact sums if it returns.
    """

    def __init__(self, on_anomaly: OnAnomaly = raise_anomaly) -> None:
        self._on_anomaly = on_anomaly
        self._rows: dict[int, Load] = {}
        self._free: deque[int] = deque()

    def open(self) -> int:
        """Return a slot with no load. Slots are reused, the longest unused first."""
        # Every slot ever handed out is either free or has a row.
        slot = self._free.popleft() if self._free else len(self._rows)
        self._rows[slot] = NO_LOAD
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back; one that still holds load is reported and stays open."""
        if self._rows.get(slot) != NO_LOAD:
            self._on_anomaly(slot, f"closed with {self._rows.get(slot)}")
            return
        del self._rows[slot]
        self._free.append(slot)

    def charge(self, slot: int, cost: Cost) -> None:
        """Add a cost to a slot."""
        row = self._rows.get(slot)
        if row is None:
            self._on_anomaly(slot, f"charged while closed: {cost}")
            return
        self._rows[slot] = Load(
            row.requests + cost.requests,
            row.compute_tokens + cost.compute_tokens,
            row.kv_tokens + cost.kv_tokens,
            row.body_bytes + cost.body_bytes,
        )

    def release(self, slot: int, cost: Cost) -> None:
        """Take back a cost that was charged to the slot."""
        row = self._rows.get(slot)
        if row is None:
            self._on_anomaly(slot, f"released while closed: {cost}")
            return
        row = self._rows[slot] = Load(
            row.requests - cost.requests,
            row.compute_tokens - cost.compute_tokens,
            row.kv_tokens - cost.kv_tokens,
            row.body_bytes - cost.body_bytes,
        )
        if row.is_negative:
            self._on_anomaly(slot, f"negative after a release: {row}")

    def load(self, slot: int) -> Load:
        """Return what the slot holds now; nothing for a closed one."""
        return self._rows.get(slot, NO_LOAD)


@dataclass(frozen=True, slots=True)
class _TextMeans:
    """Decaying means over the prompts of one model; their quotient is weighted by size."""

    tokens: float
    text_bytes: float


class TokenEstimator:
    """Prompt tokens from bytes of prompt text, learned per model from what prefillers report.

    Means of tokens and of bytes are kept apart and divided late, so that prompts count by size: a
    mean of quotients would be governed by short prompts, whose chat template outweighs their text.
    """

    def __init__(self, max_models: int = _MAX_MODELS) -> None:
        self._max_models = max_models
        self._means: dict[str, _TextMeans] = {}

    def estimate(self, model: str, text_bytes: int) -> int:
        """Return the likely prompt tokens of `text_bytes` of UTF-8 prompt text, rounded up."""
        means = self._means.get(model)
        ratio = means.tokens / means.text_bytes if means else START_TOKENS_PER_BYTE
        return math.ceil(text_bytes * ratio)

    def observe(self, model: str, text_bytes: int, prompt_tokens: int) -> None:
        """Learn from a prompt whose exact token count became known."""
        if text_bytes <= 0 or prompt_tokens <= 0:
            return
        old = self._means.pop(model, None) or _TextMeans(
            _START_BYTES * START_TOKENS_PER_BYTE, _START_BYTES
        )
        new = _TextMeans(
            old.tokens + (prompt_tokens - old.tokens) * _TEXT_WEIGHT,
            old.text_bytes + (text_bytes - old.text_bytes) * _TEXT_WEIGHT,
        )
        _remember(self._means, model, new, self._max_models)


class OutputEstimator:
    """Expected output tokens, a running mean per model."""

    def __init__(self, max_models: int = _MAX_MODELS) -> None:
        self._max_models = max_models
        self._means: dict[str, float] = {}

    def expect(self, model: str, limit: int | None) -> int:
        """Return the likely output tokens; `limit` is the request's own maximum, if any."""
        mean = math.ceil(self._means.get(model, START_OUTPUT_TOKENS))
        return mean if limit is None else max(0, min(limit, mean))

    def observe(self, model: str, tokens: int) -> None:
        """Learn from a finished answer."""
        if tokens < 0:
            return
        old = self._means.pop(model, float(START_OUTPUT_TOKENS))
        _remember(self._means, model, old + (tokens - old) * _OUTPUT_WEIGHT, self._max_models)


def _remember(table: dict[str, T], model: str, value: T, max_models: int) -> None:
    """Store as the most recent; `model` was popped before."""
    if len(table) >= max_models:
        del table[next(iter(table))]
    table[model] = value
