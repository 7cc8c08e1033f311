"""Token sequences that leave the model no choice: a document under a grammar, a tool call.

A tool call that has begun is a function of the prefix alone (its tools stand in the prompt), so it
goes on correctly from exact token ids, on any endpoint and without the request's `tools`. So does a
document whose schema the prompt tells.
"""

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from pdproxy.sim import grammar, tokenizer

JsonObject = Mapping[str, object]

# A user message that says so makes the model call a tool though the request leaves it the choice.
CALL_PHRASE = "use the tool"
# A user message that ends with this and a JSON schema makes the model write a document for it.
JSON_PHRASE = "answer in json:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must follow: a tool call, one of some texts, or a document."""

    tools: tuple[JsonObject, ...] = ()
    tool_name: str | None = None
    schema: JsonObject | None = None
    choices: tuple[str, ...] = ()


def script_of(rule: Grammar, state: int) -> list[int]:
    """The tokens of an answer under a grammar."""
    if rule.tools:
        after = zlib.crc32(tokenizer.CALL_BEGIN.to_bytes(4, "little"), state)
        return [tokenizer.CALL_BEGIN, *_call(rule.tools, after, rule.tool_name)]
    if rule.choices:
        return tokenizer.encode(rule.choices[state % len(rule.choices)])
    return tokenizer.encode(grammar.document(rule.schema, state))


def document_in_prefix(ids: Sequence[int], fault: int) -> list[int] | None:
    """The rest of a document that the prompt asks for; None if it asks for none.

    Args:
        ids: The whole prefix.
        fault: Nonzero if the KV cache holds another prefix; then another document comes out.
    """
    begun = _open_answer(ids)
    if begun is None:
        return None
    _, phrase, asked = _last_user(ids[:begun]).partition(JSON_PHRASE)
    if not phrase:
        return None
    try:
        schema = orjson.loads(asked.partition("<|end|>")[0])
    except orjson.JSONDecodeError:
        return None
    script = tokenizer.encode(grammar.document(schema, _state(ids[:begun], fault)))
    written = list(ids[begun:])
    return script[len(written) :] if script[: len(written)] == written else None


def script_in_prefix(ids: Sequence[int], fault: int) -> list[int] | None:
    """The rest of a tool call that the prefix has begun or asks for; None if it has neither.

    Nothing is left of one that the prefix ends with.

    Args:
        ids: The whole prefix.
        fault: Nonzero if the KV cache holds another prefix; then another call comes out.
    """
    if tokenizer.TOOLS not in ids:
        return None
    if ids[-1] == tokenizer.CALL_END:
        return []  # the answer ends with its call
    begun = _open_call(ids)
    if begun is None:
        if not _asks_for_call(ids):
            return None
        ids = [*ids, tokenizer.CALL_BEGIN]
        begun = len(ids)
        return [tokenizer.CALL_BEGIN, *_call(_tools_in(ids), _state(ids, fault), None)]
    script = _call(_tools_in(ids), _state(ids[:begun], fault), None)
    written = list(ids[begun:])
    return script[len(written) :] if script[: len(written)] == written else None


def _call(tools: Sequence[JsonObject], state: int, name: str | None) -> list[int]:
    return [*tokenizer.encode(grammar.call(tools, state, name)), tokenizer.CALL_END]


def _state(ids: Sequence[int], fault: int) -> int:
    return zlib.crc32(array("I", ids).tobytes()) ^ fault


def _open_call(ids: Sequence[int]) -> int | None:
    """Where the text of an unfinished tool call of the last turn begins."""
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] == tokenizer.CALL_BEGIN:
            return position + 1
        if ids[position] in (tokenizer.CALL_END, tokenizer.TURN_END):
            return None
    return None


def _asks_for_call(ids: Sequence[int]) -> bool:
    """Whether an answer begins here and the last user message has the phrase."""
    newline = tokenizer.encode("\n")[0]
    fresh = list(ids[-2:]) == [tokenizer.ASSISTANT, newline] or ids[-1] == tokenizer.THINK_END
    return fresh and CALL_PHRASE in _last_user(ids).lower()


def _last_user(ids: Sequence[int]) -> str:
    """The text from the last user message on."""
    return tokenizer.decode(ids[_last(ids, tokenizer.USER) :]) if tokenizer.USER in ids else ""


def _open_answer(ids: Sequence[int]) -> int | None:
    """Where the content of the last turn begins; None if it has none."""
    if tokenizer.ASSISTANT not in ids:
        return None
    begin = _last(ids, tokenizer.ASSISTANT)
    turn = list(ids[begin:])
    if tokenizer.TURN_END in turn:
        return None
    if tokenizer.THINK_BEGIN in turn and tokenizer.THINK_END not in turn:
        return None
    if tokenizer.THINK_END in turn:
        return begin + turn.index(tokenizer.THINK_END) + 1
    return begin + len([tokenizer.ASSISTANT, *tokenizer.encode("\n")])


def _last(ids: Sequence[int], token: int) -> int:
    return len(ids) - 1 - list(reversed(ids)).index(token)


def _tools_in(ids: Sequence[int]) -> list[JsonObject]:
    """The tools that the chat template wrote into the prompt."""
    start = list(ids).index(tokenizer.TOOLS) + 1
    text = tokenizer.decode(ids[start:])
    try:
        tools = orjson.loads(text.partition("<|end|>")[0])
    except orjson.JSONDecodeError:
        return []
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
