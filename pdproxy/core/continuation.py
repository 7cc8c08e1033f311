"""Recompute: spot that a decoder gave a choice back to be prefilled again.

Rule: a choice whose own `stop_reason` is the string `recomputed` was given back, and nothing else
is a sign of it; neither the finish reason nor the text is looked at.

Source: vllm-ascend, `recompute_scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

RECOMPUTED = "recomputed"


def is_recomputed(choice: Mapping[str, object], user_stops: Collection[str] = ()) -> bool:
    """Say whether the decoder gave this choice (of a chunk or a whole answer) back.

    Args:
        choice: one decoded element of `choices`.
        user_stops: the request's own stop strings. One of them being `recomputed` makes the
            marker an ordinary stop: the two cannot be told apart.
    """
    return choice.get("stop_reason") == RECOMPUTED and RECOMPUTED not in user_stops
