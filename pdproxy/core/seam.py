"""The seam: events of a later round, made into events of the answer that the client already has.

Rules: the client sees one id, one role, one usage and one end; no text comes twice and none is
lost; text stays in the field it belongs to. What may turn out not to belong to the answer (the
start of a stop string, half a character) waits for what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.core import sse
from pdproxy.core.answer import Answer, ChoiceAnswer, Held
from pdproxy.core.api import Api, GenerateRequest
from pdproxy.core.call_markup import CallReader, read_on
from pdproxy.core.continuation import is_recomputed
from pdproxy.core.json_rest import JsonRest
from pdproxy.core.jsonfields import decode, encode
from pdproxy.core.keeper import count_entries, note_choice, note_head
from pdproxy.core.logprobs import as_chat, shifted
from pdproxy.core.plain import Object, as_object, as_objects, as_text, as_whole, plain
from pdproxy.core.repeated import Repeated
from pdproxy.core.replay import Skip, first_tokens
from pdproxy.core.resume import Resume, Way, asks_ids
from pdproxy.core.stops import hidden_stops, holds_back
from pdproxy.core.traits import asked_schema
from pdproxy.core.withheld import TEXT_FIELDS, Withheld, has_text, lags_behind, put_in_front
from pdproxy.errors import RecomputeUnsupported

_OUTPUT = (*TEXT_FIELDS, "tool_calls", "refusal", "audio")
# Behind ids that are known.
_GOES_ON = frozenset({Way.IDS, Way.THINK, Way.CALL, Way.JSON, Way.TURN})
_ROUND_ONLY = ("prompt_token_ids", "kv_transfer_params", "ec_transfer_params")


@dataclass(slots=True)
class RoundEnd:
    """How a round of one choice ended.

    Attributes:
        is_final: the choice has its finish reason.
        is_stopped: a stop string that begins in an earlier round has ended the choice; what the
            decoder still sends is not part of it.
        is_at_marker: the reasoning has ended and the next round goes on behind it.
        completion_tokens: of the round, as the engine counted; None if it did not say.
        has_ids: output came with token ids, or without; None if there was none.
    """

    is_final: bool = False
    is_stopped: bool = False
    is_at_marker: bool = False
    completion_tokens: int | None = None
    has_ids: bool | None = None


class Seam:
    """Rewrites the events of one round of one choice.

    Args:
        request: the client's.
        answer: the answer so far; it grows by what passes.
        index: of the choice.
        resume: how the round was asked for.
    """

    def __init__(
        self, request: GenerateRequest, answer: Answer, index: int, resume: Resume
    ) -> None:
        self.end = RoundEnd()
        self._request = request
        self._answer = answer
        self._index = index
        self._resume = resume
        self._choice = answer.choice(index)
        _settle(request, self._choice, resume)
        self._before = self._choice.tokens  # output tokens of the earlier rounds
        is_replay = resume.way is Way.REPLAY
        self._offset = self._choice.echoed if is_replay else self._choice.next_offset
        self._skip = _told(self._choice, resume)
        self._withheld = Withheld(request, self._choice, resume)
        self._repeated = self._prompt_text()
        self._is_at_own_limit = False
        self._calls, self._missing = self._call_reader()
        self._json = self._json_reader()

    def rewrite(self, block: bytes) -> bytes:
        """Return what the client gets of a block of the round.

        Raises:
            RecomputeUnsupported: the round does not repeat what the client has already, or it
                could go on in the same way for ever.
        """
        return b"".join(self._event(event) for event in sse.split_block(block))

    def _prompt_text(self) -> Repeated:
        """Return the watch on the prompt's text, which follows from nothing but ids."""
        choice, asked = self._choice, self._resume.request
        is_by_ids = self._resume.way in (Way.IDS, Way.THINK, Way.JSON)
        known = (choice.text or choice.thoughts) if is_by_ids else ""
        ids = (asked.prompt_tokens or 0) - self._resume.kept_ids
        return Repeated(known, ids, max(map(len, hidden_stops(asked)), default=1) - 1)

    def _call_reader(self) -> tuple[CallReader | None, list[Object]]:
        """Return what reads a tool call on, and what the client lacks of it already."""
        choice = self._choice
        if self._resume.way is not Way.CALL:
            return None, []
        answer_id = f"{as_text(plain(self._answer.identity.get('id')))}-{self._index}"
        found = read_on(choice.spelled, choice.tool_calls, answer_id)
        assert found is not None, "checked by the planner"
        return found

    def _json_reader(self) -> JsonRest | None:
        if self._resume.way is not Way.JSON:
            return None
        rest = JsonRest.behind(self._choice.text, asked_schema(self._request))
        assert rest is not None, "checked by the planner"
        return rest

    def _event(self, event: bytes) -> bytes:
        chunk = plain(sse.data_of(event))
        if not isinstance(chunk, dict) or self.end.is_stopped:  # [DONE] comes once, at the end
            return b""
        if chunk.get("error") is not None:
            return event
        choices = as_objects(chunk.get("choices"))
        if self._resume.way is Way.AGAIN:  # the same prompt, of which nothing may be known yet
            note_head(self._answer, chunk, choices)
        stitched = self._choice_event(chunk, choices[0]) if choices else b""
        self._note_usage(chunk)
        if self._is_at_own_limit and self._choice.whole == self._choice.started:
            raise RecomputeUnsupported("the answer cannot be continued: a round brought nothing")
        return stitched

    def _note_usage(self, chunk: Object) -> None:
        """Note what the engine counted; where it gives no ids, that is what counts."""
        counted = as_whole(as_object(chunk.get("usage")).get("completion_tokens"))
        if counted is not None:
            self.end.completion_tokens = counted
            if not self._choice.has_all_ids:
                self._choice.counted = self._before + counted

    def _choice_event(self, chunk: Object, choice: Object) -> bytes:
        choice = self._translated(choice)
        self._note_end(choice)
        if self._skip is not None:
            self._skip.apply(choice)
        is_whole = self._json is not None and self._json.apply(choice)
        if not _says_anything(choice):
            return b""
        shows_text = has_text(choice)
        if shows_text:
            self.end.has_ids = isinstance(choice.get("token_ids"), list)
        is_stopped = self._withheld.apply(choice)
        if is_whole or is_stopped:
            self.end.is_final = self.end.is_stopped = True
        is_shown = note_choice(self._choice, choice, has_text=shows_text)
        chunk = {**chunk, **head(self._request, self._answer), "choices": [choice]}
        for name in _ROUND_ONLY:
            chunk.pop(name, None)
        if chunk.get("usage") is not None:
            chunk["usage"] = self._usage_now()
        return self._delivered(chunk, choice, is_shown=is_shown)

    def _delivered(self, chunk: Object, choice: Object, *, is_shown: bool) -> bytes:
        """Return what the client gets now; an event that shows nothing waits for the next text."""
        if not asks_ids(self._request) and "token_ids" in choice:
            choice["token_ids"] = None
        event = sse.encode_data(encode(chunk))
        if is_shown or choice.get("finish_reason") is not None:
            return b"".join((*self._choice.released(), event))
        if choice.get("token_ids") or choice.get("logprobs") or chunk.get("usage"):
            self._choice.wait(event)
        return b""

    def _translated(self, choice: Object) -> Object:
        """Return a choice in the shape of the client's API."""
        choice = {**choice, "index": self._index}
        choice.pop("prompt_token_ids", None)
        if "delta" in choice:
            delta = as_object(choice["delta"])
            choice["delta"] = {name: value for name, value in delta.items() if name != "role"}
            return choice
        text = as_text(choice.get("text"))
        text = self._repeated.strip(text, is_end=choice.get("finish_reason") is not None)
        if self._request.api is Api.COMPLETIONS:
            choice["text"] = text
            choice["logprobs"] = shifted(choice.get("logprobs"), self._offset)
            return choice
        del choice["text"]
        choice["delta"] = self._delta(text)
        choice["logprobs"] = as_chat(choice.get("logprobs"), self._request)
        return choice

    def _delta(self, text: str) -> Object:
        """Return the text of a completion as that part of a chat message which it is."""
        if self._calls is not None:
            pieces, self._missing = [*self._missing, *self._calls.feed(text)], []
            return self._calls_delta(pieces)
        name = "content" if self._resume.way is not Way.THINK else self._choice.reasoning_field
        return {name: text} if text else {}

    def _calls_delta(self, pieces: list[Object]) -> Object:
        """Return a delta of tool calls; a client that wants one call gets the first."""
        if plain(self._request.fields.get("parallel_tool_calls")) is False:
            pieces = [piece for piece in pieces if piece["index"] == 0]
        return {"tool_calls": pieces} if pieces else {}

    def _note_end(self, choice: Object) -> None:
        """Note an end; that of the reasoning, or of a round only, is none for the client."""
        reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
        if reason is None:
            return
        resume = self._resume
        self.end.is_at_marker = resume.stop_id is not None and stop == resume.stop_id
        self._is_at_own_limit = resume.has_own_limit and reason == "length"
        is_none = self.end.is_at_marker or self._is_at_own_limit
        self.end.is_final = not (is_none or is_recomputed(choice, self._request.stops))
        if not self.end.is_final:
            choice["finish_reason"] = None
            choice.pop("stop_reason", None)
        elif self._calls is not None:
            delta = as_object(choice["delta"])
            pieces = [*as_objects(delta.get("tool_calls")), *self._calls.end()]
            choice["delta"] = self._calls_delta(pieces)
            choice["finish_reason"] = "tool_calls" if reason == "stop" else reason

    def _usage_now(self) -> Object:
        """Return the running usage of this choice for an event that carries one."""
        prompt, tokens = self._answer.prompt_tokens, self._choice.tokens
        total = prompt + tokens
        return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": tokens}


def head(request: GenerateRequest, answer: Answer) -> Object:
    """Return what all events of an answer have in common."""
    kind = "chat.completion.chunk" if request.api is Api.CHAT else "text_completion"
    return {name: decode(value) for name, value in answer.identity.items()} | {"object": kind}


def ending(request: GenerateRequest, answer: Answer, index: int, finish_reason: str) -> bytes:
    """Return the events that end a choice of which nothing is left to generate, and note it."""
    kept = answer.choice(index)
    choice: Object = {"index": index}
    choice["delta" if request.api is Api.CHAT else "text"] = {} if request.api is Api.CHAT else ""
    put_in_front(kept.held, choice, kept.reasoning_field)
    choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    note_choice(kept, {**choice, "token_ids": [] if kept.has_all_ids else None})
    choice["token_ids"] = [] if asks_ids(request) else None
    event = sse.encode_data(encode({**head(request, answer), "choices": [choice]}))
    return b"".join((*kept.released(), event))


def _settle(request: GenerateRequest, choice: ChoiceAnswer, resume: Resume) -> None:
    """Drop what the round makes again."""
    is_behind = lags_behind(request, choice)
    choice.is_outrun = resume.way is Way.REPLAY and (choice.is_outrun or is_behind)
    kept = resume.kept_ids
    choice.outputs, choice.counted = choice.tokens, 0
    if resume.way in (Way.AGAIN, Way.REPLAY):
        kept = 0 if resume.way is Way.AGAIN else max(choice.shown, choice.flushed, choice.told)
        choice.held = Held()
        choice.outputs = 0
    choice.waiting, waited = _kept_waiting(choice, kept), choice.waiting
    if not choice.has_all_ids:
        # What waits shows nothing, so the round makes it again, whatever the way.
        choice.waiting = []
        choice.entries -= sum(_entries(event) for _, event in waited)
    if resume.way is Way.AGAIN:
        choice.entries = 0
    # Ids that were told stay: the round makes them again, and then they are left out.
    told = max(choice.told, choice.whole) if resume.way in _GOES_ON else 0
    del choice.token_ids[max(kept, told) :]
    choice.shown = choice.started = len(choice.token_ids)
    choice.flushed = 0
    choice.is_flushed = False
    choice.lags = holds_back(resume.request)


def _told(choice: ChoiceAnswer, resume: Resume) -> Skip | None:
    """Return what leaves out the ids that were told but that the round makes again."""
    if resume.way is Way.REPLAY:
        return Skip(choice, choice.entries)
    ids = choice.token_ids[resume.kept_ids :] if resume.way in _GOES_ON else None
    if ids:
        return Skip(ChoiceAnswer(token_ids=ids))
    # Without ids, what was told beyond the tokens of the text is told again.
    entries = 0 if choice.has_all_ids else max(0, choice.entries - choice.tokens)
    return Skip(ChoiceAnswer(), entries) if entries else None


def _entries(event: bytes) -> int:
    choices = as_objects(as_object(plain(sse.data_of(event))).get("choices"))
    return sum(count_entries(choice.get("logprobs")) for choice in choices)


def _kept_waiting(choice: ChoiceAnswer, kept: int) -> list[tuple[int, bytes]]:
    """Return the events that wait for text, up to the kept ids."""
    waiting: list[tuple[int, bytes]] = []
    for ids, event in choice.waiting:
        if ids > kept:
            part, offset = first_tokens(event, ids - kept)
            choice.next_offset = choice.next_offset if offset is None else offset
            return [*waiting, (kept, part)] if part else waiting
        waiting.append((ids, event))
    return waiting


def _says_anything(choice: Object) -> bool:
    if choice.get("finish_reason") is not None or choice.get("token_ids") or choice.get("text"):
        return True
    delta = as_object(choice.get("delta"))
    return any(delta.get(name) for name in _OUTPUT)
