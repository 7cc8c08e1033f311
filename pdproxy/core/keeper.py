"""Keeps the answer while its events pass, and hides from the client what it did not ask for.

Rules: an event leaves as it came, but for the token ids that only pdproxy asked the engine for;
they become `null`, which is what an engine sends when nobody asks. An event that shows nothing but
tells of tokens (ids, log-probabilities, usage) waits for the next text: if the answer is cut in
between, those tokens are made again.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated

import msgspec

from pdproxy.core import sse
from pdproxy.core.answer import Answer, ChoiceAnswer, ToolCall
from pdproxy.core.jsonfields import encode, raw
from pdproxy.core.plain import Object, as_list, as_object, as_objects, as_text, as_whole, plain
from pdproxy.core.withheld import has_text, hold_back

_ID_LISTS = re.compile(rb'token_ids"\s*:\s*\[[^\]]*\]')
_ID_LIST = b'token_ids":[%d]'  # as engines write a list of one
_NO_IDS = b'token_ids":null'
_NO_STOPS: frozenset[str] = frozenset()
_MAX_ID = 2**63 - 1  # of the array that keeps them
_TokenID = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ID)]


class _PlainDelta(msgspec.Struct, gc=False):
    """Text only: decoding fails on tool calls and on the older name of reasoning."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: None = None
    tool_calls: None = None


# Ids are decoded as a tuple: msgspec 0.23 takes 0.6 us longer for a list.
class _PlainChoice(msgspec.Struct, gc=False):
    """A choice that goes on: decoding fails on any other, and on log-probabilities."""

    index: int = 0
    delta: _PlainDelta | None = None
    text: str | None = None
    logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None
    prompt_token_ids: None = None
    token_ids: tuple[_TokenID, ...] | None = None


class _PlainChunk(msgspec.Struct, gc=False):
    """A chunk that only brings text: decoding fails on any other."""

    choices: list[_PlainChoice]
    usage: None = None
    error: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    prompt_token_ids: None = None


_decode_plain = msgspec.json.Decoder(_PlainChunk).decode


class Keeper:
    """Notes what passes in an `Answer`.

    Args:
        answer: is written to.
        shows_ids: the client asked for token ids itself, so they stay.
        stops: stop strings that are no part of the output: the start of one, at the end of a
            choice that was given back, is held.
    """

    def __init__(
        self, answer: Answer, *, shows_ids: bool, stops: Collection[str] = _NO_STOPS
    ) -> None:
        self.answer = answer
        self._choices = answer.choices
        self._shows_ids = shows_ids
        self._stops = stops

    def take(self, block: bytes) -> bytes | None:
        """Note a block whose events only bring text; return what the client gets of it.

        None means that some event needs a look, see `note`; then nothing was noted.
        """
        if block.find(b"\n\n") != len(block) - 2:
            return self._take_several(block)
        try:
            choices = _decode_plain(block[5:]).choices
            choice = choices[0]
            kept = self._choices[choice.index]
        except (msgspec.DecodeError, RecursionError, LookupError):
            return None
        if kept.waiting or len(choices) > 1 or not _note_text(kept, choice):
            return None
        ids = choice.token_ids
        if ids is None or self._shows_ids:
            return block
        # Written as engines write it, the list is known: one replacement is the fastest way out.
        hidden = block.replace(_ID_LIST % ids, _NO_IDS) if len(ids) == 1 else block
        return without_ids(block) if hidden is block else hidden

    def note(self, event: bytes, cut: Collection[int] = ()) -> bytes:
        """Note any event; return what the client gets of it, maybe nothing yet.

        Args:
            event: one event, its `recomputed` ends undone.
            cut: the choices that ended so. What the engine makes of their half character at the
                end is dropped, and the start of a stop string is held.
        """
        self.answer.give_back(cut)
        chunk = plain(sse.data_of(event))
        if not isinstance(chunk, dict):
            return event
        choices = as_objects(chunk.get("choices"))
        note_head(self.answer, chunk, choices)
        shows = [self._note(choice, cut) for choice in choices]
        self._note_usage(chunk, choices)
        if cut:
            event = sse.with_data(event, encode(chunk))
        event = event if self._shows_ids else without_ids(event)
        if cut and choices and not any(shows):
            return b""
        if len(choices) == 1 and not shows[0] and self._tells_of_tokens(chunk, choices[0]):
            self._kept(choices[0]).wait(event)
            return b""
        waited = [event for choice in choices for event in self._kept(choice).released()]
        return b"".join((*waited, event))

    def hide(self, body: bytes) -> bytes:
        """Return a whole JSON reply as the client gets it."""
        return body if self._shows_ids else without_ids(body)

    def _take_several(self, block: bytes) -> bytes | None:
        try:
            chunks = [_decode_plain(event[5:]) for event in sse.split_block(block)]
            pairs = [(self._choices[c.index], c) for chunk in chunks for c in chunk.choices]
        except (msgspec.DecodeError, RecursionError, KeyError):
            return None
        if any(kept.waiting or not _has_text(choice) for kept, choice in pairs):
            return None
        for kept, choice in pairs:
            _note_text(kept, choice)
        return block if self._shows_ids else without_ids(block)

    def _kept(self, choice: Object) -> ChoiceAnswer:
        return self.answer.choice(as_whole(choice.get("index")) or 0)

    def _note(self, choice: Object, cut: Collection[int]) -> bool:
        """Note a choice, without what must be held back of it; return whether it shows any."""
        kept = self._kept(choice)
        if (as_whole(choice.get("index")) or 0) not in cut:
            return note_choice(kept, choice)
        shows_text = has_text(choice)
        hold_back(kept.held, choice, self._stops)
        return note_choice(kept, choice, has_text=shows_text)

    def _note_usage(self, chunk: Object, choices: list[Object]) -> None:
        """Take the engine's own count where it gives no ids to count by."""
        counted = as_whole(as_object(chunk.get("usage")).get("completion_tokens"))
        if counted is None:
            return
        if choices:
            self._kept(choices[0]).counted = counted
        elif len(self._choices) == 1:
            self.answer.choice(next(iter(self._choices))).counted = counted

    def _tells_of_tokens(self, chunk: Object, choice: Object) -> bool:
        if choice.get("finish_reason") is not None:
            return False
        if choice.get("logprobs") is not None:
            return True
        return bool(choice.get("token_ids")) and (self._shows_ids or bool(chunk.get("usage")))


def without_ids(block: bytes) -> bytes:
    """Return events, or a JSON body, with each list of token ids, of prompt or output, made null.

    Inside a JSON string a quote is escaped, so the name with its quote stands only for the field.
    """
    return _ID_LISTS.sub(_NO_IDS, block) if block.find(b"token_ids") >= 0 else block


def note_head(answer: Answer, chunk: Object, choices: list[Object]) -> None:
    """Note what an event says beside the output of its choices."""
    if not answer.identity and chunk.get("id"):
        names = ("id", "created", "model")
        answer.identity = {name: raw(chunk[name]) for name in names if name in chunk}
    for holder in (chunk, *choices):
        if isinstance(holder.get("prompt_token_ids"), list):
            answer.prompt_ids = raw(holder["prompt_token_ids"])


def note_choice(kept: ChoiceAnswer, choice: Object, *, has_text: bool = False) -> bool:
    """Note the output of one choice of an event; return whether it shows any.

    `has_text` tells that there is text, even if the client is not given any of it yet.
    """
    delta = as_object(choice.get("delta"))
    content = as_text(choice.get("text")) or as_text(delta.get("content"))
    if content:
        kept.content.add(content)
    name = "reasoning" if delta.get("reasoning") else "reasoning_content"
    reasoning = as_text(delta.get(name))
    if reasoning:
        kept.reasoning.add(reasoning)
        kept.reasoning_field = name
    calls = as_objects(delta.get("tool_calls"))
    for piece in calls:
        _note_call(kept.tool_calls, piece)
    is_shown = bool(has_text or content or reasoning or calls)
    kept.entries += count_entries(choice.get("logprobs"))
    note_offset(kept, choice.get("logprobs"))
    _note_ids(kept, choice.get("token_ids"), is_shown=is_shown)
    if kept.finish_reason is None:
        kept.finish_reason = as_text(choice.get("finish_reason")) or None
    return is_shown


def _has_text(choice: _PlainChoice) -> bool:
    delta = choice.delta
    return bool(choice.text if delta is None else delta.content or delta.reasoning)


def _note_text(kept: ChoiceAnswer, choice: _PlainChoice) -> bool:
    """Note the text and ids of a choice; False if it has no text, and then nothing is noted."""
    delta = choice.delta
    text = choice.text if delta is None else delta.content
    if text:
        kept.content.add(text)
    if delta is not None and delta.reasoning:
        kept.reasoning.add(delta.reasoning)
    elif not text:
        return False
    kept.outputs += 1
    ids = choice.token_ids
    if ids:
        kept.token_ids.extend(ids)
        kept.shown = len(kept.token_ids)
        if len(ids) > 1:
            kept.packed = kept.shown
    elif ids is None:
        kept.has_all_ids = False
    else:
        kept.flushed = len(kept.token_ids)
    return True


def _note_ids(kept: ChoiceAnswer, ids: object, *, is_shown: bool) -> None:
    given = as_list(ids)
    new = [each for each in given if isinstance(each, int) and 0 <= each <= _MAX_ID]
    kept.token_ids.extend(new)
    if len(new) < len(given):
        kept.has_all_ids = False
    if not is_shown:
        return
    kept.outputs += 1
    if new:
        kept.shown = len(kept.token_ids)
        if len(new) > 1:
            kept.packed = kept.shown
    elif isinstance(ids, list):
        kept.flushed = len(kept.token_ids)
    else:
        kept.has_all_ids = False


def count_entries(logprobs: object) -> int:
    """Return of how many tokens an event has log-probabilities, in either API."""
    columns = as_object(logprobs)
    return len(as_list(columns.get("content")) or as_list(columns.get("tokens")))


def _note_call(calls: dict[int, ToolCall], piece: Object) -> None:
    call = calls.setdefault(as_whole(piece.get("index")) or 0, ToolCall())
    function = as_object(piece.get("function"))
    call.id = call.id or as_text(piece.get("id"))
    call.name += as_text(function.get("name"))
    call.arguments += as_text(function.get("arguments"))


def note_offset(kept: ChoiceAnswer, logprobs: object) -> None:
    """Note where the next token's text stands, of which only completions tell."""
    columns = as_object(logprobs)
    offsets, tokens = as_list(columns.get("text_offset")), as_list(columns.get("tokens"))
    if offsets and tokens:
        kept.next_offset = (as_whole(offsets[-1]) or 0) + len(as_text(tokens[-1]))
