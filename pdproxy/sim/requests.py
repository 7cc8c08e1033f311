"""A checked generation request, the same for every API of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pdproxy.sim.model import Sampling
from pdproxy.sim.scripts import Grammar

JsonObject = Mapping[str, object]
Api = Literal["chat", "completions", "responses", "messages", "generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request.

    Attributes:
        request_id: The answer's id, prefix included: `chatcmpl-...`.
        prompts: Token ids; several only for a list of prompts on /v1/completions.
        n: Choices per prompt.
        logprobs: How many alternatives per token; None if logprobs are not wanted.
        kv_params: `kv_transfer_params` as received.
        parses_tools: Tool calls in the text become `tool_calls`.
        parses_reasoning: The engine has a reasoning parser.
        thinks: The prompt's template opened a thinking block or could have.
        opened_text: Text of an open last message that `echo` repeats.
    """

    api: Api
    request_id: str
    model: str
    prompts: tuple[list[int], ...]
    sampling: Sampling
    n: int = 1
    grammar: Grammar | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    echo: bool = False
    kv_params: JsonObject | None = None
    cache_salt: str = ""
    parses_tools: bool = False
    parses_reasoning: bool = False
    thinks: bool = False
    opened_text: str = ""

    @property
    def wants_handle(self) -> bool:
        """Whether the prompt is to stay pinned for a decoder."""
        return self.kv_params is not None and self.kv_params.get("do_remote_decode") is True

    @property
    def has_handle(self) -> bool:
        """Whether the prompt's KV is to be pulled from a prefiller."""
        return self.kv_params is not None and self.kv_params.get("do_remote_prefill") is True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts: `usage.prompt_tokens`."""
        return sum(map(len, self.prompts))
