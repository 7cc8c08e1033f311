"""What a request asks for that decides how its answer can go on."""

import pytest

from pdproxy.core.traits import has_media, may_call_tools
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
