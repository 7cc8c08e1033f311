"""The text of a chat answer -> reasoning, content and tool calls, as vLLM's parsers split it.

One parser per choice of a stream; whole answers go through `parse_whole`. The two differ where
vLLM's do: a stream looks at the prompt to know whether it begins inside a thinking block; a whole
answer looks at the new text only.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdproxy.sim import tokenizer

_THINK_END, _CALL_BEGIN, _CALL_END = "</think>", "<tool_call>", "</tool_call>"
_CALL_HEAD = re.compile(r'\s*\{"name": "((?:[^"\\]|\\.)*)", "arguments": ')


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete answer, split."""

    reasoning: str | None
    content: str | None
    calls: list[dict[str, object]] = field(default_factory=list)


def parse_whole(text: str, *, splits_reasoning: bool, parses_tools: bool) -> WholeAnswer:
    """Split an answer that is not streamed; a tool call that is cut off stays raw content."""
    reasoning: str | None = None
    content: str | None = text
    if splits_reasoning:
        reasoning, marker, rest = text.partition(_THINK_END)
        content = rest if marker and rest else None
    if not parses_tools or content is None or _CALL_BEGIN not in content:
        return WholeAnswer(reasoning, content)
    before, *pieces = content.split(_CALL_BEGIN)
    if not all(_CALL_END in piece for piece in pieces):
        return WholeAnswer(reasoning, content)
    calls = [_whole_call(piece.partition(_CALL_END)[0]) for piece in pieces]
    return WholeAnswer(reasoning, before or None, calls)


def _whole_call(raw: str) -> dict[str, object]:
    head = _CALL_HEAD.match(raw)
    name = head.group(1) if head else ""
    arguments = raw[head.end() :] if head else raw
    arguments = arguments[: _json_end(arguments) or len(arguments)]
    return {
        "id": call_id(),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def call_id() -> str:
    """A tool call id; each answer makes new ones."""
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


def begins_thinking(prompt: Sequence[int]) -> bool:
    """Whether a prompt ends inside a thinking block."""
    for token in reversed(prompt):
        if token == tokenizer.THINK_BEGIN:
            return True
        if token in (tokenizer.THINK_END, tokenizer.TURN_END):
            return False
    return False


class DeltaParser:
    """Splits one streamed choice.

    Args:
        is_thinking: Whether the answer begins inside a thinking block.
        parses_tools: Whether tool calls are taken out of the text.
    """

    def __init__(self, *, is_thinking: bool, parses_tools: bool) -> None:
        self._is_thinking = is_thinking
        self._parses_tools = parses_tools
        self._pending = ""
        self._call: str | None = None
        self._sent = 0
        self._has_name = False
        self.calls = 0

    def feed(self, text: str, *, is_last: bool) -> dict[str, object]:
        """The delta for more text: any of `reasoning`, `content` and `tool_calls`, or nothing."""
        self._pending += text
        delta: dict[str, object] = {}
        if self._is_thinking:
            shown = self._take_until(_THINK_END, is_last)
            if shown[0]:
                delta["reasoning"] = shown[0]
            self._is_thinking = not shown[1]
        if not self._is_thinking:
            self._feed_content(delta, is_last)
        return delta

    def _feed_content(self, delta: dict[str, object], is_last: bool) -> None:
        calls: list[dict[str, object]] = []
        content = ""
        while self._pending:
            before = self._pending
            if self._call is not None:
                self._feed_call(calls, is_last)
            elif self._parses_tools:
                shown, found = self._take_until(_CALL_BEGIN, is_last)
                content += shown
                if found:
                    self._call, self._sent, self._has_name = "", 0, False
            else:
                content, self._pending = content + self._pending, ""
            if self._pending == before:
                break
        if content:
            delta["content"] = content
        if calls:
            delta.setdefault("content", None)
            delta["tool_calls"] = calls

    def _feed_call(self, calls: list[dict[str, object]], is_last: bool) -> None:
        """Take call text; add what has become known of the call."""
        assert self._call is not None, "only inside a call"
        text, found = self._take_until(_CALL_END, is_last)
        self._call += text
        head = _CALL_HEAD.match(self._call)
        if head is not None:
            self._add_known(calls, head.group(1), self._call[head.end() :])
        if found:
            self._call = None
            self.calls += 1

    def _add_known(self, calls: list[dict[str, object]], name: str, arguments: str) -> None:
        end = _json_end(arguments)
        fresh = arguments[self._sent : end or len(arguments)]
        self._sent += len(fresh)
        call: dict[str, object] = {"index": self.calls, "function": {"arguments": fresh}}
        if not self._has_name:
            self._has_name = True
            function = {"name": name} | ({"arguments": fresh} if fresh else {})
            call = {"id": call_id(), "type": "function", "index": self.calls, "function": function}
        elif not fresh:
            return
        calls.append(call)

    def _take_until(self, marker: str, is_last: bool) -> tuple[str, bool]:
        """Pending text before a marker, and whether the marker (then gone) was there."""
        before, found, after = self._pending.partition(marker)
        if found:
            self._pending = after
            return before, True
        keep = 0 if is_last else _overlap(self._pending, marker)
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown, False


def _overlap(text: str, marker: str) -> int:
    """How much of the text's end could be the marker's beginning."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


def _json_end(text: str) -> int | None:
    """Where the JSON object at the start of a text ends; None if it goes on."""
    depth, in_string, is_escaped = 0, False, False
    for position, character in enumerate(text):
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return position + 1
    return None
