"""Plain JSON objects of which an engine decides what is in them: read without trusting a type.

Rule: what is absent, null or of another type reads as empty.
"""

from __future__ import annotations

from pdproxy.core.jsonfields import Raw, decode

Object = dict[str, object]


def as_object(value: object) -> Object:
    """Return an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_objects(value: object) -> list[Object]:
    """Return the objects of a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_list(value: object) -> list[object]:
    """Return a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str:
    """Return a string, else an empty one."""
    return value if isinstance(value, str) else ""


def as_whole(value: object) -> int | None:
    """Return a whole number; true and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def plain(value: Raw | bytes | None) -> object:
    """Return the value of a raw field; None if it is absent or no JSON."""
    if value is None:
        return None
    try:
        return decode(value)
    except ValueError:
        return None
