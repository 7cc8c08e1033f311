"""Typed reading of a request body: a field of the wrong type is vLLM's 400, never a 422."""

from collections.abc import Mapping

from pdproxy.sim.problems import malformed

JsonObject = Mapping[str, object]


def required(body: JsonObject, name: str) -> object:
    """A field that must be there."""
    if name not in body:
        shown = f"<dict of {len(body)} items>"
        raise malformed("missing", f"body.{name}", "Field required", shown)
    return body[name]


def whole(body: JsonObject, name: str) -> int | None:
    """An integer; a string of digits counts as one, as with pydantic."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return int(value)
    if isinstance(value, str):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise malformed("int_parsing", f"body.{name}", message, value)
    raise malformed("int_type", f"body.{name}", "Input should be a valid integer", _shown(value))


def number(body: JsonObject, name: str) -> float | None:
    """A number."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    message = "Input should be a valid number"
    raise malformed("float_type", f"body.{name}", message, _shown(value))


def flag(body: JsonObject, name: str, default: bool = False) -> bool:
    """A boolean."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    message = "Input should be a valid boolean"
    raise malformed("bool_type", f"body.{name}", message, _shown(value))


def mapping(body: JsonObject, name: str) -> dict[str, object] | None:
    """An object."""
    value = body.get(name)
    if value is None or isinstance(value, dict):
        return value
    message = "Input should be a valid dictionary"
    raise malformed("dict_type", f"body.{name}", message, _shown(value))


def objects(body: JsonObject, name: str) -> list[dict[str, object]]:
    """A list of objects; none is an empty list."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        message = "Input should be a valid list"
        raise malformed("list_type", f"body.{name}", message, _shown(value))
    for position, item in enumerate(value):
        if not isinstance(item, dict):
            where = f"body.{name}.{position}"
            message = "Input should be a valid dictionary"
            raise malformed("dict_type", where, message, _shown(item))
    return value


def texts(body: JsonObject, name: str) -> tuple[str, ...]:
    """A string or a list of strings."""
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise malformed("string_type", f"body.{name}", "Input should be a valid string", _shown(value))


def wholes(body: JsonObject, name: str) -> tuple[int, ...]:
    """A list of integers."""
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise malformed("list_type", f"body.{name}", "Input should be a valid list", _shown(value))


def _shown(value: object) -> str:
    """A short form of a wrong input, as vLLM puts into its message."""
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    return str(value)[:100]
