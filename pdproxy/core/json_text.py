"""JSON text that comes piece by piece: whether it is JSON so far, and where its one value ends."""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, beside escapes
_BARE = re.compile(r"[-+.0-9A-Za-z]*")  # what a number or a literal may be made of
_IS_BARE = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_BARE_CHARACTERS = 400  # the longest double in full takes 327
_MAX_DEPTH = 256
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_HEX_DIGITS = 4
_CLOSERS = {"{": "}", "[": "]"}


class _Awaited(Enum):
    """What may come next, white space aside."""

    VALUE = auto()
    ELEMENT = auto()  # the first value of an array, or its end
    KEY = auto()
    MEMBER = auto()  # the first key of an object, or its end
    COLON = auto()
    NEXT = auto()  # a comma, or an end
    NOTHING = auto()


class JsonText:
    """One JSON value, read as its text comes.

    Attributes:
        text: what belongs to it so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._awaited = _Awaited.VALUE
        self._open: list[str] = []  # brackets
        self._is_in_string = False
        self._is_key = False
        self._escape = ""  # begun in a string
        self._bare = ""  # a number or a literal that may go on

    @property
    def is_whole(self) -> bool:
        """Whether it has ended; a number or a literal ends with what follows it only."""
        return self._awaited is _Awaited.NOTHING

    @property
    def may_end(self) -> bool:
        """Whether it is whole if nothing follows."""
        is_bare = bool(self._bare) and not self._open
        return self.is_whole or (is_bare and _IS_BARE.fullmatch(self._bare) is not None)

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the value, space in front included.

        Raises:
            ValueError: it is not JSON.
        """
        at = 0
        while at < len(text) and not self.is_whole:
            at = self._step(text, at)
        self.text += text[:at]
        return at

    def _step(self, text: str, at: int) -> int:
        """Read one part; return where it ends."""
        if self._is_in_string:
            return self._string(text, at)
        if self._bare:
            return self._go_on_bare(text, at)
        char = text[at]
        if char not in _SPACE:
            self._mark(char)
        return at + 1

    def _mark(self, char: str) -> None:
        """Read a character outside of strings, numbers and literals."""
        awaited = self._awaited
        is_end = awaited in (_Awaited.NEXT, _Awaited.ELEMENT, _Awaited.MEMBER)
        if is_end and self._open and char == _CLOSERS[self._open[-1]]:
            self._open.pop()
            self._end_value()
        elif awaited is _Awaited.NEXT and char == ",":
            self._awaited = _Awaited.KEY if self._open[-1] == "{" else _Awaited.VALUE
        elif awaited is _Awaited.COLON and char == ":":
            self._awaited = _Awaited.VALUE
        elif awaited in (_Awaited.KEY, _Awaited.MEMBER) and char == '"':
            self._is_in_string = self._is_key = True
        elif awaited in (_Awaited.VALUE, _Awaited.ELEMENT):
            self._begin_value(char)
        else:
            raise ValueError("this is no JSON")

    def _begin_value(self, char: str) -> None:
        if char in _CLOSERS:
            self._open.append(char)
            if len(self._open) > _MAX_DEPTH:
                raise ValueError("this is nested too deeply")
            self._awaited = _Awaited.MEMBER if char == "{" else _Awaited.ELEMENT
        elif char == '"':
            self._is_in_string, self._is_key = True, False
        elif char in "-0123456789tfn":
            self._bare = char
        else:
            raise ValueError("this is no JSON")

    def _end_value(self) -> None:
        self._awaited = _Awaited.NEXT if self._open else _Awaited.NOTHING

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if self._escape:
            self._go_on_escape(char)
            return at + 1
        end = _PLAIN.match(text, at)
        assert end is not None, "the pattern matches nothing, too"
        if end.end() > at:
            return end.end()
        if char == "\\":
            self._escape = char
        elif char == '"':
            self._is_in_string = False
            if self._is_key:
                self._awaited = _Awaited.COLON
            else:
                self._end_value()
        else:
            raise ValueError("this is no JSON")
        return at + 1

    def _go_on_escape(self, char: str) -> None:
        self._escape += char
        if char not in (_ESCAPED if len(self._escape) == len("\\u") else _HEX):
            raise ValueError("this is no JSON")
        is_long = self._escape.startswith("\\u")
        if not is_long or len(self._escape) == len("\\u") + _HEX_DIGITS:
            self._escape = ""

    def _go_on_bare(self, text: str, at: int) -> int:
        found = _BARE.match(text, at)
        assert found is not None, "the pattern matches nothing, too"
        self._bare += found.group()
        if len(self._bare) > _MAX_BARE_CHARACTERS:
            raise ValueError("this number is too long")
        if found.end() < len(text):
            if _IS_BARE.fullmatch(self._bare) is None:
                raise ValueError("this is no JSON")
            self._bare = ""
            self._end_value()
        return found.end()
