import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.jsonfields import Raw, decode, encode, join_object, raw, split_object

BOM = b"\xef\xbb\xbf"

# Values that a reader of numbers and text would spell anew.
ODD_VALUES = [
    b"1e-9",
    b"-1.50e+09",
    b"1e400",
    b"-0",
    b"9223372036854775807",
    b"123456789012345678901234567890",
    b"1" * 5000,
    b'"\\u00e9\\/"',
    b'"\\ud83d"',
    b'{"a":1,"a":2}',
    '[ "é🙂"\t, null ]'.encode(),
]


def plain(fields):
    return {name: bytes(value) for name, value in fields.items()}


@pytest.mark.case("C13")
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: value[:20].decode())
@pytest.mark.parametrize("start", [b"", BOM], ids=["plain", "byte-order-mark"])
def test_values_are_byte_for_byte(value, start):
    fields = split_object(start + b' { "x" : ' + value + b' , "y":1} ')

    assert plain(fields) == {"x": value, "y": b"1"}
    assert join_object(fields) == b'{"x":' + value + b',"y":1}'


def test_order_is_kept_and_the_last_duplicate_wins():
    fields = split_object(b'{"b":1,"a":2,"b":3}')

    assert list(plain(fields).items()) == [("b", b"3"), ("a", b"2")]


def test_escaped_keys_are_read():
    assert plain(split_object(b'{"to\\u006bens":1}')) == {"tokens": b"1"}


def test_a_key_that_is_no_text_gets_a_question_mark():
    fields = split_object(b'{"\\ud83d":{"a":"\\ud83d"},"n":123456789012345678901234567890}')

    assert plain(fields) == {"?": b'{"a": "\\ud83d"}', "n": b"123456789012345678901234567890"}


def test_an_inner_key_that_is_no_text_keeps_the_values_equal():
    data = b'{"x":{"\\udc00":[1.5,2]},"n":123456789012345678901234567890}'

    assert json.loads(join_object(split_object(data))) == json.loads(data)


@pytest.mark.case("C04")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{", "not JSON", id="cut"),
        pytest.param(b'{"a":1}x', "not JSON", id="trailing-text"),
        pytest.param(b'{"a":1,}', "not JSON", id="trailing-comma"),
        pytest.param(b'{"a":01}', "not JSON", id="leading-zero"),
        pytest.param(b'{"a":NaN}', "NaN", id="nan"),
        pytest.param(b'{"a":[-Infinity]}', "-Infinity", id="infinity"),
        pytest.param(b'{"a":"x\ny"}', "not JSON", id="control-character"),
        pytest.param(b'{"a":"\xff"}', r"not UTF-8 \(byte 6\)", id="not-utf-8"),
        pytest.param('{"a":1}'.encode("utf-16"), "not UTF-8", id="utf-16"),
        pytest.param('{"a":1}'.encode("utf-16-le"), "not JSON", id="utf-16-without-mark"),
        pytest.param(BOM + BOM + b"{}", "not JSON", id="two-byte-order-marks"),
        pytest.param(b"[]", "must be a JSON object", id="list"),
        pytest.param(b'"hi"', "must be a JSON object", id="text"),
        pytest.param(b"null", "must be a JSON object", id="null"),
        pytest.param(BOM + b"[]", "must be a JSON object", id="list-after-mark"),
        pytest.param(b'{"a":' + b"[" * 100_000 + b"}", "too deeply", id="deep"),
        pytest.param(b'{"\\ud83d":1e400}', "this large", id="unspeakable-number"),
        pytest.param(b'{"\\ud83d":' + b"1" * 5000 + b"}", "this long", id="long-number"),
    ],
)
def test_what_is_no_json_object_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        split_object(data)


def test_messages_quote_nothing_of_the_body():
    with pytest.raises(ValueError, match="not JSON") as caught:
        split_object(b'{"prompt":"my secret" "x"}')

    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("value", [0, -1, 2**63, 10**40, 1.5, None, True, "é\n", [], {"a": [1]}])
def test_plain_values_come_back(value):
    assert decode(raw(value)) == value
    assert decode(encode(value)) == value


def test_lone_surrogates_come_back():
    value = {"text": "a\ud83d", "more": "🙂"}

    assert decode(encode(value)) == value
    assert join_object({"x": raw(value)}).isascii()


def test_decode_takes_what_python_engines_write():
    numbers = decode(b"[NaN, -Infinity, 1e400]")

    assert isinstance(numbers, list)
    assert math.isnan(numbers[0])
    assert numbers[1:] == [-math.inf, math.inf]


@pytest.mark.parametrize("data", [b"", b"{", b'"\xff"', b"[" * 100_000, b"1" * 5000])
def test_decode_refuses_what_is_no_json(data):
    with pytest.raises(ValueError):  # noqa: PT011 - the class is the contract
        decode(data)


def test_a_field_can_be_replaced():
    fields = {**split_object(b'{"a": 1e0, "b": 2}'), "b": Raw(b"[ ]")}

    assert join_object(fields) == b'{"a":1e0,"b":[ ]}'


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), _json), st.booleans())
def test_any_object_survives_the_round_trip(value, ascii_only):
    value = json.loads(json.dumps(value).replace("Infinity", "1"))
    data = json.dumps(value, ensure_ascii=ascii_only).encode()

    fields = split_object(data)

    assert json.loads(join_object(fields)) == value
    assert {name: decode(field) for name, field in fields.items()} == value


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_nothing_but_value_error(data):
    for function in (split_object, decode):
        try:
            function(data)
        except ValueError:
            continue
