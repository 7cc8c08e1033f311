import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.sim import grammar

CASES = [
    pytest.param({"type": "string", "maxLength": 4}, lambda v: len(v) <= 4, id="max-length"),
    pytest.param({"type": "string", "minLength": 40}, lambda v: len(v) == 40, id="min-length"),
    pytest.param({"enum": ["C", "F"]}, lambda v: v in ("C", "F"), id="enum"),
    pytest.param({"const": 7}, lambda v: v == 7, id="const"),
    pytest.param({"type": "integer", "minimum": 5}, lambda v: 5 <= v < 15, id="integer"),
    pytest.param({"type": "boolean"}, lambda v: isinstance(v, bool), id="boolean"),
    pytest.param({"type": ["null", "string"]}, lambda v: v is None, id="types"),
    pytest.param({"anyOf": [{"type": "boolean"}]}, lambda v: isinstance(v, bool), id="union"),
    pytest.param(
        {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        lambda v: len(v) == 3 and all(isinstance(item, int) for item in v),
        id="array",
    ),
    pytest.param(
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}},
        lambda v: isinstance(v, bool),
        id="reference",
    ),
]


@pytest.mark.parametrize(("schema", "fits"), CASES)
@given(seed=st.integers(0, 2**64))
def test_documents_fit_their_schema(schema, fits, seed):
    assert fits(orjson.loads(grammar.document(schema, seed)))


def test_a_schema_that_refers_to_itself_ends():
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}

    assert orjson.loads(grammar.document(schema, 1))


def test_the_same_seed_gives_the_same_document():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}

    assert grammar.document(schema, 1) == grammar.document(schema, 1)
    assert len({grammar.document(schema, seed) for seed in range(50)}) > 10


def test_a_named_tool_is_called():
    tools = [{"function": {"name": name}} for name in ("a", "b", "c")]

    assert all('"name": "b"' in grammar.call(tools, seed, "b") for seed in range(10))
    assert len({grammar.call(tools, seed, None)[:13] for seed in range(30)}) == 3
