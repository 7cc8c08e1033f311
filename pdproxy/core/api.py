"""A generate request as pdproxy needs it: read once, never changed.

Rule: parsing is lenient. What only an engine can judge (types, ranges, unknown fields) is passed
on for the engine to judge; only what is no JSON object at all is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from pdproxy.core.jsonfields import JsonFields, Raw, decode, join_object, raw, split_object
from pdproxy.core.media import measure_messages
from pdproxy.core.plain import as_whole, plain
from pdproxy.errors import InvalidRequest

# Fields by which engines talk to each other. From a client they could read other requests' KV
# cache or end a decoder process (vLLM 0.32: a malformed handle is an assertion in the engine).
INTERNAL_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    }
)

# A client's own engine arguments, which vLLM joins with the fields above into one mapping.
ENGINE_ARGUMENTS = "vllm_xargs"

# More answers than an engine gives (VLLM_MAX_N_SEQUENCES); a larger number is refused there and
# must not count as load until then.
MAX_CHOICES = 16_384

_NULL = Raw(b"null")
_ZERO = Raw(b"0")
_RAW_LIST = msgspec.json.Decoder(list[Raw])
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')
_TOKEN_IDS = re.compile(rb"\[\s*(?:\[\s*)?[0-9]")
# Chat fields beside the messages that a template renders into the prompt.
_RENDERED_FIELDS = ("tools", "functions", "documents")


class Api(Enum):
    """The two APIs that are split into a prefill and a decode leg; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request of a client.

    Attributes:
        api: which API, and so which path on the engines.
        fields: the body's top-level fields, raw, without what `without_internal` takes out.
        model: the model's name, `""` if none was given.
        body_bytes: size of the body.
        text_bytes: size of what becomes the prompt, media left out.
        prompt_tokens: exact number of prompt tokens if the prompt is token ids, else None.
        media_tokens: estimate for images and audio.
        choices: answers per prompt (`n`), at least 1.
        max_output_tokens: the client's limit per choice, None if it gave none.
        wants_stream: `stream` is true.
        priority: as the client gave it; a lower one is more important, as in vLLM.
        is_decode_only: the decoder computes the prompt itself, so a prefill would be wasted.
        prompts: raw single prompts if the request holds a list of several, else empty.
        stops: the request's own stop strings.
    """

    api: Api
    fields: JsonFields
    model: str
    body_bytes: int
    text_bytes: int
    prompt_tokens: int | None
    media_tokens: int
    choices: int
    max_output_tokens: int | None
    wants_stream: bool
    priority: int
    is_decode_only: bool
    prompts: tuple[Raw, ...]
    stops: frozenset[str]

    def singles(self) -> Iterator[GenerateRequest]:
        """Yield one request for each prompt of a list."""
        for prompt in self.prompts:
            text_bytes, prompt_tokens = _measure_prompt(prompt)
            yield replace(
                self,
                fields={**self.fields, "prompt": prompt},
                body_bytes=len(bytes(prompt)),
                text_bytes=text_bytes,
                prompt_tokens=prompt_tokens,
                prompts=(),
            )


def parse_generate(api: Api, body: bytes) -> GenerateRequest:
    """Read a client's body.

    Raises:
        InvalidRequest: it is not a JSON object.
    """
    fields = without_internal(parse_object(body))
    text_bytes, prompt_tokens, media_tokens = _measure(api, fields)
    return GenerateRequest(
        api=api,
        fields=fields,
        model=_text(fields.get("model")),
        body_bytes=len(body),
        text_bytes=text_bytes,
        prompt_tokens=prompt_tokens,
        media_tokens=media_tokens,
        choices=min(MAX_CHOICES, max(1, _integer(fields.get("n")) or 1)),
        max_output_tokens=_output_limit(api, fields),
        wants_stream=_is_true(fields.get("stream")),
        priority=_integer(fields.get("priority")) or 0,
        is_decode_only=_is_decode_only(api, fields),
        prompts=_list_of_prompts(api, fields.get("prompt")),
        stops=_stops(fields.get("stop")),
    )


def parse_object(body: bytes) -> dict[str, Raw]:
    """Split a client's body into its top-level fields.

    Raises:
        InvalidRequest: it is not a JSON object.
    """
    try:
        return split_object(body)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def without_internal(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return the fields less those that only engines may set; the same object if it has none.

    They are taken out of `vllm_xargs` too: what stands there under their name is as good.
    Source: vLLM 0.32, `to_sampling_params`.
    """
    if not INTERNAL_FIELDS.isdisjoint(fields):
        fields = {name: value for name, value in fields.items() if name not in INTERNAL_FIELDS}
    if ENGINE_ARGUMENTS not in fields:
        return fields
    try:
        arguments = split_object(bytes(fields[ENGINE_ARGUMENTS]))
    except ValueError:
        return fields
    kept = {name: value for name, value in arguments.items() if name not in INTERNAL_FIELDS}
    if len(kept) == len(arguments):
        return fields
    return {**fields, ENGINE_ARGUMENTS: Raw(join_object(kept))}


def _measure(api: Api, fields: JsonFields) -> tuple[int, int | None, int]:
    """Return text bytes, exact prompt tokens if known, and media tokens."""
    if api is Api.COMPLETIONS:
        text_bytes, prompt_tokens = _measure_prompt(fields.get("prompt", _NULL))
        return text_bytes, prompt_tokens, 0
    text_bytes, media_tokens = measure_messages(bytes(fields.get("messages", _NULL)))
    for name in _RENDERED_FIELDS:
        if name in fields:
            text_bytes += len(memoryview(fields[name]))
    return text_bytes, None, media_tokens


def _measure_prompt(prompt: Raw) -> tuple[int, int | None]:
    """Return text bytes and, for token ids, their number."""
    text = bytes(prompt)
    if _TOKEN_IDS.match(text):
        return 0, text.count(b",") + 1
    return len(text), None


def _list_of_prompts(api: Api, prompt: Raw | None) -> tuple[Raw, ...]:
    """Return the prompts of a list of two or more; a single one travels as it came."""
    if api is not Api.COMPLETIONS or prompt is None:
        return ()
    text = bytes(prompt)
    if not _LIST_OF_PROMPTS.match(text):
        return ()
    prompts = _items(text)
    return tuple(prompts) if len(prompts) > 1 else ()


def _items(text: bytes) -> list[Raw]:
    try:
        return _RAW_LIST.decode(text)
    except msgspec.DecodeError:  # such as a lone surrogate, which engines take
        found = decode(text)
    return [raw(item) for item in found] if isinstance(found, list) else []


def _is_decode_only(api: Api, fields: JsonFields) -> bool:
    """Tell whether the decoder would compute the whole prompt whatever KV it was given.

    Prompt log-probabilities need every position's logits and beam search returns no handle. In
    chat, `echo` alone asks for them, since `top_logprobs` is 0 there unless it is null.
    Source: vLLM 0.32, seen on engines; for chat `chat_completion/protocol.py`.
    """
    if _is_given(fields.get("prompt_logprobs")) or _is_true(fields.get("use_beam_search")):
        return True
    if not _is_true(fields.get("echo")):
        return False
    if api is Api.CHAT:
        return _is_given(fields.get("top_logprobs", _ZERO))
    return _is_given(fields.get("logprobs"))


def _output_limit(api: Api, fields: JsonFields) -> int | None:
    """Return the limit that the engine will apply: `max_completion_tokens` wins."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = _integer(fields.get(name))
        if limit is not None:
            return limit
    # The completions API has a default of its own (OpenAI API reference).
    return 16 if api is Api.COMPLETIONS else None


def _stops(value: Raw | None) -> frozenset[str]:
    if not _is_given(value):
        return frozenset()
    found = plain(value)
    items = found if isinstance(found, list) else [found]
    return frozenset(item for item in items if isinstance(item, str))


def _is_given(value: Raw | None) -> bool:
    return value is not None and bytes(value) not in (b"null", b"false")


def _is_true(value: Raw | None) -> bool:
    return value is not None and bytes(value) == b"true"


def _integer(value: Raw | None) -> int | None:
    return as_whole(plain(value))


def _text(value: Raw | None) -> str:
    """Return a string that can be logged and counted under, whatever it holds."""
    text = plain(value)
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""
