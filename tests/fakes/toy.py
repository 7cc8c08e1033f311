"""A toy language model: the next token is a hash of every token before it.

So each fault in a prompt, a handle or a continuation changes the text that follows. Every token id
has one text, and text made by the model tokenises back into the same ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

VOCABULARY = 1000
"""Ids below are what the model says, ` t<id>`; ids above stand for prompt text."""

_SPOKEN = re.compile(r"( t\d{1,3}(?!\d))")
_LONGEST_SPELLED = 64

Body = Mapping[str, object]


def tokenise(text: str) -> list[int]:
    """Return the ids of a text; a long stretch of strange text is one id, to stay cheap."""
    ids: list[int] = []
    for piece in _SPOKEN.split(text):
        if _SPOKEN.fullmatch(piece):
            ids.append(int(piece[2:]))
        elif len(piece) <= _LONGEST_SPELLED:
            ids.extend(VOCABULARY + ord(character) for character in piece)
        elif piece:
            digest = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=6)
            ids.append(VOCABULARY + 0x110000 + int.from_bytes(digest.digest()))
    return ids


def text_of(token: int) -> str:
    return f" t{token}"


def prompts(body: Body) -> list[list[int]]:
    """Return the token ids of each prompt of a request body, chat or completions."""
    if "messages" in body:
        return [tokenise(_render(body))]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return [_prompt_ids(item) for item in prompt]
    return [_prompt_ids(prompt)]


def speak(prefix: Sequence[int], count: int, *, choice: int = 0) -> list[int]:
    """Return the `count` ids that follow `prefix`; another choice samples differently."""
    state = hashlib.blake2b(str(choice).encode(), digest_size=16).digest()
    for token in prefix:
        state = _advance(state, token)
    spoken: list[int] = []
    for _ in range(count):
        token = int.from_bytes(state[:4]) % VOCABULARY
        spoken.append(token)
        state = _advance(state, token)
    return spoken


def answer(body: Body, count: int, *, choice: int = 0) -> str:
    """Return the text that a healthy engine answers to `body` with `count` tokens."""
    return "".join(text_of(token) for token in speak(prompts(body)[0], count, choice=choice))


def token_limit(body: Body) -> int | None:
    """Return the output limit a request asks for; `/v1/completions` has 16 as its default."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if isinstance(limit, int):
            return limit
    return None if "messages" in body else 16


def _advance(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(8), digest_size=16).digest()


def _prompt_ids(prompt: object) -> list[int]:
    if isinstance(prompt, list):
        return [int(token) for token in prompt]
    return tokenise(str(prompt))


def _render(body: Body) -> str:
    parts = [
        json.dumps(body[name], sort_keys=True)
        for name in ("tools", "chat_template_kwargs")
        if body.get(name)
    ]
    messages = body["messages"]
    assert isinstance(messages, list)
    parts.extend(_render_message(message) for message in messages)
    if body.get("add_generation_prompt") is not False:
        parts.append("<assistant>")
    return "".join(parts)


def _render_message(message: Body) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    extra = json.dumps(rest, sort_keys=True) if rest else ""
    return f"<{message.get('role')}>{text}{extra}"
