"""The limits that dispatch keeps, as numbers with units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdproxy.upstream.limits import Timeouts


class TokenIds(StrEnum):
    """When engines are asked for token ids, which cost them and the wire."""

    AUTO = "auto"  # once one has given an answer of the model back, and for token-id prompts
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """Limits of one request.

    Attributes:
        max_attempts: attempts per leg and round, in total, at least 1.
        retry_delay_s: first wait between attempts on the same instance.
        prefill: timeouts of the prefill leg; its head comes when the prompt is computed.
        decode_stream: timeouts of a streamed decode leg; its head comes at once.
        decode_whole: timeouts of one that is not streamed; its head comes with the whole answer.
        first_token_s: decode request to first event of a stream; None for no limit.
        kv_handle_ttl_s: a KV handle older than this is not used.
        max_event_bytes: largest single event of a stream.
        max_answer_bytes: largest answer that is no stream.
        max_parallel_prompts: prompts of one list that are worked on at once.
        recompute: continue what a decoder gave back; else it ends with an error.
        token_ids: when the engines are asked for token ids.
        continue_lost: continue an answer whose decoder was lost in the middle, too.
        decode_alone: a decoder computes the prompt if no prefiller can; else the request fails.
        max_rounds: prefill and decode of one prompt, the first included.
    """

    max_attempts: int
    retry_delay_s: float
    prefill: Timeouts
    decode_stream: Timeouts
    decode_whole: Timeouts
    first_token_s: float | None
    kv_handle_ttl_s: float
    max_event_bytes: int
    max_answer_bytes: int
    max_parallel_prompts: int
    recompute: bool = False
    token_ids: TokenIds = TokenIds.AUTO
    continue_lost: bool = False
    max_rounds: int = 1
    decode_alone: bool = False
