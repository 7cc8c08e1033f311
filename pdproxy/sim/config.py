"""Everything that can be set on one simulated engine."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]
LoadFailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """One engine. All delays are in seconds and are 0 by default: as fast as the machine allows.

    A step of the engine takes `prefill_base_s + prefill_per_token_s * uncached prompt tokens` if it
    prefills and `decode_base_s + decode_per_request_s * batch` if it decodes; a KV pull takes
    `transfer_base_s + transfer_per_token_s * tokens`.

    Attributes:
        role: What the engine says it is; any role serves any request, as vLLM does.
        port: 0 takes a free one.
        model: The served name; requests that name another model get a 404.
        engine_id: `remote_engine_id` of the handles; random if None.
        max_model_len: Prompt plus output tokens of one request.
        num_blocks: KV capacity, in blocks of `block_size` tokens.
        max_num_seqs: Running requests at once; the rest waits.
        max_n_sequences: Choices of one request.
        max_queued_requests: Beyond it the engine answers 503; None is without limit.
        kv_lease_s: How long a prefilled prompt stays pinned for its decoder.
        tokens_per_step: Tokens per engine step and event, as with speculative decoding.
        eos_odds: A free token is the end of the answer once in so many.
        model_seed: The "weights": engines with different seeds write different texts.
        prompt_tokens_details: Report `usage.prompt_tokens_details.cached_tokens`.
        reasoning: Answers begin with `reasoning_tokens` tokens of reasoning.
        load_failure_policy: After a failed KV pull: end the request with an error, or prefill here.
        load_failure_delay_s: How long an unreachable prefiller is waited for.
        crash_on_bad_handle: A malformed handle ends the engine, as it ends vLLM; else only a 500.
        request_id_headers: Answer with an `x-request-id` header.
        scale_out: Open the token-in, token-out endpoints; else they answer 403.
        api_key: Bearer token wanted on /v1 and /inference.
        keep_requests: How many received requests are remembered for tests.
    """

    role: Role = "both"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "sim"
    root: str = "/models/sim"
    engine_id: str | None = None
    max_model_len: int = 8192
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 256
    max_n_sequences: int = 16384
    max_queued_requests: int | None = None
    kv_lease_s: float = 30.0
    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    decode_base_s: float = 0.0
    decode_per_request_s: float = 0.0
    transfer_base_s: float = 0.0
    transfer_per_token_s: float = 0.0
    tokens_per_step: int = 1
    eos_odds: int = 2048
    model_seed: int = 0
    prompt_tokens_details: bool = True
    reasoning: bool = False
    reasoning_tokens: int = 8
    load_failure_policy: LoadFailurePolicy = "fail"
    load_failure_delay_s: float = 0.0
    crash_on_bad_handle: bool = False
    request_id_headers: bool = False
    scale_out: bool = False
    api_key: str | None = None
    keep_requests: int = 0
