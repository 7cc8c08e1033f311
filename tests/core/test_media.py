import base64
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.media import (
    DEFAULT_MEDIA_TOKENS,
    MAX_MEDIA_TOKENS,
    image_size,
    measure_messages,
)
from tests.properties import UNHURRIED


def png(width, height):
    return b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + struct.pack(">II", width, height)


def gif(width, height):
    return b"GIF89a" + struct.pack("<HH", width, height)


def jpeg(width, height, *, thumbnail_bytes=0):
    exif = (
        b"\xff\xe1" + struct.pack(">H", 2 + thumbnail_bytes) + b"\xff\xc0" * (thumbnail_bytes // 2)
    )
    frame = b"\xff\xc2" + struct.pack(">HBHH", 17, 8, height, width) + b"\x03" * 10
    return b"\xff\xd8" + exif + frame


def image(data, kind="png"):
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def measure(*parts):
    return measure_messages(json.dumps([{"role": "user", "content": list(parts)}]).encode())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(640, 480), id="png"),
        pytest.param(gif(640, 480), id="gif"),
        pytest.param(jpeg(640, 480), id="jpeg"),
        pytest.param(jpeg(640, 480, thumbnail_bytes=4096), id="jpeg-behind-a-thumbnail"),
    ],
)
def test_size_is_read_from_the_head(data):
    assert image_size(data) == (640, 480)


@UNHURRIED
@given(st.binary(max_size=64), st.sampled_from([b"", png(1, 1)[:16], b"GIF89a", b"\xff\xd8\xff"]))
def test_any_bytes_have_a_size_or_none(data, head):
    size = image_size(head + data)

    assert size is None or len(size) == 2


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        pytest.param(image(png(64, 64)), 4, id="png"),
        pytest.param(image(png(65, 64)), 6, id="rounded-up"),
        pytest.param(image(jpeg(64, 32, thumbnail_bytes=2048), "jpeg"), 2, id="jpeg"),
        pytest.param(image(png(0, 0)), 1, id="no-pixels"),
        pytest.param(image(png(2**31, 2**31)), MAX_MEDIA_TOKENS, id="absurd"),
        pytest.param(image(b"what"), DEFAULT_MEDIA_TOKENS, id="unknown-format"),
        pytest.param(
            {"type": "image_url", "image_url": "https://x/y.png"}, DEFAULT_MEDIA_TOKENS, id="url"
        ),
        pytest.param(
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,\u00e9%%"}},
            DEFAULT_MEDIA_TOKENS,
            id="no-base64",
        ),
        pytest.param({"type": "image_url"}, DEFAULT_MEDIA_TOKENS, id="nothing"),
        pytest.param(
            {"type": "input_audio", "input_audio": {"data": "AAAA"}},
            DEFAULT_MEDIA_TOKENS,
            id="audio",
        ),
    ],
)
def test_media_count_by_their_size_and_never_by_their_bytes(part, tokens):
    assert measure(part, {"type": "text", "text": "abc"}) == (len("text") + len("abc"), tokens)


def test_media_of_all_messages_are_added():
    messages = [{"content": [image(png(32, 32)), image(png(64, 32))]}, {"content": "abcd"}]

    assert measure_messages(json.dumps(messages).encode()) == (4, 3)


def test_messages_without_media_count_by_their_json():
    raw = b'[ {"role": "user", "content": "hi"} ]'

    assert measure_messages(raw) == (len(raw), 0)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"image_url": 1}', id="object"),
        pytest.param(b'["image_url", null, 3]', id="no-messages"),
        pytest.param(b'[{"content": [{"type": [], "x": "image_url"}]}]', id="list-as-type"),
        pytest.param(b'[{"content": [{"type": {}, "x": "image_url"}]}]', id="object-as-type"),
        pytest.param(b'[{"content": {"type": "image_url"}}]', id="content-object"),
        pytest.param(b'["image_url"', id="no-json"),
    ],
)
def test_odd_messages_are_measured_somehow(raw):
    text_bytes, media_tokens = measure_messages(raw)

    assert text_bytes >= 0
    assert media_tokens == 0
