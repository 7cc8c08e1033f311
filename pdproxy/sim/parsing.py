"""Bodies of /v1/chat/completions and /v1/completions -> checked requests, as vLLM checks them.

Source of the rules and messages: recorded error answers of vLLM 0.32; long messages are shortened.
"""

import secrets
from collections.abc import Mapping
from typing import TypedDict

from pdproxy.sim import fields, template, tokenizer
from pdproxy.sim.config import SimConfig
from pdproxy.sim.constraints import grammar_of
from pdproxy.sim.model import Sampling
from pdproxy.sim.problems import bad_request, malformed, unknown_model
from pdproxy.sim.requests import GenerateRequest

JsonObject = Mapping[str, object]

_COMPLETIONS_MAX_TOKENS = 16
_MAX_LOGPROBS = 20


class _Common(TypedDict):
    """What `GenerateRequest` takes alike for chat and completions."""

    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_logprobs: int | None
    return_token_ids: bool
    echo: bool
    kv_params: JsonObject | None
    cache_salt: str


_RANGES = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}


def parse_chat(body: JsonObject, given_id: str | None, config: SimConfig) -> GenerateRequest:
    """A chat request.

    Args:
        body: The request's body.
        given_id: The `X-Request-Id` header.
        config: The engine's limits.

    Raises:
        Problem: What vLLM would answer instead.
    """
    fields.required(body, "messages")
    model = check_common(body, config)
    turn = chat_turn(body, config)
    prompt = tokenizer.encode(template.render(turn))
    limit = fields.whole(body, "max_completion_tokens")
    if limit is None:
        limit = fields.whole(body, "max_tokens")
    wants_logprobs = fields.flag(body, "logprobs")
    alternatives = fields.whole(body, "top_logprobs")
    if alternatives is not None and not wants_logprobs:
        raise bad_request("`logprobs` must be set to true with top_logprobs.", "top_logprobs")
    _check_logprobs(alternatives, "top_logprobs")
    last = turn.messages[-1] if turn.messages else {}
    return GenerateRequest(
        api="chat",
        request_id=request_id("chatcmpl", body, given_id),
        model=model,
        prompts=(prompt,),
        sampling=sampling(body, config, prompt, limit),
        grammar=grammar_of(body, turn.tools),
        logprobs=(alternatives or 0) if wants_logprobs else None,
        parses_tools=bool(turn.tools),
        parses_reasoning=config.reasoning,
        thinks=template.thinks(turn),
        opened_text=template.message_text(last.get("content")),
        **_common(body),
    )


def parse_completion(body: JsonObject, given_id: str | None, config: SimConfig) -> GenerateRequest:
    """A completions request; see `parse_chat`."""
    model = check_common(body, config)
    prompts = _prompts(body.get("prompt"))
    limit = fields.whole(body, "max_tokens")
    limit = _COMPLETIONS_MAX_TOKENS if limit is None else limit
    logprobs = fields.whole(body, "logprobs")
    _check_logprobs(logprobs, "logprobs")
    rules = [sampling(body, config, prompt, limit) for prompt in prompts]
    return GenerateRequest(
        api="completions",
        request_id=request_id("cmpl", body, given_id),
        model=model,
        prompts=prompts,
        sampling=rules[0],
        grammar=grammar_of(body, ()),
        logprobs=logprobs,
        **_common(body),
    )


def request_id(prefix: str, body: JsonObject, given_id: str | None) -> str:
    """The answer's id: the header wins over the body's `request_id`, else it is random."""
    own = body.get("request_id")
    return f"{prefix}-{given_id or (own if isinstance(own, str) else secrets.token_hex(8))}"


def check_common(body: JsonObject, config: SimConfig) -> str:
    """Check what all APIs have in common; the model's name, which may be absent."""
    model = body.get("model")
    if model is not None and model != config.model:
        raise unknown_model(str(model), config.model)
    stream = fields.flag(body, "stream")
    if fields.mapping(body, "stream_options") is not None and not stream:
        message = "Stream options can only be defined when `stream=True`."
        raise bad_request(message, "stream_options")
    if body.get("cache_salt") == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise bad_request(message, "cache_salt")
    fields.mapping(body, "kv_transfer_params")
    return config.model


def chat_turn(body: JsonObject, config: SimConfig) -> template.Turn:
    """What the chat template gets of a body; also for /tokenize."""
    messages = fields.objects(body, "messages")
    for position, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            where = f"body.messages.{position}.role"
            raise malformed("missing", where, "Field required", f"<dict of {len(message)} items>")
    if not messages:
        raise bad_request("At least one message is needed.", "messages")
    goes_on = fields.flag(body, "continue_final_message")
    if goes_on and fields.flag(body, "add_generation_prompt", default=True):
        both = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise bad_request(both)
    tools = fields.objects(body, "tools")
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto") and not tools:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    return template.Turn(
        messages=messages,
        tools=tools if choice != "none" else (),
        arguments=fields.mapping(body, "chat_template_kwargs") or {},
        add_generation_prompt=fields.flag(body, "add_generation_prompt", default=True),
        continue_final_message=goes_on,
        reasoning=config.reasoning,
    )


def sampling(body: JsonObject, config: SimConfig, prompt: list[int], limit: int | None) -> Sampling:
    """The checked sampling rules of a request."""
    least = fields.whole(body, "min_tokens") or 0
    stop = fields.texts(body, "stop")
    limit = _output_limit(config, len(prompt), limit)
    if least > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        raise bad_request(message)
    if "" in stop:
        raise bad_request("stop cannot contain an empty string.", "stop")
    is_sampled = _check_ranges(body, config)
    seed = fields.whole(body, "seed") if is_sampled else None
    budget = fields.whole(body, "thinking_token_budget")
    thinking = config.reasoning_tokens if budget is None else budget
    return Sampling(
        max_tokens=limit,
        min_tokens=least,
        seed=config.model_seed,
        own_seed=seed,
        eos_odds=config.eos_odds,
        stop=stop,
        stop_token_ids=frozenset(fields.wholes(body, "stop_token_ids")),
        include_stop=fields.flag(body, "include_stop_str_in_output"),
        ignore_eos=fields.flag(body, "ignore_eos"),
        skip_special=fields.flag(body, "skip_special_tokens", default=True),
        thinking_tokens=thinking if config.reasoning else 0,
    )


def _output_limit(config: SimConfig, prompt_tokens: int, limit: int | None) -> int:
    """The most tokens an answer may have."""
    longest = config.max_model_len
    if prompt_tokens >= longest or prompt_tokens > config.num_blocks * config.block_size:
        message = (
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains {prompt_tokens} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt."
        )
        raise bad_request(message, "input_tokens", prompt_tokens)
    if limit is None:
        return longest - prompt_tokens
    if limit < 1:
        raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if limit > longest:
        message = (
            f"max_tokens={limit} cannot be greater than max_model_len={longest}. "
            "Please request fewer output tokens."
        )
        raise bad_request(message, "max_tokens", limit)
    if prompt_tokens + limit > longest:
        message = (
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{limit} output tokens and your prompt contains {prompt_tokens} input tokens."
        )
        raise bad_request(message, "input_tokens", prompt_tokens)
    return limit


def _check_ranges(body: JsonObject, config: SimConfig) -> bool:
    """Check the numbers of sampling; whether the request samples at all."""
    temperature = fields.number(body, "temperature")
    if temperature is not None and temperature < 0:
        message = f"temperature must be non-negative, got {temperature}."
        raise bad_request(message, "temperature", temperature)
    for name, (low, high) in _RANGES.items():
        value = fields.number(body, name)
        if value is not None and not low <= value <= high:
            message = f"{name} must be in [{low}, {high}], got {value}."
            raise bad_request(message, name, value)
    n = fields.whole(body, "n")
    if n is not None and n < 1:
        raise bad_request(f"n must be at least 1, got {n}.", "n", n)
    if n is not None and n > config.max_n_sequences:
        most = config.max_n_sequences
        raise bad_request(f"n must be at most {most}, got {n}.", "n", n)
    is_greedy = temperature == 0
    if is_greedy and n is not None and n > 1 and not body.get("use_beam_search"):
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
    return not is_greedy


def _check_logprobs(count: int | None, name: str) -> None:
    if count is not None and not 0 <= count <= _MAX_LOGPROBS:
        message = f"{name} must be between 0 and {_MAX_LOGPROBS}, got {count}."
        raise bad_request(message, name, count)


def _common(body: JsonObject) -> _Common:
    """The fields that chat and completions share."""
    options = fields.mapping(body, "stream_options") or {}
    stream = fields.flag(body, "stream")
    prompt_logprobs = fields.whole(body, "prompt_logprobs")
    if stream and prompt_logprobs is not None:
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise bad_request(message, "prompt_logprobs")
    salt = body.get("cache_salt")
    kv_params = fields.mapping(body, "kv_transfer_params")
    return {
        "n": fields.whole(body, "n") or 1,
        "stream": stream,
        "include_usage": options.get("include_usage") is True,
        "continuous_usage": options.get("continuous_usage_stats") is True,
        "prompt_logprobs": prompt_logprobs,
        "return_token_ids": fields.flag(body, "return_token_ids"),
        "echo": fields.flag(body, "echo"),
        # Beam search hands nothing over.
        "kv_params": None if body.get("use_beam_search") else kv_params,
        "cache_salt": salt if isinstance(salt, str) else "",
    }


def _prompts(prompt: object) -> tuple[list[int], ...]:
    """Token ids of a text, of ids, or of a list of either."""
    if prompt in (None, "", []):
        message = "Either prompt or prompt_embeds must be provided and non-empty."
        raise bad_request(message, "prompt")
    if isinstance(prompt, str):
        return (tokenizer.encode(prompt),)
    if isinstance(prompt, list) and all(isinstance(item, str) for item in prompt):
        return tuple(tokenizer.encode(item) for item in prompt)
    if isinstance(prompt, list) and all(isinstance(item, list) for item in prompt):
        return tuple(token_ids(item) for item in prompt)
    return (token_ids(prompt),)


def token_ids(prompt: object) -> list[int]:
    """A prompt given as token ids."""
    if not isinstance(prompt, list) or not all(type(item) is int for item in prompt) or not prompt:
        raise malformed("string_type", "body.prompt", "Input should be a valid string", "..")
    for item in prompt:
        if not 0 <= item < tokenizer.VOCAB_SIZE:
            raise bad_request(f"Token id {item} is out of vocabulary", "prompt")
    return prompt
