"""Runs inside an engine: lets a request name what the model says.

A request with `vllm_xargs: {"recite": [token ids]}` is answered with these tokens. What comes next
follows from the text alone, as with a model: it is the token behind the longest start of the list
that prompt and output so far end with. So a round that goes on from other text is seen.

Give engines `--logits-processors recitation:Recitation`, this folder being in their PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore] # an engine has it, the proxy does not
from vllm.v1.sample.logits_processor import (  # type: ignore[import-not-found,unused-ignore] # as above
    AdapterLogitsProcessor,
)

Logits = Any


class Recitation(AdapterLogitsProcessor):  # type: ignore[misc,unused-ignore] # untyped here
    """Leaves of each row of logits the one token that comes next."""

    def is_argmax_invariant(self) -> bool:
        """Say that it changes which token is the likeliest."""
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[Sequence[int], Sequence[int], Logits], Logits] | None:
        """Return what does so for one request, None if that names nothing."""
        wanted = (params.extra_args or {}).get("recite")
        if not wanted:
            return None

        def recite(prompt: Sequence[int], output: Sequence[int], logits: Logits) -> Logits:
            chosen = next_token(wanted, [*prompt, *output])
            only = torch.full_like(logits, float("-inf"))
            only[chosen] = 0.0
            return only

        return recite


def next_token(wanted: Sequence[int], so_far: Sequence[int]) -> int:
    """Return the token of `wanted` behind the longest start of it that `so_far` ends with."""
    for size in range(min(len(wanted) - 1, len(so_far)), 0, -1):
        if list(so_far[-size:]) == list(wanted[:size]):
            return int(wanted[size])
    return int(wanted[0])
