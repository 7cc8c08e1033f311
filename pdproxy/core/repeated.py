"""The text of a prompt that an engine gives again by mistake, taken off the text of a round.

If the token ids of a prompt end inside a character, the first text of the answer may be that of all
of them, with the character's end (vLLM 0.32). An event of several tokens does not tell where its
characters end, so this cannot always be kept from happening.
"""

from __future__ import annotations

_TELLING = 64  # characters by which known text is found again
_NEAR = 8  # within so many characters a character that was cut comes to its end


class Repeated:
    """Looks at the first text of a round by ids.

    Args:
        known: the text so far, with which the ids of the prompt end.
        ids: how many ids of the prompt there are before that text.
        lag: how many characters the engine holds back for the sake of stop strings.
    """

    def __init__(self, known: str, ids: int, lag: int) -> None:
        self._tail = known[-_TELLING:]
        self._least = len(known) + ids // 2
        self._lag = lag
        self._seen = ""
        self._first = 0
        self._is_decided = not known

    def strip(self, text: str, *, is_end: bool) -> str:
        """Return text without what is repeated; nothing while that is open."""
        if self._is_decided or not (text or is_end):
            return text
        self._first = self._first or len(text)
        self._seen += text
        may_repeat = len(self._seen) + self._lag > self._least
        if may_repeat and not is_end and len(self._seen) - self._first < self._lag:
            return ""
        self._is_decided = True
        return self._rest() if may_repeat else self._seen

    def _rest(self) -> str:
        """Return what stands behind the text so far, if that and the prompt are there at all.

        What was cut there is a character of several bytes, so behind it stands no ASCII.
        """
        begin = self._seen.rfind(self._tail)
        while begin + len(self._tail) >= self._least:
            rest = self._seen[begin + len(self._tail) :]
            if not rest[:_NEAR].isascii():
                return rest
            begin = self._seen.rfind(self._tail, 0, begin + len(self._tail) - 1)
            if begin < 0:
                break
        return self._seen
