"""A whole answer that was cut: read into an `Answer`, and composed from it in the end.

Rule: what the engine's first reply says beside the choices stays; of a continued choice only text,
reasoning, tool calls, ids, log-probabilities and the end are replaced.
"""

from __future__ import annotations

from collections.abc import Collection

from pdproxy.core.answer import Answer, ChoiceAnswer, Text
from pdproxy.core.api import Api, GenerateRequest
from pdproxy.core.chunks import strip_internal
from pdproxy.core.jsonfields import JsonFields, Raw, join_object, raw
from pdproxy.core.keeper import note_choice, note_head, note_offset
from pdproxy.core.plain import Object, as_list, as_object, as_objects, as_whole, plain
from pdproxy.core.resume import asks_ids
from pdproxy.core.stops import hidden_stops
from pdproxy.core.withheld import REASONING_FIELDS, hold_back

_NULL = Raw(b"null")
_ID_FIELDS = ("token_ids", "prompt_token_ids")


class Reply:
    """One reply of several rounds.

    Args:
        request: the client's.
        answer: is filled with what the reply holds.
        fields: the first round's reply, in which some choices are cut.
        cut: the indexes of those.
    """

    def __init__(
        self, request: GenerateRequest, answer: Answer, fields: JsonFields, cut: Collection[int]
    ) -> None:
        self._request = request
        self._answer = answer
        self._fields = strip_internal(fields)
        self._choices = as_objects(plain(fields.get("choices")))
        self._logprobs: dict[int, list[Object]] = {}
        self._ends: dict[int, Object] = {}
        self._cut = cut
        names = ("id", "created", "model", "prompt_token_ids")
        note_head(answer, {name: plain(fields.get(name)) for name in names}, self._choices)
        for choice in self._choices:
            self._read(choice)
        answer.give_back(cut)

    def restart(self, index: int) -> None:
        """Forget what a choice has so far but the echo of the prompt: it is made again."""
        old = self._answer.choice(index)
        echo = Text(str(old.content)[: old.echoed])
        new = ChoiceAnswer(content=echo, echoed=old.echoed, next_offset=old.echoed)
        self._answer.choices[index] = new
        parts = [_before(part, old.echoed) for part in self._logprobs.pop(index, [])[:1]]
        self._logprobs[index] = [part for part in parts if part]

    def add(self, event: Object) -> None:
        """Take an event that was stitched to the answer; its text is in the answer already."""
        for choice in as_objects(event.get("choices")):
            index = _index(choice)
            if choice.get("logprobs"):
                self._logprobs.setdefault(index, []).append(as_object(choice["logprobs"]))
            if choice.get("finish_reason") is not None:
                self._ends[index] = choice

    def composed(self) -> bytes:
        """Return the one JSON document for the client."""
        fields: dict[str, Raw] = {**self._fields}
        fields["choices"] = raw([self._composed(choice) for choice in self._choices])
        usage = plain(fields.get("usage"))
        if isinstance(usage, dict):
            fields["usage"] = raw(self._usage(usage))
        if not asks_ids(self._request) and "prompt_token_ids" in fields:
            fields["prompt_token_ids"] = _NULL
        return join_object(fields)

    def _read(self, choice: Object) -> None:
        """Note what a choice of the first reply holds; ids and text are all there."""
        index = _index(choice)
        kept = self._answer.choice(index)
        kept.is_from_whole = True
        message = {**as_object(choice.get("message"))}
        calls = as_objects(message.get("tool_calls"))
        message["tool_calls"] = [{**call, "index": place} for place, call in enumerate(calls)]
        read: Object = {"token_ids": choice.get("token_ids"), "logprobs": choice.get("logprobs")}
        read |= {"text": choice["text"]} if "text" in choice else {"delta": message}
        if index in self._cut:
            hold_back(kept.held, read, hidden_stops(self._request))
        else:
            read["finish_reason"] = choice.get("finish_reason")
        note_choice(kept, read, has_text=True)
        note_offset(kept, read["logprobs"])
        usage = as_object(plain(self._fields.get("usage")))
        kept.outputs = 0
        kept.counted = (as_whole(usage.get("completion_tokens")) or 0) // len(self._choices)
        if isinstance(choice.get("logprobs"), dict):
            self._logprobs[index] = [as_object(choice["logprobs"])]

    def _composed(self, choice: Object) -> Object:
        index = _index(choice)
        choice = {**choice, "index": index}
        if not asks_ids(self._request):
            choice |= {name: None for name in _ID_FIELDS if name in choice}
        if index not in self._cut:
            return choice
        kept, end = self._answer.choice(index), self._ends.get(index, {})
        choice["finish_reason"] = kept.finish_reason
        choice["stop_reason"] = end.get("stop_reason")
        choice["logprobs"] = _joined(self._logprobs.get(index, []))
        if asks_ids(self._request):
            choice["token_ids"] = kept.token_ids.tolist()
        if self._request.api is Api.COMPLETIONS:
            choice["text"] = str(kept.content)
        else:
            choice["message"] = _message(as_object(choice.get("message")), kept)
        return choice

    def _usage(self, usage: Object) -> Object:
        """Return the usage of all rounds; details that count one round only are left out."""
        total = {**usage, **self._answer.usage()}
        if "completion_tokens_details" in total:
            total["completion_tokens_details"] = None
        return total


def _index(choice: Object) -> int:
    return as_whole(choice.get("index")) or 0


def _message(message: Object, kept: ChoiceAnswer) -> Object:
    message = {**message, "content": str(kept.content) or None}
    if kept.reasoning:
        names = {name for name in REASONING_FIELDS if message.get(name)} or {kept.reasoning_field}
        message |= dict.fromkeys(sorted(names), str(kept.reasoning))
    if kept.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(kept.tool_calls.items())
        ]
    elif not kept.content and not kept.reasoning:
        message["content"] = ""
    return message


def _before(logprobs: Object, size: int) -> Object:
    """Return the log-probabilities of the tokens in the first characters."""
    offsets = as_list(logprobs.get("text_offset"))
    count = sum((as_whole(place) or 0) < size for place in offsets)
    return {name: as_list(value)[:count] for name, value in logprobs.items()} if count else {}


def _joined(parts: list[Object]) -> Object | None:
    """Return log-probabilities with the lists of all parts in a row."""
    joined: Object = {}
    for part in parts:
        for name, value in part.items():
            known = joined.get(name)
            is_both = isinstance(known, list) and isinstance(value, list)
            joined[name] = [*as_list(known), *as_list(value)] if is_both else known or value
    return joined or None
