"""The rest of JSON that was cut under a grammar: asked for without one, and checked here.

Rules: what the client gets is JSON up to its end, and nothing behind it; it does not end as if it
were what was asked for unless it is.
"""

from __future__ import annotations

from pdproxy.core import json_schema
from pdproxy.core.json_text import JsonText
from pdproxy.core.jsonfields import decode
from pdproxy.core.plain import Object, as_object, as_text
from pdproxy.errors import RecomputeUnsupported

_SPACE = " \t\n\r"


class JsonRest:
    """Reads the choices of events on behind the text so far.

    Args:
        schema: of the value; one that can be checked.
    """

    def __init__(self, schema: object) -> None:
        self._json = JsonText()
        self._schema = schema

    @classmethod
    def behind(cls, text: str, schema: object) -> JsonRest | None:
        """Return what reads on behind a text.

        None if the text is not the start of JSON, or the schema cannot be checked.
        """
        if not json_schema.is_checkable(schema):
            return None
        rest = cls(schema)
        try:
            size = rest._json.feed(text)
        except ValueError:
            return None
        return rest if not text[size:].strip(_SPACE) else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing more belongs to the value."""
        return self._json.is_whole

    def apply(self, choice: Object) -> bool:
        """Take off what is behind the end of the value; return whether the choice ends there.

        The engine may end a whole value itself, so what ends it here is the next text.

        Raises:
            RecomputeUnsupported: it is no JSON, or not what was asked for.
        """
        delta = choice.get("delta")
        holder, name = (as_object(delta), "content") if "delta" in choice else (choice, "text")
        text = as_text(holder.get(name))
        was_whole = self.is_whole
        try:
            size = self._json.feed(text)
        except ValueError:
            raise _unlike("is no JSON") from None
        is_end = self.is_whole and size < len(text)
        if is_end:
            holder[name] = text[:size]
            choice |= {"finish_reason": "stop", "stop_reason": None}
            if was_whole:  # no token of it belongs to the answer
                choice |= {"token_ids": choice.get("token_ids") and [], "logprobs": None}
        has_ended = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None
        if has_ended and not self._json.may_end:
            raise _unlike("ends before its end")
        if has_ended or self.is_whole > was_whole:
            self._check()
        return is_end

    def _check(self) -> None:
        try:
            value = decode(self._json.text.encode("utf-8", "replace"))
        except ValueError:
            raise _unlike("is no JSON") from None
        wrong = json_schema.fault(self._schema, value)
        if wrong is not None:
            raise _unlike("does not fit the schema", quote=wrong)


def _unlike(what: str, *, quote: str = "") -> RecomputeUnsupported:
    message = f"the answer cannot be continued: without the grammar its JSON {what}"
    return RecomputeUnsupported(message, quote=quote)
