import pytest

from pdproxy.core.jsonfields import Raw
from pdproxy.core.plain import as_list, as_object, as_objects, as_text, as_whole, plain


@pytest.mark.parametrize(
    ("read", "value", "empty"),
    [
        pytest.param(as_object, {"a": 1}, {}, id="object"),
        pytest.param(as_list, [1], [], id="list"),
        pytest.param(as_text, "x", "", id="text"),
        pytest.param(as_whole, 0, None, id="whole number"),
    ],
)
def test_what_has_another_type_reads_as_empty(read, value, empty):
    assert read(value) == value
    for other in (None, 1.5, True, b"x"):
        assert read(other) == empty


def test_only_the_objects_of_a_list_are_taken():
    assert as_objects([{"a": 1}, None, 3]) == [{"a": 1}]
    assert as_objects("x") == []


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        pytest.param(None, None, id="absent"),
        pytest.param(Raw(b"[1]"), [1], id="raw"),
        pytest.param(b"[DONE]", None, id="no JSON"),
    ],
)
def test_a_raw_value_is_decoded_if_it_is_json(value, wanted):
    assert plain(value) == wanted
