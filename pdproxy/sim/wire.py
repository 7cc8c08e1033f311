"""What chat and completions answers share on the wire: usage, logprobs, events.

Source: recorded answers of vLLM 0.32; keys stand in the order of real answers.
"""

import time

import orjson

from pdproxy.sim import tokenizer
from pdproxy.sim.config import SimConfig
from pdproxy.sim.model import Step, alternatives, logprob, prefix_state
from pdproxy.sim.requests import GenerateRequest

FINGERPRINT = "vllm-0.32.0-5im5im5i"
DONE = b"data: [DONE]\n\n"


def created_now() -> int:
    """`created`: the wall clock, whole seconds."""
    return time.time_ns() // 1_000_000_000


def event(value: object) -> bytes:
    """One SSE event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def counted(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """The three numbers of a usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def whole_usage(
    request: GenerateRequest, config: SimConfig, completion_tokens: int, cached_tokens: int
) -> dict[str, object]:
    """`usage` of an answer that is not streamed."""
    details = {"cached_tokens": cached_tokens} if config.prompt_tokens_details else None
    return counted(request.prompt_tokens, completion_tokens) | {
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def final_usage(
    request: GenerateRequest, config: SimConfig, completion_tokens: int, cached_tokens: int
) -> dict[str, object]:
    """`usage` of a stream's last chunk: keys without a value are left out."""
    usage = counted(request.prompt_tokens, completion_tokens)
    if config.prompt_tokens_details:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def continuous_usage(request: GenerateRequest, completion_tokens: int) -> dict[str, object]:
    """`usage` in a stream's earlier chunks."""
    counts = counted(request.prompt_tokens, completion_tokens)
    return counts | {"completion_tokens_details": None}


def chat_logprobs(steps: list[Step], count: int | None) -> dict[str, object] | None:
    """`logprobs` of a chat choice."""
    if count is None:
        return None
    content: list[dict[str, object]] = []
    for step in steps:
        for state, token in zip(step.states, step.tokens, strict=True):
            entry = _chat_entry(token, logprob(state, token))
            top = [_chat_entry(*other) for other in alternatives(state, token, count)]
            content.append(entry | {"top_logprobs": top})
    return {"content": content}


def _chat_entry(token: int, value: float) -> dict[str, object]:
    text = tokenizer.token_text(token)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def completion_logprobs(
    tokens: list[tuple[int, int | None]], count: int, offset: int
) -> tuple[dict[str, object], int]:
    """`logprobs` of a completions choice.

    Args:
        tokens: Pairs of token and the state before it; no state for a prompt's first token.
        count: Alternatives per token.
        offset: Where in the choice's text the first token stands.

    Returns:
        The object, and where the next token will stand.
    """
    offsets: list[int] = []
    values: list[float | None] = []
    texts: list[str] = []
    top: list[dict[str, float] | None] = []
    for token, state in tokens:
        text = tokenizer.token_text(token)
        offsets.append(offset)
        offset += len(text)
        texts.append(text)
        values.append(None if state is None else logprob(state, token))
        others = [] if state is None else alternatives(state, token, max(count, 1))
        named = {tokenizer.token_text(other): value for other, value in others}
        top.append(None if state is None else named)
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": top,
    }, offset


def prompt_pairs(prompt: list[int]) -> list[tuple[int, int | None]]:
    """A prompt's tokens with the state before each."""
    pairs: list[tuple[int, int | None]] = []
    state = 0
    for position, token in enumerate(prompt):
        pairs.append((token, state if position else None))
        state = prefix_state((token,), state)
    return pairs


def prompt_logprobs(prompt: list[int], count: int) -> list[dict[str, object] | None]:
    """`prompt_logprobs`: per token a map of token ids, null for the first."""
    entries: list[dict[str, object] | None] = []
    for token, state in prompt_pairs(prompt):
        if state is None:
            entries.append(None)
            continue
        entries.append(
            {
                str(other): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(other),
                }
                for rank, (other, value) in enumerate(alternatives(state, token, count + 1), 1)
            }
        )
    return entries
