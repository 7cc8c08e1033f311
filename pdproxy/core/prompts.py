"""The prompt of a request with the answer so far behind it: as token ids, text, or messages.

Rule: what the client sent is not spelled anew: ids and messages are joined as raw JSON.
"""

from __future__ import annotations

import msgspec

from pdproxy.core.answer import Answer, ChoiceAnswer
from pdproxy.core.api import Api, GenerateRequest
from pdproxy.core.jsonfields import Raw, raw
from pdproxy.core.plain import as_list, as_object, as_text, plain

_TRUE = Raw(b"true")
_NULL = Raw(b"null")
_LINE_END = "\n"

_split_list = msgspec.json.Decoder(list[Raw]).decode


def prompt_ids(request: GenerateRequest, answer: Answer) -> Raw | None:
    """Return the raw list of the prompt's ids, as the engine gave them or the client sent them."""
    if request.fields.get("prompt_embeds") is not None:
        return None
    if answer.prompt_ids is not None:
        return answer.prompt_ids
    prompt = _single(request)
    return prompt if prompt is not None and bytes(prompt).startswith(b"[") else None


def prompt_text(request: GenerateRequest) -> str | None:
    """Return the prompt of a completions request, None if it is no text."""
    prompt = plain(_single(request))
    return prompt if isinstance(prompt, str) else None


def joined_ids(ids: Raw, kept: list[int]) -> tuple[Raw, int]:
    """Return the raw list of the prompt's ids and the kept ones, and how many they are."""
    items = bytes(ids).strip()[1:-1].strip()
    count = items.count(b",") + 1 if items else 0
    parts = [items] if items else []
    parts += [b"%d" % each for each in kept]
    return Raw(b"[" + b",".join(parts) + b"]"), count + len(kept)


def with_open_turn(request: GenerateRequest, choice: ChoiceAnswer) -> Raw | None:
    """Return the raw messages with the answer so far as their open end.

    The parsers keep the line ends around the end of reasoning and the templates write their own,
    so neither part carries them. Content that is not there yet is "", which engines take; null
    they refuse.
    """
    messages = _items(request.fields.get("messages", _NULL))
    reasoning = choice.thoughts.strip(_LINE_END)
    if request.fields.get("continue_final_message") == _TRUE:
        opened = None if reasoning or not messages else _extended(messages[-1], choice.text)
        return None if opened is None else raw([*messages[:-1], opened])
    turn: dict[str, object] = {"role": "assistant", "content": choice.text}
    if reasoning:
        turn["content"] = choice.text.lstrip(_LINE_END)
        turn["reasoning"] = reasoning
    return raw([*messages, turn])


def _extended(message: Raw, text: str) -> Raw | None:
    """Return a message that the client left open, with text added to its end."""
    last = as_object(plain(message))
    content = last.get("content")
    if isinstance(content, str):
        return raw({**last, "content": content + text})
    parts = as_list(content)
    end = as_object(parts[-1]) if parts else {}
    if not isinstance(end.get("text"), str):
        return None
    return raw({**last, "content": [*parts[:-1], {**end, "text": as_text(end["text"]) + text}]})


def _single(request: GenerateRequest) -> Raw | None:
    """Return a completions request's raw prompt, taken out of a list that holds it alone."""
    prompt = request.fields.get("prompt")
    if request.api is not Api.COMPLETIONS or prompt is None:
        return None
    if bytes(prompt).startswith(b"["):
        items = _items(prompt)
        if len(items) == 1 and bytes(items[0])[:1] in (b"[", b'"'):
            return items[0]
    return prompt


def _items(value: Raw) -> list[Raw]:
    """Return the raw items of a list."""
    try:
        return [item.copy() for item in _split_list(value)]
    except msgspec.DecodeError:  # such as a lone surrogate in a text
        return [raw(item) for item in as_list(plain(value))]
