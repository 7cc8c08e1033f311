"""A replayed answer: what the client has already is taken out of it, and must be the same."""

from __future__ import annotations

from pdproxy.core import sse
from pdproxy.core.answer import ChoiceAnswer
from pdproxy.core.jsonfields import encode
from pdproxy.core.keeper import count_entries
from pdproxy.core.plain import Object, as_list, as_object, as_objects, as_text, as_whole, plain
from pdproxy.core.withheld import TEXT_FIELDS
from pdproxy.errors import RecomputeUnsupported


class Skip:
    """Takes out of the events of one choice what was delivered before.

    Args:
        choice: as far as it was delivered; read once, now.
        entries: how many log-probabilities were delivered, where no ids tell of which tokens.
    """

    def __init__(self, choice: ChoiceAnswer, entries: int = 0) -> None:
        reasoning = str(choice.reasoning)
        content = str(choice.content)[choice.echoed :]
        self._known = dict.fromkeys(TEXT_FIELDS, reasoning) | {"content": content}
        self._calls = {
            index: (call.name, call.arguments) for index, call in choice.tool_calls.items()
        }
        self._ids = len(choice.token_ids)
        self._entries = 0 if self._ids else entries

    def apply(self, choice: Object) -> None:
        """Take out of one choice of an event what is known.

        Raises:
            RecomputeUnsupported: it is not what the client has.
        """
        if "text" in choice:
            choice["text"] = self._rest("content", as_text(choice["text"]))
        delta = as_object(choice.get("delta"))
        for name in TEXT_FIELDS:
            if as_text(delta.get(name)):
                delta[name] = self._rest(name, as_text(delta[name]))
        if as_list(delta.get("tool_calls")):
            rest = [self._rest_of_call(piece) for piece in as_objects(delta["tool_calls"])]
            delta["tool_calls"] = [piece for piece in rest if piece is not None]
        if self._entries:
            count = min(self._entries, count_entries(choice.get("logprobs")))
            self._entries -= count
            choice["logprobs"] = _without_first(choice.get("logprobs"), count)
        ids = as_list(choice.get("token_ids"))
        known = min(self._ids, len(ids))
        if known:
            self._ids -= known
            choice["token_ids"] = ids[known:]
            choice["logprobs"] = _without_first(choice.get("logprobs"), known)

    def _rest(self, name: str, text: str) -> str:
        known = self._known[name]
        size = min(len(known), len(text))
        _check(known[:size] == text[:size])
        self._known[name] = known[size:]
        return text[size:]

    def _rest_of_call(self, piece: Object) -> Object | None:
        index = as_whole(piece.get("index")) or 0
        if index not in self._calls:
            return piece
        function = as_object(piece.get("function"))
        name, arguments = self._calls[index]
        given, text = as_text(function.get("name")), as_text(function.get("arguments"))
        size = min(len(arguments), len(text))
        _check(given in ("", name) and arguments[:size] == text[:size])
        self._calls[index] = (name, arguments[size:])
        if not text[size:]:
            return None
        # Id, type and name were delivered with the first piece and stay those.
        return {"index": index, "function": {"arguments": text[size:]}}


def first_tokens(event: bytes, dropped: int) -> tuple[bytes, int | None]:
    """Take from an event of one choice what it tells of its last tokens.

    Returns what is left of the event, nothing if all tokens go; and where the text of the first
    token that goes stands, if the event tells.
    """
    chunk = as_object(plain(sse.data_of(event)))
    choice = as_objects(chunk.get("choices"))[0]
    ids, logprobs = as_list(choice.get("token_ids")), as_object(choice.get("logprobs"))
    kept = max(len(ids), *(len(as_list(each)) for each in logprobs.values()), 0) - dropped
    offset = as_whole(dict(enumerate(as_list(logprobs.get("text_offset")))).get(max(0, kept)))
    if kept <= 0:
        return b"", offset
    choice["token_ids"] = ids[:kept] or choice.get("token_ids")
    for name, each in logprobs.items():
        logprobs[name] = as_list(each)[:kept]
    return sse.with_data(event, encode(chunk)), offset


def _without_first(logprobs: object, count: int) -> object:
    """Return log-probabilities without those of the first tokens."""
    if not isinstance(logprobs, dict):
        return logprobs
    rest = {
        name: value[count:] if isinstance(value, list) else value
        for name, value in logprobs.items()
    }
    return rest if any(rest.values()) else None


def _check(is_same: bool) -> None:
    if not is_same:
        raise RecomputeUnsupported("the answer cannot be continued: its replay differs")
