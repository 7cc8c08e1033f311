"""When an instance is left out after failures, and when it may be tried again.

Passive health: failures of real requests count, probes only bring back. One refusal that proves
the engine is not there is enough; anything that may have been chance needs several in a row. What
came back is on trial: until its first success one more failure is enough, and each ejection in a
row lasts longer, so an engine that answers probes but no requests costs ever fewer of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthRules:
    """The operator's choices.

    Attributes:
        failures_to_eject: uncertain failures in a row that eject.
        ejection_s: how long the first ejection lasts at least.
        max_ejection_s: what doubling it stops at.
    """

    failures_to_eject: int = 3
    ejection_s: float = 1.0
    max_ejection_s: float = 30.0


class Health:
    """The record of one instance. Times are seconds of one monotonic clock."""

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._failures = 0  # in a row
        self._is_on_trial = False
        self._next_ejection_s = rules.ejection_s
        self._ejected_until_s = -math.inf

    @property
    def is_blemished(self) -> bool:
        """Whether a success would change anything: it has failed since the last one."""
        return self._failures > 0 or self._is_on_trial

    def succeed(self) -> None:
        """A request went well: all is forgiven."""
        self._failures = 0
        self._is_on_trial = False
        self._next_ejection_s = self._rules.ejection_s

    def fail(self, now_s: float, *, certain: bool) -> bool:
        """Count a failure; return whether the instance is to be ejected now.

        Args:
            now_s: the time.
            certain: the engine is surely not serving, such as a refused connection.
        """
        self._failures += 1
        is_enough = self._failures >= self._rules.failures_to_eject
        if not (certain or self._is_on_trial or is_enough):
            return False
        self._failures = 0
        self._is_on_trial = True
        self._ejected_until_s = now_s + self._next_ejection_s
        self._next_ejection_s = min(2 * self._next_ejection_s, self._rules.max_ejection_s)
        return True

    def can_return(self, now_s: float) -> bool:
        """Whether the last ejection is over, so that a good probe brings the instance back."""
        return now_s >= self._ejected_until_s
