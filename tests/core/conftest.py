"""Hypothesis without a deadline for one example: on a busy machine that is luck."""

import hypothesis

hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")
