"""What a request forces on its answer: tool choice, response format, structured outputs."""

from collections.abc import Mapping

from pdproxy.sim import fields
from pdproxy.sim.problems import bad_request
from pdproxy.sim.scripts import Grammar

JsonObject = Mapping[str, object]


def grammar_of(body: JsonObject, tools: object) -> Grammar | None:
    """What the answer must follow: a tool choice, a response format or structured outputs."""
    choice = body.get("tool_choice")
    given = tuple(fields.objects(body, "tools")) if tools else ()
    if given and choice == "required":
        return Grammar(tools=given)
    if given and isinstance(choice, dict):
        function = choice.get("function")
        return Grammar(tools=given, tool_name=_tool_name(function, given))
    form = fields.mapping(body, "response_format") or {}
    if form.get("type") == "json_object":
        return Grammar()
    if form.get("type") == "json_schema":
        described = form.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        return Grammar(schema=schema if isinstance(schema, dict) else None)
    return _structured(fields.mapping(body, "structured_outputs") or {})


def _structured(outputs: JsonObject) -> Grammar | None:
    schema, choices = outputs.get("json"), outputs.get("choice")
    if isinstance(schema, dict):
        return Grammar(schema=schema)
    if isinstance(choices, list) and choices:
        return Grammar(choices=tuple(map(str, choices)))
    return Grammar() if outputs.get("json_object") is True else None


def _tool_name(function: object, tools: tuple[JsonObject, ...]) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    described = (tool.get("function") for tool in tools)
    if name not in [f.get("name") for f in described if isinstance(f, dict)]:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise bad_request(message, "tool_choice")
    return str(name)
