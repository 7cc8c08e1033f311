"""Values are checked against the schemas that clients send, and no schema takes for ever."""

import time

import pytest

from pdproxy.core.json_schema import fault, is_checkable

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CITY = {
    "type": "object",
    "title": "City",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        pytest.param(
            {"type": "integer"}, [0, -3, 2.0], [1.5, True, "1", None, 1e400], id="integer"
        ),
        pytest.param({"type": "number"}, [0, 1.5], [False, "1"], id="number"),
        pytest.param({"type": "boolean"}, [True], [1, None], id="boolean"),
        pytest.param({"type": ["string", "null"]}, ["", None], [0, {}], id="types"),
        pytest.param({"enum": ["a", 1, None]}, ["a", 1, None], ["b", True, 0], id="enum"),
        pytest.param({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [True]}, {}], id="const"),
        pytest.param({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9, "x"], [0, 3], id="bounds"),
        pytest.param({"exclusiveMinimum": 1, "maximum": 3}, [1.1, 3], [1, 4], id="bounds too"),
        pytest.param({"minLength": 1, "maxLength": 2}, ["a", "äö", 7], ["", "abc"], id="length"),
        pytest.param({"minItems": 1, "maxItems": 2}, [[1], "abc"], [[], [1, 2, 3]], id="items"),
        pytest.param({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}], id="members"),
        pytest.param({"items": {"type": "string"}}, [[], ["a"], 1], [["a", 1]], id="array"),
        pytest.param(
            {"prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 1]], id="tuple"
        ),
        pytest.param(
            CITY, [{"name": "Oslo"}, {"n": 1, "name": ""}], [{}, {"name": "", "x": 1}], id="object"
        ),
        pytest.param(
            {"additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "1"}], id="map"
        ),
        pytest.param({"anyOf": [{"const": 1}, {"type": "null"}]}, [1, None], [2], id="anyOf"),
        pytest.param({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, [0, 4], [2], id="oneOf"),
        pytest.param({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4], id="allOf"),
        pytest.param(TREE, [{}, {"kids": [{"kids": []}]}], [{"kids": [1]}, {"x": 1}], id="$ref"),
        pytest.param(True, [1, None], [], id="anything"),
        pytest.param({}, [1, None], [], id="empty"),
    ],
)
def test_values_fit_or_do_not(schema, good, bad):
    assert is_checkable(schema)
    assert [fault(schema, value) for value in good] == [None] * len(good)
    assert all(fault(schema, value) for value in bad)


def test_fault_names_the_place():
    schema = {"properties": {"cities": {"items": CITY}}}

    assert fault(schema, {"cities": [{"name": "Oslo"}, {"n": 1}]}) == "$.cities[1] lacks name"
    assert fault(CITY, {"name": 7}) == "$.name is no string"


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"pattern": "(a+)+$"}, id="a pattern"),
        pytest.param({"patternProperties": {"a": {}}}, id="patterns of names"),
        pytest.param({"properties": {"a": {"not": {}}}}, id="a keyword that is not known"),
        pytest.param({"$ref": "https://example.com/schema"}, id="another document"),
        pytest.param({"$ref": "#/$defs/none"}, id="nowhere"),
        pytest.param({"$ref": "#anchor"}, id="an anchor"),
        pytest.param({"$ref": 1}, id="no reference"),
        pytest.param({"items": [{}, {}]}, id="an older tuple"),
        pytest.param({"properties": []}, id="no properties"),
        pytest.param({"anyOf": {}}, id="no branches"),
        pytest.param("a", id="no schema"),
        pytest.param(None, id="null"),
    ],
)
def test_what_cannot_be_checked_is_known(schema):
    assert not is_checkable(schema)


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"$ref": "#"}, id="a circle"),
        pytest.param(
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"},
            id="a tree",
        ),
        pytest.param(nested(16), id="many branches"),
    ],
)
def test_no_schema_takes_for_ever(schema):
    begin = time.process_time()

    assert is_checkable(schema)
    assert fault(schema, 1)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("keyword", ["enum", "required"])
def test_no_list_of_a_schema_takes_for_ever(keyword):
    names = [f"n{number}" for number in range(20_000)]
    schema = {"items": {keyword: names}}
    value = ["n19999"] * 2000 if keyword == "enum" else [dict.fromkeys(names)] * 2000
    begin = time.process_time()

    assert fault(schema, value)
    assert time.process_time() - begin < 5


def test_schema_that_goes_too_deep_cannot_be_checked():
    schema: dict[str, object] = {}
    for _ in range(200):
        schema = {"items": schema}

    assert not is_checkable(schema)
