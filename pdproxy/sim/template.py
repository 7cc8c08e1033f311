"""The chat template: a fixed function of everything in a chat request that reaches the prompt.

Whatever a proxy loses or changes (a role, an image, a tool, a template argument, the reasoning of
an earlier turn) changes the prompt, and with it the whole answer.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from pdproxy.sim.problems import bad_request

JsonObject = Mapping[str, object]

IMAGE_TOKENS = 16
# These say how the answer begins; every other template argument is written into the prompt.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the template needs of a chat request."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] = ()
    arguments: JsonObject = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning: bool = False


def thinks(turn: Turn) -> bool:
    """Whether the generation prompt opens a thinking block."""
    switched_off = any(turn.arguments.get(name) is False for name in _THINKING_SWITCHES)
    return turn.reasoning and not switched_off


def render(turn: Turn) -> str:
    """The prompt text of a chat request.

    Raises:
        Problem: 400, for an open last message without text.
    """
    parts = ["<s>"]
    arguments = {k: v for k, v in turn.arguments.items() if k not in _THINKING_SWITCHES}
    if arguments:
        parts.append(f"<|kwargs|>{_json(arguments)}\n")
    if turn.tools:
        parts.append(f"<|tools|>{_json(list(turn.tools))}<|end|>\n")
    last = len(turn.messages) - 1
    for position, message in enumerate(turn.messages):
        is_open = turn.continue_final_message and position == last
        parts.append(_message(message, is_open=is_open))
    if turn.add_generation_prompt and not turn.continue_final_message:
        parts.append("<|assistant|>\n" + ("<think>" if thinks(turn) else ""))
    return "".join(parts)


def _message(message: JsonObject, *, is_open: bool) -> str:
    """One message; an open one has no end and no tool calls, so that text can go on."""
    content = message_text(message.get("content"))
    name = message.get("name")
    head = f"<|{message.get('role')}|>\n" + (f"name: {name}\n" if name else "")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    body = (f"<think>{reasoning}</think>" if reasoning else "") + content
    if is_open:
        if message.get("content") is None:
            raise bad_request("The final message has no text to continue.", "messages")
        return head + body
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        body += "".join(f"<tool_call>{_json(_without_id(call))}</tool_call>" for call in calls)
    call_id = message.get("tool_call_id")
    return f"{head}{f'for {call_id}: ' if call_id else ''}{body}<|end|>\n"


def message_text(content: object) -> str:
    """The text of a message's content; an image is placeholder tokens and its fingerprint."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    if isinstance(text := part.get("text"), str):
        return text
    return "<|image|>" * IMAGE_TOKENS + f"{zlib.crc32(_json(part).encode()):08x}"


def _without_id(call: object) -> object:
    """Ids are made anew by each engine and say nothing about the conversation."""
    return {k: v for k, v in call.items() if k != "id"} if isinstance(call, dict) else call


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
