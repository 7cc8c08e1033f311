"""JSON that an answer must follow: documents for a schema and tool calls, from a number alone.

Stands for structured output. The same seed gives the same document; a grammar always starts at its
root, so a continuation that sends it again begins a second document, as on real engines.
"""

from collections.abc import Mapping, Sequence

import orjson

JsonObject = Mapping[str, object]

_WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "lambda")
_MAX_DEPTH = 6
_MASK = (1 << 64) - 1


def mixed(seed: int, salt: int = 0) -> int:
    """Spread a number over 64 bits; nearby seeds give unrelated results."""
    value = ((seed ^ (salt * 0x9E3779B97F4A7C15)) + 0x632BE59BD9B4E019) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def document(schema: JsonObject | None, seed: int) -> str:
    """A small JSON document that fits the schema; without one, any object."""
    value = _value(schema, schema, seed, 0) if schema else {"answer": _string({}, seed)}
    return orjson.dumps(value).decode()


def call(tools: Sequence[JsonObject], seed: int, name: str | None) -> str:
    """The text between the tool call markers: `{"name": "f", "arguments": {..}}` on its own line.

    Args:
        tools: The request's `tools`.
        seed: Decides the tool, if the request does not, and the arguments.
        name: The tool that `tool_choice` names.
    """
    functions = {str(f.get("name")): f for t in tools if isinstance(f := t.get("function"), dict)}
    if not functions:
        return ""
    names = sorted(functions)
    chosen = name if name in functions else names[mixed(seed, 1) % len(names)]
    schema = functions[chosen].get("parameters")
    arguments = document(schema if isinstance(schema, dict) and schema else None, mixed(seed, 2))
    return f'\n{{"name": {orjson.dumps(chosen).decode()}, "arguments": {arguments}}}\n'


def _value(schema: object, root: object, seed: int, depth: int) -> object:
    """A value for one schema node."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    fixed = _fixed(schema, root, seed, depth)
    if fixed is not None:
        return fixed[0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "null"
    if kind == "object":
        return _object(schema, root, seed, depth)
    if kind == "array":
        count = max(1, int(schema.get("minItems", 1)))
        return [_value(schema.get("items"), root, mixed(seed, i), depth + 1) for i in range(count)]
    return _scalar(str(kind), schema, seed)


def _scalar(kind: str, schema: dict[str, object], seed: int) -> object:
    if kind in ("integer", "number"):
        least = schema.get("minimum")
        return (int(least) if isinstance(least, int | float) else 0) + seed % 10
    if kind == "boolean":
        return bool(seed & 1)
    return None if kind == "null" else _string(schema, seed)


def _fixed(schema: dict[str, object], root: object, seed: int, depth: int) -> tuple[object] | None:
    """What const, enum, a reference or a union decides; None if nothing does."""
    if "const" in schema:
        return (schema["const"],)
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return (values[seed % len(values)],)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        node = root
        for key in reference.removeprefix("#/").split("/"):
            node = node.get(key) if isinstance(node, dict) else None
        return (_value(node, root, seed, depth + 1),)
    for union in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(union)
        if isinstance(branches, list) and branches:
            return (_value(branches[0], root, seed, depth + 1),)
    return None


def _object(schema: dict[str, object], root: object, seed: int, depth: int) -> dict[str, object]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        str(key): _value(node, root, mixed(seed, i + 1), depth + 1)
        for i, (key, node) in enumerate(properties.items())
    }


def _string(schema: dict[str, object], seed: int) -> str:
    text = f"{_WORDS[seed % 8]} {_WORDS[(seed >> 8) % 8]}"
    limit = schema.get("maxLength")
    text = text[:limit].rstrip() if isinstance(limit, int) else text
    least = schema.get("minLength")
    return text.ljust(least, "x") if isinstance(least, int) else text
