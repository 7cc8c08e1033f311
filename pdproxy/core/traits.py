"""What a request asks for that decides how its answer can go on."""

from __future__ import annotations

from pdproxy.core.api import GenerateRequest
from pdproxy.core.plain import as_objects, as_text, as_whole, plain

_GRAMMARS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_TEXT_PARTS = frozenset({"", "text", "input_text", "output_text", "refusal", "thinking"})


def has_media(request: GenerateRequest) -> bool:
    """Tell whether the prompt holds more than its token ids say."""
    messages = as_objects(plain(request.fields.get("messages")))
    parts = [part for message in messages for part in as_objects(message.get("content"))]
    return any(as_text(part.get("type")) not in _TEXT_PARTS for part in parts)


def has_grammar(request: GenerateRequest) -> bool:
    """Tell whether the output behind the reasoning follows a grammar."""
    fields = request.fields
    kind = plain(fields.get("response_format"))
    if isinstance(kind, dict) and kind.get("type") != "text":
        return True
    if any(plain(fields.get(name)) for name in _GRAMMARS):
        return True
    choice = plain(fields.get("tool_choice"))
    return choice == "required" or isinstance(choice, dict)


def may_call_tools(request: GenerateRequest) -> bool:
    """Tell whether the answer may hold tool calls."""
    has_tools = bool(plain(request.fields.get("tools")))
    return has_tools and plain(request.fields.get("tool_choice")) != "none"


def is_repeatable(request: GenerateRequest) -> bool:
    """Tell whether the same request gives the same answer."""
    temperature = plain(request.fields.get("temperature"))
    is_greedy = isinstance(temperature, int | float) and temperature == 0
    return is_greedy or as_whole(plain(request.fields.get("seed"))) is not None
