"""Read and edit OpenAI replies and stream chunks.

Rule: what is not read is not touched. An edit that changes nothing returns the object it was
given; one that does changes the named field and leaves the bytes of every other value alone.

"Body" is the JSON object of a whole answer, "event" one SSE event that carries a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from pdproxy.core.continuation import is_recomputed
from pdproxy.core.jsonfields import JsonFields, decode, encode, join_object, raw, split_object
from pdproxy.core.plain import as_whole
from pdproxy.core.sse import data_of, encode_data, with_data
from pdproxy.errors import PDProxyError

# What an engine tells the proxy and no client: KV handles and their encoder-side kin.
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")

_DONE_DATA = b"[DONE]"
_NULL = msgspec.Raw(b"null")
_EMPTY: JsonFields = {}
_MAX_COUNT = 2**53  # metrics are floats, which count exactly up to here

# Where engines put generated output, in a delta, a message, or a completion's choice itself.
_TEXT_FIELDS = ("content", "text", "reasoning", "reasoning_content", "refusal")
_CONTENT_FIELDS = (*_TEXT_FIELDS, "tool_calls", "function_call", "audio")
# What else is lost if the event that carries it is dropped.
_OTHER_OUTPUT_FIELDS = ("role", "logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")


# Structs, not dataclasses: with usage in each chunk these are built once a token.
class Usage(msgspec.Struct, frozen=True):
    """Token counts of an answer; `cached_tokens` is None if the engine does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class ChunkFacts(msgspec.Struct, frozen=True):
    """What a chunk or a whole answer says; choices are named by their index.

    Attributes:
        finished: finish reason of each choice that ended, as the engine spells it ("stop",
            "error", "abort", ...); a recomputed choice is not among them.
        recomputed: choices that the decoder gave back.
        usage: token counts, if there is a usage object.
        error: raw JSON of a top-level `error` that is not null.
        has_content: some choice carries generated output; a role alone is none.
        indexes: all choices present.
        is_done: the `[DONE]` event.
        has_internal: fields for the proxy are present, see `INTERNAL_FIELDS`.
    """

    finished: Mapping[int, str] = {}
    recomputed: frozenset[int] = frozenset()
    usage: Usage | None = None
    error: bytes | None = None
    has_content: bool = False
    indexes: frozenset[int] = frozenset()
    is_done: bool = False
    has_internal: bool = False


_NO_FACTS = ChunkFacts()
_DONE_FACTS = ChunkFacts(is_done=True)


class _PlainChoice(msgspec.Struct, gc=False):
    """A choice that goes on: decoding fails on any other."""

    finish_reason: None = None
    stop_reason: None = None


class _PlainChunk(msgspec.Struct, gc=False):
    """A chunk that only brings output: decoding fails on any other."""

    choices: list[_PlainChoice] | None = None
    usage: None = None
    error: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


_decode_plain = msgspec.json.Decoder(_PlainChunk).decode


def is_plain(block: bytes) -> bool:
    """Say whether no event of a normalised block needs a look: all are output and nothing else.

    True is certain: no finish reason, no recompute, no usage, no error, no `[DONE]`, nothing
    internal. False is not: it only means that `read_event` shall tell.
    """
    try:
        _decode_plain(block[5:])
    except (msgspec.DecodeError, RecursionError):
        return block.find(b"\n") < len(block) - 2 and _are_plain(block)
    return True


def read_event(event: bytes, *, user_stops: frozenset[str] = frozenset()) -> ChunkFacts:
    """Return what one event says; nothing at all if its data is not a JSON object."""
    data = data_of(event)
    if data.strip() == _DONE_DATA:
        return _DONE_FACTS
    try:
        chunk = decode(data)
    except ValueError:
        return _NO_FACTS
    return _read(chunk, user_stops) if isinstance(chunk, dict) else _NO_FACTS


def read_body(fields: JsonFields, *, user_stops: frozenset[str] = frozenset()) -> ChunkFacts:
    """Return what the fields of a whole answer, or of a chunk, say."""
    names = ("choices", "usage", "error")
    body: dict[str, object] = {name: _value(fields.get(name)) for name in names}
    # Handles may be megabytes: that they are there is enough.
    body |= {name: not _is_null(fields.get(name)) or None for name in INTERNAL_FIELDS}
    return _read(body, user_stops)


def with_cached_tokens(event_or_body: bytes, cached_tokens: int) -> bytes:
    """Return the event, or the JSON body, with its figure set; see `set_cached_tokens`."""
    return _edited(event_or_body, lambda fields: set_cached_tokens(fields, cached_tokens))


def set_cached_tokens(fields: JsonFields, cached_tokens: int) -> JsonFields:
    """Return `fields` with `usage.prompt_tokens_details.cached_tokens` set, if there is a usage.

    A decoder counts every transferred block as a cache hit; only the prefiller's figure is true.
    """
    usage = _object(fields.get("usage"))
    if usage is None:
        return fields
    details = _object(usage.get("prompt_tokens_details")) or _EMPTY
    figure = raw(cached_tokens)
    if details.get("cached_tokens") == figure:
        return fields
    details = {**details, "cached_tokens": figure}
    usage = {**usage, "prompt_tokens_details": msgspec.Raw(join_object(details))}
    return {**fields, "usage": msgspec.Raw(join_object(usage))}


def without_internal(event_or_body: bytes) -> bytes:
    """Return the event, or the JSON body, without the fields that are for the proxy only."""
    return _edited(event_or_body, strip_internal)


def strip_internal(fields: JsonFields) -> JsonFields:
    """Return `fields` without the `INTERNAL_FIELDS` that hold something; null ones stay."""
    leaking = [name for name in INTERNAL_FIELDS if not _is_null(fields.get(name))]
    if not leaking:
        return fields
    return {name: value for name, value in fields.items() if name not in leaking}


def without_recomputed(event: bytes, indexes: Collection[int]) -> bytes:
    """Return the event with the ends of the given choices undone: their text stays.

    Their `finish_reason` and `stop_reason` become null. `b""` if the event then says nothing:
    no output, no usage, no error, no other choice.
    """
    facts = read_event(event)
    if facts.indexes.isdisjoint(indexes):
        return event
    try:
        fields = split_object(data_of(event))
    except ValueError:  # NaN in it: no client could read it, and it must not show the marker
        return b""
    says_more = facts.usage is not None or facts.error is not None
    if not says_more and facts.indexes.issubset(indexes) and not _has_output(fields):
        return b""
    return with_data(event, join_object(_reopen_choices(fields, indexes)))


def error_event(error: PDProxyError) -> bytes:
    r"""Return the event that tells a client of an error: `data: {"error":{...}}\n\n`."""
    return encode_data(encode(error.to_openai()))


def _are_plain(block: bytes) -> bool:
    try:
        for data in block[5:-2].split(b"\n\ndata:"):
            _decode_plain(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _read(chunk: Mapping[str, object], user_stops: frozenset[str]) -> ChunkFacts:
    choices = _choices(chunk.get("choices"))
    finished: dict[int, str] = {}
    recomputed: set[int] = set()
    for index, choice in choices:
        if is_recomputed(choice, user_stops):
            recomputed.add(index)
        elif choice.get("finish_reason"):
            finished[index] = str(choice["finish_reason"])
    error = chunk.get("error")
    return ChunkFacts(
        finished=finished,
        recomputed=frozenset(recomputed),
        usage=_usage(chunk.get("usage")),
        error=None if error is None else encode(error),
        has_content=any(_has_any(choice, _CONTENT_FIELDS) for _, choice in choices),
        indexes=frozenset(index for index, _ in choices),
        has_internal=any(chunk.get(name) is not None for name in INTERNAL_FIELDS),
    )


def _edited(event_or_body: bytes, edit: Callable[[JsonFields], JsonFields]) -> bytes:
    """Apply `edit` to the JSON object of an event or a body; the same object if it changes none."""
    is_body = event_or_body.lstrip().startswith(b"{")
    try:
        fields = split_object(event_or_body if is_body else data_of(event_or_body))
    except ValueError:
        return event_or_body
    edited = edit(fields)
    if edited is fields:
        return event_or_body
    if is_body:
        return join_object(edited)
    return with_data(event_or_body, join_object(edited))


def _has_output(fields: JsonFields) -> bool:
    names = (*_CONTENT_FIELDS, *_OTHER_OUTPUT_FIELDS)
    return any(_has_any(choice, names) for _, choice in _choices(_value(fields.get("choices"))))


def _reopen_choices(fields: JsonFields, indexes: Collection[int]) -> JsonFields:
    choices = msgspec.json.decode(fields["choices"], type=list[msgspec.Raw])
    for position, item in enumerate(choices):
        choice = _object(item)
        if choice is None or _index(_value(choice.get("index")), position) not in indexes:
            continue
        ends = {name: _NULL for name in ("finish_reason", "stop_reason") if name in choice}
        choices[position] = msgspec.Raw(join_object({**choice, **ends}))
    return {**fields, "choices": raw(choices)}


def _choices(value: object) -> list[tuple[int, Mapping[str, object]]]:
    """Return (index, choice) of each element of `choices` that is an object."""
    if not isinstance(value, list):
        return []
    return [
        (_index(choice.get("index"), position), choice)
        for position, choice in enumerate(value)
        if isinstance(choice, dict)
    ]


def _index(value: object, position: int) -> int:
    return value if isinstance(value, int) else position


def _has_any(choice: Mapping[str, object], names: Collection[str]) -> bool:
    """Say whether a choice, its delta or its message holds one of the fields, not empty."""
    for part in (choice.get("delta"), choice.get("message"), choice):
        if isinstance(part, dict):
            for name in names:
                if part.get(name):
                    return True
    return False


def _usage(value: object) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(value.get("prompt_tokens")) or 0,
        completion_tokens=_count(value.get("completion_tokens")) or 0,
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: object) -> int | None:
    """Return a number of tokens; what none can be would break counters and loads."""
    count = as_whole(value)
    return count if count is not None and 0 <= count <= _MAX_COUNT else None


def _value(value: msgspec.Raw | None) -> object:
    try:
        return None if value is None else decode(value)
    except ValueError:
        return None


def _object(value: msgspec.Raw | None) -> JsonFields | None:
    """Return the fields of a raw value, None if it is no object."""
    try:
        return None if value is None else split_object(bytes(value))
    except ValueError:
        return None


def _is_null(value: msgspec.Raw | None) -> bool:
    return value is None or value == _NULL
