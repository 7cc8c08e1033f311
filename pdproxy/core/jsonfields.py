"""A JSON object as its top-level fields, each still raw bytes: what is not read is not touched.

Rule: a value that nobody edits leaves byte for byte as it came (big integers, float spelling,
lone surrogates, nesting), and costs a scan, not a parse.
"""

from __future__ import annotations

# orjson has no hook for what strict JSON refuses; see _split_leniently.
import json  # noqa: TID251
import math
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec

Raw = msgspec.Raw
JsonFields = Mapping[str, Raw]

_MAX_INT_DIGITS = 4000  # Python converts 4300 at most, to bound the time it takes
_BOM = b"\xef\xbb\xbf"
_SPLITTER = msgspec.json.Decoder(dict[str, Raw])
_VALUES = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


def split_object(data: bytes) -> dict[str, Raw]:
    """Return the top-level fields of a JSON object, values unparsed.

    Example: `b'{"a": [1, 2], "b": "x"}'` gives `{"a": Raw(b'[1, 2]'), "b": Raw(b'"x"')}`.
    A byte order mark, lone surrogate escapes and duplicate keys (the last wins) are accepted, as
    Python's own reader does, which engines use. Lone surrogates in a key, at any depth, are the one
    case in which values are spelled anew; at the top they become question marks.

    Raises:
        ValueError: `data` is not UTF-8, not JSON, or not an object. The text quotes nothing of it.
    """
    if not data.isascii():
        _check_utf8(data)
        data = data.removeprefix(_BOM)
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
    """Return compact JSON of a plain value; lone surrogates leave as they came, as escapes."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def raw(value: object) -> Raw:
    """Return a plain value as a field of a JSON object."""
    return Raw(encode(value))


def decode(value: Raw | bytes) -> object:
    """Return the plain value of a raw field, or of any JSON text.

    NaN and the infinities are accepted: engines written in Python may send them.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return _VALUES.decode(value)
    except msgspec.DecodeError:
        return _decode_leniently(bytes(value), str_to_float=float, str_to_constant=float)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _check_utf8(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 (byte {error.start})") from None


def _split_leniently(data: bytes) -> dict[str, Raw]:
    """Split what the strict scanner refuses but Python's reader takes; values are re-encoded."""
    value = _decode_leniently(data, str_to_float=_finite_float, str_to_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    # ASCII escapes keep lone surrogates, which no UTF-8 text can hold.
    return {
        key.encode("utf-8", "replace").decode(): Raw(json.dumps(item).encode())
        for key, item in value.items()
    }


def _decode_leniently(
    data: bytes, *, str_to_float: Callable[[str], float], str_to_constant: Callable[[str], float]
) -> object:
    try:
        value: object = json.loads(
            data.decode(),  # from bytes the reader would guess UTF-16 and UTF-32
            parse_float=str_to_float,
            parse_int=_bounded_int,
            parse_constant=str_to_constant,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return value


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:
        _refuse("a number this long")
    return int(text)


def _finite_float(text: str) -> float:
    """Return the number, unless JSON could not spell it again."""
    value = float(text)
    if math.isinf(value):
        _refuse("a number this large")
    return value


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"the body is not JSON: {what} is not accepted")
