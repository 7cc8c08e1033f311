"""When an instance is left out after failures, and when it may be tried again.

Failures of requests and of probes are counted apart: a probe shows that a server answers, not that
the engine behind it computes, so good probes never forgive failed requests. One refusal that
proves the engine is not there is enough; anything that may have been chance needs several in a
row. What came back is on trial: until its first success one more failed request is enough, and
each ejection in a row lasts longer, so an engine that answers probes but no requests costs ever
fewer of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ERROR_CHARACTERS = 300  # of what is kept of an error; enough for any system message


@dataclass(frozen=True, slots=True)
class HealthRules:
    """The operator's choices.

    Attributes:
        failures_to_eject: uncertain failures of requests in a row that eject.
        ejection_s: how long the first ejection lasts at least.
        max_ejection_s: what doubling it stops at.
        probes_to_eject: uncertain failures of probes in a row that eject.
        slow_start_s: over which an instance that joins or returns gets its full share; 0: at once.
    """

    failures_to_eject: int = 3
    ejection_s: float = 1.0
    max_ejection_s: float = 30.0
    probes_to_eject: int = 3
    slow_start_s: float = 0.0


class Health:
    """The record of one instance. Times are seconds of one monotonic clock.

    Attributes:
        ejections: how often it was ejected.
        is_on_trial: it was ejected, and no request has gone well since.
        is_dead: as far as known it serves nobody: it refuses connections, or several probes in a
            row failed.
        last_error: why a request or a probe failed last, in words; "" if none has.
        last_error_s: when that was.
    """

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._failures = 0  # of requests, in a row
        self._probe_failures = 0  # in a row
        self.is_on_trial = False
        self._next_ejection_s = rules.ejection_s
        self._ejected_until_s = -math.inf
        self.ejections = 0
        self.is_dead = False
        self.last_error = ""
        self.last_error_s = -math.inf

    @property
    def is_blemished(self) -> bool:
        """Whether a success would change anything: it has failed since the last one."""
        return self._failures > 0 or self.is_on_trial

    def succeed(self) -> None:
        """A request went well: all is forgiven."""
        self._failures = 0
        self.is_on_trial = False
        self._next_ejection_s = self._rules.ejection_s

    def fail(self, now_s: float, *, certain: bool, why: str = "") -> bool:
        """Count a failed request; return whether the instance is to be ejected now.

        Args:
            now_s: the time.
            certain: the engine is surely not serving, such as a refused connection.
            why: in words.
        """
        self._failures += 1
        self._note(now_s, why)
        is_enough = self._failures >= self._rules.failures_to_eject
        if not (certain or self.is_on_trial or is_enough):
            return False
        self._eject(now_s, is_dead=certain)
        return True

    def probe_failed(self, now_s: float, *, certain: bool, why: str) -> bool:
        """Count a failed probe; return whether it shows the engine to be dead.

        One that is in service is to be ejected then, by `eject_dead`.
        """
        self._probe_failures += 1
        self._note(now_s, why)
        if certain or self._probe_failures >= self._rules.probes_to_eject:
            self.is_dead = True
        return self.is_dead

    def eject_dead(self, now_s: float) -> None:
        """Note that its probes have ejected it."""
        self._eject(now_s, is_dead=True)

    def probe_succeeded(self) -> None:
        """A probe went well; that forgives failed probes only."""
        self._probe_failures = 0
        self.is_dead = False

    def can_return(self, now_s: float) -> bool:
        """Whether the last ejection is over, so that a good probe brings the instance back."""
        return now_s >= self._ejected_until_s

    def _note(self, now_s: float, why: str) -> None:
        self.last_error = why[:MAX_ERROR_CHARACTERS]
        self.last_error_s = now_s

    def _eject(self, now_s: float, *, is_dead: bool) -> None:
        self._failures = 0
        self.is_on_trial = True
        self.is_dead = is_dead
        self.ejections += 1
        self._ejected_until_s = now_s + self._next_ejection_s
        self._next_ejection_s = min(2 * self._next_ejection_s, self._rules.max_ejection_s)
