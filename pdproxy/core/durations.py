"""Counts of durations on a logarithmic scale: they add up, stay small, and give percentiles.

Rule: counts are of whole steps, so those of several processes can be summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# A step is 9 % wide, so a percentile is off by at most that.
STEPS_PER_DOUBLING = 8
# What is shorter falls into step 0: no engine answers within half a millisecond.
SHORTEST_S = 0.0005
# What is longer, half an hour, falls into the last step.
LAST_STEP = 22 * STEPS_PER_DOUBLING

Counts = Mapping[int, int]


def step_of(duration_s: float) -> int:
    """Return the step that a duration is counted in, 0 to LAST_STEP."""
    if duration_s <= SHORTEST_S:
        return 0
    steps = math.log2(duration_s / SHORTEST_S) * STEPS_PER_DOUBLING
    return LAST_STEP if steps >= LAST_STEP else math.ceil(steps)


def percentiles(counts: Counts, shares: Sequence[float]) -> tuple[float, ...] | None:
    """Return the durations in seconds below which these shares lie; None if nothing was counted.

    Args:
        counts: durations per step; a step may be there with a count of 0.
        shares: such as 0.5 for the median, in ascending order.
    """
    total = sum(counts.values())
    if not total:
        return None
    steps = sorted(counts)
    found: list[float] = []
    below, at = 0, 0
    for share in shares:
        wanted = share * total
        while at < len(steps) - 1 and below + counts[steps[at]] < wanted:
            below += counts[steps[at]]
            at += 1
        here = counts[steps[at]]
        inside = (wanted - below) / here if here else 1.0
        found.append(_seconds_at(steps[at] - 1 + inside))
    return tuple(found)


def _seconds_at(position: float) -> float:
    return SHORTEST_S * math.exp2(position / STEPS_PER_DOUBLING)
