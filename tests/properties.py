"""How property tests run: the same examples each time, and no haste on a busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNHURRIED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
