"""A JSON object as its top-level fields, each still raw bytes: what is not read is not touched.

Rule: a value that nobody edits leaves byte for byte as it came (big integers, float spelling,
lone surrogates, nesting), and costs a scan, not a parse.
"""

from __future__ import annotations

# orjson has no hook for what strict JSON refuses; see _split_leniently.
import json  # noqa: TID251
from collections.abc import Mapping

import msgspec

Raw = msgspec.Raw
JsonFields = Mapping[str, Raw]

_SPLITTER = msgspec.json.Decoder(dict[str, Raw])
_ENCODER = msgspec.json.Encoder()


def split_object(data: bytes) -> dict[str, Raw]:
    """Return the top-level fields of a JSON object, values unparsed.

    Example: `b'{"a": [1, 2], "b": "x"}'` gives `{"a": Raw(b'[1, 2]'), "b": Raw(b'"x"')}`.
    A byte order mark, lone surrogate escapes and duplicate keys (the last wins) are accepted, as
    Python's own reader does, which engines use.

    Raises:
        ValueError: `data` is not UTF-8, not JSON, or not an object. The text quotes nothing of it.
    """
    if not data.isascii():
        _check_utf8(data)
    try:
        return _SPLITTER.decode(data)
    except msgspec.ValidationError:
        raise ValueError("the body must be a JSON object") from None
    except msgspec.DecodeError:
        return _split_leniently(data)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def join_object(fields: JsonFields) -> bytes:
    """Return the JSON object of `fields`, values byte for byte."""
    return _ENCODER.encode(fields)


def encode(value: object) -> bytes:
    """Return compact JSON of a plain value."""
    return _ENCODER.encode(value)


def raw(value: object) -> Raw:
    """Return a plain value as a field of a JSON object."""
    return Raw(_ENCODER.encode(value))


def decode(value: Raw | bytes) -> object:
    """Return the plain value of a raw field.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        result: object = msgspec.json.decode(value)
    except msgspec.DecodeError:
        result = json.loads(bytes(value))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return result


def _check_utf8(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 (byte {error.start})") from None


def _split_leniently(data: bytes) -> dict[str, Raw]:
    """Split what the strict scanner refuses but Python's reader takes; values are re-encoded."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    # ASCII escapes keep lone surrogates, which no UTF-8 text can hold.
    return {
        key.encode("utf-8", "replace").decode(): Raw(json.dumps(item).encode())
        for key, item in value.items()
    }


def _refuse_constant(name: str) -> object:
    raise ValueError(f"the body is not JSON: {name} is no JSON value")
