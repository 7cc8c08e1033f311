"""Answers to single prompts, merged into the one answer to their list.

Rule: choice `j` of prompt `i` has index `i * n + j`, as engines number them; there is one id, one
usage and one end, whatever the number of prompts.
"""

from __future__ import annotations

import msgspec

from pdproxy.core import sse
from pdproxy.core.chunks import read_body
from pdproxy.core.jsonfields import JsonFields, Raw, decode, encode, join_object, raw, split_object

# The same in every event of one answer: the first part to come gives them to all.
_IDENTITY = ("id", "created")
_CHOICES = msgspec.json.Decoder(list[dict[str, Raw]])
_COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")


class StreamMerger:
    """Rewrites the events of all parts of a stream; keeps the usage for its end."""

    def __init__(self, *, choices: int) -> None:
        """Make a merger for lists with `choices` answers per prompt."""
        self._choices = choices
        self._identity: dict[str, Raw] = {}
        self._usages: dict[int, JsonFields] = {}
        self._usage_event: JsonFields | None = None
        self._has_failed = False

    def rewrite(self, position: int, block: bytes) -> bytes:
        """Return the events of part `position` as events of the joint answer.

        Usage events without choices and `[DONE]` are taken out; `ending` makes the joint ones.
        After an error event nothing follows, of whatever part.
        """
        return b"".join(self._event(position, event) for event in sse.split_block(block))

    def ending(self) -> bytes:
        """Return the joint usage event; nothing if no part had one."""
        if self._usage_event is None:
            return b""
        usage = _sum_usages([self._usages[key] for key in sorted(self._usages)])
        return sse.encode_data(join_object({**self._usage_event, "usage": raw(usage)}))

    def _event(self, position: int, event: bytes) -> bytes:
        data = sse.data_of(event)
        if self._has_failed or data.strip() == b"[DONE]":
            return b""
        try:
            fields = split_object(data)
        except ValueError:
            return event
        fields = self._identified(fields)
        facts = read_body(fields)
        self._has_failed = facts.error is not None
        if facts.usage is not None and not facts.indexes:
            self._usages[position] = _usage_fields(fields)
            self._usage_event = fields
            return b""
        if facts.indexes:
            shift = position * self._choices
            fields = {**fields, "choices": _shifted(fields["choices"], shift)}
        return sse.encode_data(join_object(fields))

    def _identified(self, fields: dict[str, Raw]) -> dict[str, Raw]:
        for name in _IDENTITY:
            if name in fields:
                fields[name] = self._identity.setdefault(name, fields[name])
        return fields


class ReplyMerger:
    """Collects whole replies, in any order."""

    def __init__(self, *, choices: int, prompts: int) -> None:
        """Make a merger for `prompts` prompts with `choices` answers each."""
        self._choices = choices
        self._replies: list[JsonFields | None] = [None] * prompts

    def add(self, position: int, body: bytes) -> None:
        """Take the reply to prompt `position`."""
        self._replies[position] = split_object(body)

    def merged(self) -> bytes:
        """Return the joint reply: the first one's fields, all choices, summed usage."""
        replies = [reply for reply in self._replies if reply is not None]
        choices = [
            choice
            for position, reply in enumerate(replies)
            for choice in _choice_list(reply.get("choices"), position * self._choices)
        ]
        joint = {**replies[0], "choices": raw(choices)}
        if any(read_body(reply).usage is not None for reply in replies):
            joint["usage"] = raw(_sum_usages([_usage_fields(reply) for reply in replies]))
        return join_object(joint)


def _shifted(choices: Raw, shift: int) -> Raw:
    return Raw(encode(_choice_list(choices, shift)))


def _choice_list(choices: Raw | None, shift: int) -> list[dict[str, Raw]]:
    """Return the choices with their index shifted; all else in them stays raw."""
    plain = _raw_list(choices)
    for place, choice in enumerate(plain):
        index = decode(choice["index"]) if "index" in choice else place
        choice["index"] = raw((index if isinstance(index, int) else place) + shift)
    return plain


def _raw_list(choices: Raw | None) -> list[dict[str, Raw]]:
    """Return the choices that are objects."""
    if choices is None:
        return []
    try:
        return _CHOICES.decode(choices)
    except msgspec.DecodeError:  # such as a lone surrogate in a text
        plain = decode(choices)
    items = plain if isinstance(plain, list) else []
    return [_fields_of(item) for item in items if isinstance(item, dict)]


def _fields_of(choice: dict[str, object]) -> dict[str, Raw]:
    return {name: raw(value) for name, value in choice.items()}


def _usage_fields(fields: JsonFields) -> JsonFields:
    usage = fields.get("usage")
    try:
        return split_object(bytes(usage)) if usage is not None else {}
    except ValueError:
        return {}


def _sum_usages(usages: list[JsonFields]) -> dict[str, object]:
    """Add up the counts of all parts; cached tokens too, if any part tells them."""
    total: dict[str, object] = {}
    for usage in usages:
        for name, value in usage.items():
            total[name] = _added(total.get(name), decode(value))
    for name in _COUNTED:
        total.setdefault(name, 0)
    return total


def _added(left: object, right: object) -> object:
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if isinstance(right, dict):
        base = left if isinstance(left, dict) else {}
        return {**base, **{key: _added(base.get(key), value) for key, value in right.items()}}
    return right if left is None else left
