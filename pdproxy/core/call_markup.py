"""Tool calls in the text of an answer, read as it comes: a call that was cut is read on from here.

An engine parses a call from its start only, so the rest of one that was cut is asked for as text
and read here. In which markup it is written shows in what was delivered: the text so far must say
what the client has. Where it says something else in all of them, there is no reader.

Source: the parsers hermes and kimi_k2 of vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from pdproxy.core.answer import ToolCall
from pdproxy.core.jsonfields import decode
from pdproxy.core.plain import Object
from pdproxy.errors import RecomputeUnsupported

_MAX_HEAD_CHARACTERS = 4096  # of a call before its arguments


@dataclass(frozen=True, slots=True)
class Markup:
    """How models write a call.

    Attributes:
        opener: what begins it.
        name: matches all up to the end of its name, once that is there; the groups are `name` and,
            if a call has an id of its own, `id`.
        begin: matches what stands between name and arguments, once these begin, or once it is
            known that there are none.
        closers: what ends it.
        brace: what closes the object around name and arguments, "" if there is none. With white
            space around it, it stands between the arguments and a closer.
    """

    opener: str
    name: re.Pattern[str]
    begin: re.Pattern[str]
    closers: tuple[str, ...]
    brace: str


# No part of these patterns can match what the next one can, or a long run of white space would
# take time by its square and more.
HERMES = Markup(
    opener="<tool_call>",
    name=re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"'),
    begin=re.compile(r'\s*,\s*"arguments"\s*:\s*(?=\S)|(?=\s*(?:\}\s*)?</tool_call>)'),
    closers=("</tool_call>",),
    brace="}",
)
KIMI = Markup(
    opener="<|tool_call_begin|>",
    name=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^:<\s][^:<]*):\d+)\s*<\|tool_call_argument_begin\|>"
    ),
    begin=re.compile(""),
    closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    brace="",
)
MARKUPS = (KIMI, HERMES)


class _State(Enum):
    """Where the reader stands."""

    OUTSIDE = auto()  # in no call
    NAME = auto()
    BEGIN = auto()  # between name and arguments
    ARGUMENTS = auto()


class CallReader:
    """Reads text in one markup; what it says becomes pieces of `tool_calls` as in a stream.

    Args:
        markup: in which the calls are written.
        answer_id: makes the ids of calls unique, where the markup has none.

    Attributes:
        calls: what has been read.
    """

    def __init__(self, markup: Markup, answer_id: str = "") -> None:
        self.calls: list[ToolCall] = []
        self._markup = markup
        self._answer_id = answer_id
        self._state = _State.OUTSIDE
        self._text = ""  # not read yet
        self._ahead = 0  # characters of the open arguments that were delivered, not read

    def feed(self, text: str) -> list[Object]:
        """Return what more of the text says.

        Raises:
            RecomputeUnsupported: it is no call in this markup.
        """
        self._text += text
        pieces: list[Object] = []
        while self._step(pieces):
            pass
        return pieces

    def end(self) -> list[Object]:
        """Return what waited for more text, now that none comes."""
        if self._state is not _State.ARGUMENTS or _is_json(self.calls[-1].arguments):
            return []
        rest = self._text[: len(self._text) - self._start_of_closer(self._text)].rstrip()
        return self._say(rest)

    def settle(self, delivered: Mapping[int, ToolCall]) -> list[Object] | None:
        """Go on behind what was delivered; return what was read beyond it.

        None if the client was told something else.
        """
        if not delivered.keys() <= set(range(len(self.calls))):
            return None
        pieces: list[Object] = []
        for index, own in enumerate(self.calls):
            told = delivered.get(index)
            if told is None:
                pieces += [self._start(index), self._piece(index, own.arguments)]
                continue
            if told.arguments and not told.arguments[0].isspace():
                own.arguments = own.arguments.lstrip()  # as older parsers do
            is_open = own is self.calls[-1] and self._state is _State.ARGUMENTS
            text = own.arguments + (self._text if is_open else "")
            is_same = text.startswith(told.arguments) or text == told.arguments.rstrip()
            if told.name != own.name or not is_same:
                return None
            own.id = told.id
            self._ahead = max(0, len(told.arguments) - len(own.arguments)) if is_open else 0
            pieces.append(self._piece(index, own.arguments[len(told.arguments) :]))
        return [piece for piece in pieces if piece]

    def _step(self, pieces: list[Object]) -> bool:
        """Read one part; return whether there was one."""
        if self._state is _State.OUTSIDE:
            return self._open()
        if self._state is _State.NAME:
            return self._name(pieces)
        return self._begin() if self._state is _State.BEGIN else self._arguments(pieces)

    def _open(self) -> bool:
        opener = self._markup.opener
        before, found, rest = self._text.partition(opener)
        if found:
            self._state, self._text = _State.NAME, rest
        else:
            self._text = before[-len(opener) :]
        return bool(found)

    def _name(self, pieces: list[Object]) -> bool:
        found = self._matched(self._markup.name)
        if found is None:
            return False
        index, groups = len(self.calls), found.groupdict()
        call_id = groups.get("id") or f"chatcmpl-tool-{self._answer_id}-{index}"
        self.calls.append(ToolCall(call_id, groups["name"]))
        self._state = _State.BEGIN
        pieces.append(self._start(index))
        return True

    def _begin(self) -> bool:
        if self._matched(self._markup.begin) is None:
            return False
        self._state = _State.ARGUMENTS
        return True

    def _arguments(self, pieces: list[Object]) -> bool:
        text = self._text
        ends = [
            (at, len(closer)) for closer in self._markup.closers if (at := text.find(closer)) >= 0
        ]
        at, size = min(ends, default=(len(text) - self._start_of_closer(text), 0))
        kept = self._without_brace(text[:at])
        pieces += self._say(kept)
        if not ends:
            self._text = text[len(kept) :]
            return False
        self._state, self._text, self._ahead = _State.OUTSIDE, text[at + size :], 0
        return True

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take off what a pattern matches; None if that has not come yet."""
        text = self._text
        found = pattern.match(text)
        if found is not None:
            self._text = text[found.end() :]
        elif len(text) > _MAX_HEAD_CHARACTERS or any(c in text for c in self._markup.closers):
            raise RecomputeUnsupported("the answer cannot be continued: its tool call is not read")
        return found

    def _without_brace(self, text: str) -> str:
        """Return text without what may not belong to the arguments, at its end."""
        brace = self._markup.brace
        return text.rstrip().removesuffix(brace).rstrip() if brace else text

    def _start_of_closer(self, text: str) -> int:
        """Return how many characters at the end may be the start of a closer."""
        closers = self._markup.closers
        longest = min(len(text), max(map(len, closers)) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(c.startswith(text[-n:]) for c in closers)), 0
        )

    def _say(self, text: str) -> list[Object]:
        """Add to the last call's arguments; return the piece, if the client lacks any of it."""
        self.calls[-1].arguments += text
        new = text[self._ahead :]
        self._ahead -= min(self._ahead, len(text))
        piece = self._piece(len(self.calls) - 1, new)
        return [piece] if piece else []

    def _start(self, index: int) -> Object:
        call = self.calls[index]
        function: Object = {"name": call.name, "arguments": ""}
        return {"index": index, "id": call.id, "type": "function", "function": function}

    @staticmethod
    def _piece(index: int, arguments: str) -> Object:
        return {"index": index, "function": {"arguments": arguments}} if arguments else {}


def read_on(
    spelled: str, delivered: Mapping[int, ToolCall], answer_id: str = ""
) -> tuple[CallReader, list[Object]] | None:
    """Return a reader that goes on behind text, and what the text says beyond what was delivered.

    Something has to be delivered, since that tells the markup. None if the text says something
    else than what was delivered, in all markups that are known.
    """
    for markup in MARKUPS:
        reader = CallReader(markup, answer_id)
        try:
            reader.feed(spelled)
        except RecomputeUnsupported:
            continue
        missing = reader.settle(delivered)
        if missing is not None:
            return reader, missing
    return None


def _is_json(text: str) -> bool:
    try:
        decode(text.encode("utf-8", "replace"))
    except ValueError:
        return False
    return True
