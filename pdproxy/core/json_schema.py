"""A check of a value against a JSON schema, for schemas that clients send.

Rules: a keyword that is not known makes a schema one that cannot be checked, never one that is
checked in part; a check is bounded, whatever the schema, so nothing here takes patterns, and
references lead nowhere but into the schema itself.

Source: JSON Schema 2020-12, and the keywords that its older drafts spell alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TypeGuard

import msgspec

from pdproxy.core.plain import Object

_MAX_STEPS = 100_000
_MAX_DEPTH = 64

# They say nothing about values, or stand for what references lead to.
_NOTES = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "format",
        "readOnly",
        "strict",
        "title",
        "writeOnly",
    }
)
_UNIONS = ("allOf", "anyOf", "oneOf")


class _Beyond(Exception):
    """The check would take too long, or goes too deep."""


def is_checkable(schema: object) -> bool:
    """Tell whether all that a schema asks for can be checked."""
    return _is_known(schema, schema, 0)


def fault(schema: object, value: object) -> str | None:
    """Return what is wrong with a value; None if it fits a schema that can be checked."""
    try:
        return _Check(schema).fault(schema, value, "$", 0)
    except _Beyond:
        return "it takes too long to tell whether it fits"


def _is_known(schema: object, root: object, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return False
    if not all(name in _NOTES or name in _KEYWORDS for name in schema):
        return False
    reference = schema.get("$ref")
    if reference is not None and _target(root, reference) is None:
        return False
    return all(_is_known(part, root, depth + 1) for part in _parts(schema))


def _parts(schema: Object) -> list[object]:
    """Return the schemas inside a schema, those that are defined for references included."""
    parts: list[object] = []
    for name in ("properties", "$defs", "definitions"):
        inner = schema.get(name, {})
        parts += inner.values() if isinstance(inner, dict) else [None]
    for name in (*_UNIONS, "prefixItems"):
        inner = schema.get(name, [])
        parts += inner if isinstance(inner, list) else [None]
    return parts + [schema[name] for name in ("items", "additionalProperties") if name in schema]


def _target(root: object, reference: object) -> object:
    """Return what a reference such as `#/$defs/city` leads to; None if it leads nowhere."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    found = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


class _Check:
    """One check, which counts its steps."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._steps = 0

    def fault(self, schema: object, value: object, at: str, depth: int) -> str | None:
        """Return what is wrong with the value at a place such as `$.city`."""
        self._steps += 1
        if self._steps > _MAX_STEPS or depth > _MAX_DEPTH:
            raise _Beyond
        if not isinstance(schema, dict):
            return None if schema is not False else f"{at} may not be there"
        for name, asked in schema.items():
            rule = _RULES.get(name)
            if isinstance(asked, list):
                self._steps += len(asked)
            if rule is not None and (wrong := rule(asked, value)):
                return f"{at} {wrong}"
        if "$ref" in schema:
            wrong = self.fault(_target(self._root, schema["$ref"]), value, at, depth + 1)
            if wrong:
                return wrong
        return (
            self._members(schema, value, at, depth)
            or self._elements(schema, value, at, depth)
            or self._unions(schema, value, at, depth)
        )

    def _members(self, schema: Object, value: object, at: str, depth: int) -> str | None:
        if not isinstance(value, dict):
            return None
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        others = schema.get("additionalProperties", True)
        for name, member in value.items():
            wrong = self.fault(known.get(name, others), member, f"{at}.{name}", depth + 1)
            if wrong:
                return wrong
        return None

    def _elements(self, schema: Object, value: object, at: str, depth: int) -> str | None:
        if not isinstance(value, list):
            return None
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        rest = schema.get("items", True)
        for index, element in enumerate(value):
            inner = first[index] if index < len(first) else rest
            wrong = self.fault(inner, element, f"{at}[{index}]", depth + 1)
            if wrong:
                return wrong
        return None

    def _unions(self, schema: Object, value: object, at: str, depth: int) -> str | None:
        for name in _UNIONS:
            branches = schema.get(name)
            if not isinstance(branches, list):
                continue
            wrongs = [self.fault(branch, value, at, depth + 1) for branch in branches]
            fitting = wrongs.count(None)
            if name == "allOf" and fitting < len(wrongs):
                return next(wrong for wrong in wrongs if wrong)
            if name == "anyOf" and not fitting:
                return f"{at} fits none of its forms"
            if name == "oneOf" and fitting != 1:
                return f"{at} fits {fitting} of its forms, not one"
        return None


# --- what one keyword asks of a value: what is wrong, or None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == value // 1,
    "null": lambda value: value is None,
    "number": _is_number,
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}


def _type(asked: object, value: object) -> str | None:
    names = asked if isinstance(asked, list) else [asked]
    fits = any(name in _TYPES and _TYPES[name](value) for name in names if isinstance(name, str))
    return None if fits else f"is no {' or '.join(map(str, names))}"


def _enum(asked: object, value: object) -> str | None:
    known = asked if isinstance(asked, list) else []
    own = _spelled(value)
    return None if any(_spelled(one) == own for one in known) else "is none of the values"


def _const(asked: object, value: object) -> str | None:
    return None if _spelled(value) == _spelled(asked) else "is not the value"


def _spelled(value: object) -> bytes:
    """Return what equal values have in common; to Python true is 1."""
    return msgspec.json.encode(value, order="sorted")


def _required(asked: object, value: object) -> str | None:
    if not isinstance(value, dict) or not isinstance(asked, list):
        return None
    lacking = [str(name) for name in asked if name not in value]
    return f"lacks {', '.join(lacking)}" if lacking else None


def _bound(
    kind: type | None, is_kept: Callable[[float, float], bool]
) -> Callable[[object, object], str | None]:
    """Return the rule of a keyword that bounds the size of a kind of value; None is a number."""

    def rule(asked: object, value: object) -> str | None:
        size = value
        if kind is not None:
            size = len(value) if isinstance(value, kind) else None  # type: ignore[arg-type]
        if not _is_number(size) or not _is_number(asked) or is_kept(size, asked):
            return None
        return "is beyond its bounds"

    return rule


_RULES: Mapping[str, Callable[[object, object], str | None]] = {
    "const": _const,
    "enum": _enum,
    "exclusiveMaximum": _bound(None, operator.lt),
    "exclusiveMinimum": _bound(None, operator.gt),
    "maxItems": _bound(list, operator.le),
    "maxLength": _bound(str, operator.le),
    "maxProperties": _bound(dict, operator.le),
    "maximum": _bound(None, operator.le),
    "minItems": _bound(list, operator.ge),
    "minLength": _bound(str, operator.ge),
    "minProperties": _bound(dict, operator.ge),
    "minimum": _bound(None, operator.ge),
    "required": _required,
    "type": _type,
}
_KEYWORDS = frozenset(_RULES) | {
    "$ref",
    "additionalProperties",
    "items",
    "prefixItems",
    "properties",
    *_UNIONS,
}
