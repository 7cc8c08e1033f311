"""Text of an event that the client must not see yet, since it may turn out not to be the answer's.

Rules: the start of a stop string waits until it is known to be none; what an engine makes of half
a character waits for the other half, and is dropped with the round that never brings it.
"""

from __future__ import annotations

from collections.abc import Collection

from pdproxy.core.answer import ChoiceAnswer, Held
from pdproxy.core.api import GenerateRequest
from pdproxy.core.plain import Object, as_object, as_text, as_whole, plain
from pdproxy.core.resume import Resume, Way
from pdproxy.core.stops import (
    Stopped,
    Straddle,
    hidden_stops,
    holds_back,
    shows_stops,
    start_of_stop,
)

REASONING_FIELDS = ("reasoning", "reasoning_content")
# Where the text of a chat delta stands, in reading order.
TEXT_FIELDS = (*REASONING_FIELDS, "content")
_HALF_CHARACTER = "\ufffd"


def lags_behind(request: GenerateRequest, choice: ChoiceAnswer) -> bool:
    """Tell whether an engine was lost with text that it held back for the sake of stop strings."""
    return (choice.lags or holds_back(request)) and not choice.is_flushed


def has_text(choice: Object) -> bool:
    """Tell whether a choice of an event brings text beside half a character."""
    return any(as_text(holder[name]).strip(_HALF_CHARACTER) for holder, name in _texts(choice))


def hold_back(held: Held, choice: Object, stops: Collection[str]) -> str:
    """Take off the end of a choice's text what must wait.

    The start of a stop string moves to `held`. Returns what the engine made of half a character.
    """
    places = _texts(choice)
    if not places:
        return ""
    holder, name = places[-1]
    text = as_text(holder[name])
    whole = text.rstrip(_HALF_CHARACTER)
    kept = len(whole) - start_of_stop(whole, stops)
    holder[name], held.text = whole[:kept], whole[kept:]
    held.is_reasoning = name in REASONING_FIELDS
    return text[len(whole) :]


def put_in_front(held: Held, choice: Object, reasoning_field: str) -> None:
    """Give text that waited back to a choice, in front of its new text."""
    if held.text:
        holder, name = _place(choice, reasoning_field if held.is_reasoning else "content")
        holder[name] = held.text + as_text(holder.get(name))
        held.text = ""


class Withheld:
    """What waits during a later round of one choice.

    Args:
        request: the client's.
        kept: the choice; its `held` is what waits from before the seam, and is kept up.
        resume: how the round was asked for.
    """

    def __init__(self, request: GenerateRequest, kept: ChoiceAnswer, resume: Resume) -> None:
        self._kept = kept
        self._hidden = hidden_stops(request)
        self._least = as_whole(plain(request.fields.get("min_tokens"))) or 0
        self._half = ""
        self._shows_stops = shows_stops(request)
        self._is_thinking = resume.way is Way.THINK
        self._field = "content" if kept.text else kept.reasoning_field
        sees_all = resume.way in (Way.AGAIN, Way.REPLAY)
        before = "" if sees_all else kept.text or kept.thoughts
        self._straddle = Straddle(before, request.stops, shows_stops=self._shows_stops)

    def apply(self, choice: Object) -> bool:
        """Give back to a choice of an event what waited for it, and take off what must wait.

        Returns whether a stop string that begins before the seam ends the choice here.
        """
        is_end = choice.get("finish_reason") is not None
        if not _texts(choice) and not is_end:
            return False
        stopped = self._look(choice)
        self._kept.held.text += self._half
        put_in_front(self._kept.held, choice, self._kept.reasoning_field)
        self._half = ""
        if stopped is not None:
            self._stop(choice, stopped)
        elif is_end:
            self._show_stop(choice)
        else:
            self._half = hold_back(self._kept.held, choice, self._hidden)
        return stopped is not None

    def _look(self, choice: Object) -> Stopped | None:
        holder, name = _place(choice, self._field)
        stopped = self._straddle.look(as_text(holder.get(name)))
        # Until `min_tokens` nothing stops an engine.
        return stopped if self._kept.tokens >= self._least else None

    def _stop(self, choice: Object, stopped: Stopped) -> None:
        holder, name = _place(choice, self._field)
        text = as_text(holder.get(name))
        holder[name] = text[: max(0, len(text) - stopped.excess)]
        choice |= {"finish_reason": "stop", "stop_reason": stopped.stop}

    def _show_stop(self, choice: Object) -> None:
        """Show the stop string that ended the reasoning, which the round was asked to leave out."""
        stop = choice.get("stop_reason")
        if self._is_thinking and self._shows_stops and isinstance(stop, str):
            holder, name = _place(choice, self._kept.reasoning_field)
            holder[name] = as_text(holder.get(name)) + stop


def _texts(choice: Object) -> list[tuple[Object, str]]:
    """Return where a choice has new text, in reading order."""
    places = [(as_object(choice.get("delta")), name) for name in TEXT_FIELDS] + [(choice, "text")]
    return [(holder, name) for holder, name in places if as_text(holder.get(name))]


def _place(choice: Object, name: str) -> tuple[Object, str]:
    """Return where a choice has its content or reasoning."""
    delta = choice.get("delta")
    return (delta, name) if isinstance(delta, dict) else (choice, "text")
