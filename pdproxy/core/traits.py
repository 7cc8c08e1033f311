"""What a request asks for that decides how its answer can go on."""

from __future__ import annotations

from pdproxy.core.api import GenerateRequest
from pdproxy.core.jsonfields import decode
from pdproxy.core.plain import Object, as_object, as_objects, as_text, as_whole, plain

_GUIDED = ("json", "regex", "choice", "grammar")
GRAMMARS = ("structured_outputs", *(f"guided_{name}" for name in _GUIDED))
_NO_GRAMMAR = object()
_ANY_OBJECT = {"type": "object"}
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
    if as_object(plain(fields.get("structured_outputs"))):
        return True
    if any(plain(fields.get(f"guided_{name}")) is not None for name in _GUIDED):
        return True
    choice = plain(fields.get("tool_choice"))
    return choice == "required" or isinstance(choice, dict)


def asked_schema(request: GenerateRequest) -> object | None:
    """Return the schema of the JSON that the output has to be.

    None if there is no grammar, one that is not given as a schema, or more than one.
    """
    fields = request.fields
    choice = plain(fields.get("tool_choice"))
    if choice == "required" or isinstance(choice, dict):
        return None
    found = [_schema_of_format(as_object(plain(fields.get("response_format"))))]
    found.append(_schema_of_outputs(as_object(plain(fields.get("structured_outputs")))))
    guided = {name: plain(fields.get(f"guided_{name}")) for name in _GUIDED}
    found.append(_schema_of_outputs(guided))
    schemas = [schema for schema in found if schema is not _NO_GRAMMAR]
    return schemas[0] if len(schemas) == 1 else None


def _schema_of_format(asked: Object) -> object:
    kind = asked.get("type", "text")
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema":
        return as_object(asked.get("json_schema")).get("schema")
    return _NO_GRAMMAR if kind == "text" else None


def _schema_of_outputs(asked: Object) -> object:
    names = (*_GUIDED, "json_object", "structural_tag")
    constraints = [name for name in names if asked.get(name) not in (None, False)]
    if not constraints:
        return _NO_GRAMMAR
    if constraints == ["json_object"]:
        return _ANY_OBJECT
    schema = asked["json"] if constraints == ["json"] else None
    if not isinstance(schema, str):
        return schema
    try:
        return decode(schema.encode("utf-8", "replace"))
    except ValueError:
        return None


def may_call_tools(request: GenerateRequest) -> bool:
    """Tell whether the answer may hold tool calls."""
    has_tools = bool(plain(request.fields.get("tools")))
    return has_tools and plain(request.fields.get("tool_choice")) != "none"


def is_repeatable(request: GenerateRequest) -> bool:
    """Tell whether the same request gives the same answer."""
    temperature = plain(request.fields.get("temperature"))
    is_greedy = isinstance(temperature, int | float) and temperature == 0
    return is_greedy or as_whole(plain(request.fields.get("seed"))) is not None
