"""What a request asks for that decides how its answer can go on."""

import pytest

from pdproxy.core.traits import asked_schema, has_media, may_call_tools
from tests.core.making import chat

IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("content_", "wanted"),
    [
        pytest.param("an image_url", False, id="text"),
        pytest.param([{"type": "text", "text": '"type": "image_url"'}], False, id="text part"),
        pytest.param([{"text": "hi"}], False, id="part without a type"),
        pytest.param([IMAGE], True, id="image"),
        pytest.param([{"type": "video_url"}], True, id="video"),
        pytest.param([{"type": "a_new_kind"}], True, id="unknown kind"),
        pytest.param(None, False, id="null"),
    ],
)
def test_media_are_seen(content_, wanted):
    assert has_media(chat(messages=[{"role": "user", "content": content_}])) is wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"tools": []}, False),
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "auto"}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
    ],
)
def test_only_tools_that_may_be_chosen_are_called(fields, wanted):
    assert may_call_tools(chat(**fields)) is wanted


CITY = {"type": "object", "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": FORMAT}, CITY),
        ({"response_format": {"type": "structural_tag"}}, None),
        ({"response_format": {"type": "json_schema"}}, None),
        ({"structured_outputs": {"json": CITY}}, CITY),
        ({"structured_outputs": {"json": '{"type": "array"}', "regex": None}}, {"type": "array"}),
        ({"structured_outputs": {"json": "{"}}, None),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"structured_outputs": {"choice": ["a"]}}, None),
        ({"structured_outputs": {"json": CITY, "regex": "a"}}, None),
        ({"guided_json": CITY}, CITY),
        ({"guided_json": CITY, "guided_regex": "a"}, None),
        ({"guided_json": CITY, "response_format": FORMAT}, None),
        ({"response_format": FORMAT, "tools": TOOLS, "tool_choice": "required"}, None),
    ],
)
def test_schema_of_json_is_found(fields, wanted):
    assert asked_schema(chat(**fields)) == wanted
