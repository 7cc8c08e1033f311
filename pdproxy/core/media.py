"""How much prompt the parts of chat messages are: text by its bytes, images by their pixels.

Rule: the base64 bytes of an image say nothing about its tokens, so they are never counted.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

from pdproxy.core.jsonfields import decode

# One visual token covers 32 x 32 pixels in current vision encoders (patch 16 merged 2 x 2).
PIXELS_PER_TOKEN_SIDE = 32
# For media whose size cannot be read: about what a 1024 x 1024 picture makes.
DEFAULT_MEDIA_TOKENS = 1024
MAX_MEDIA_TOKENS = 16384

_MEDIA_TYPES = frozenset(
    {"image_url", "input_image", "image_embeds", "input_audio", "audio_url", "video_url", "file"}
)
_MEDIA_MARKS = tuple(f'"{name}"'.encode() for name in sorted(_MEDIA_TYPES))
# The frame header of a JPEG may stand behind an embedded thumbnail.
_HEAD_BYTES = 64 * 1024
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def measure_messages(raw: bytes) -> tuple[int, int]:
    """Return (text bytes, media tokens) of the raw `messages` of a chat request.

    Messages without media are not parsed: their JSON size stands for their text, and the
    estimator learns the ratio.
    """
    if not any(mark in raw for mark in _MEDIA_MARKS):
        return len(raw), 0
    try:
        messages = decode(raw)
    except ValueError:
        return len(raw), 0
    text_bytes = media_tokens = 0
    for part in _parts(messages):
        if isinstance(part, dict) and _is_media(part.get("type")):
            media_tokens += _media_tokens(part)
        else:
            text_bytes += _text_bytes(part)
    return text_bytes, media_tokens


def image_size(head: bytes) -> tuple[int, int] | None:
    """Return (width, height) in pixels from the first bytes of a PNG, GIF or JPEG file."""
    if head.startswith(_PNG_MAGIC) and len(head) >= 24:  # noqa: PLR2004 - IHDR ends there
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:  # noqa: PLR2004 - screen size
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head.startswith(b"\xff\xd8"):
        return _jpeg_size(head)
    return None


def _parts(messages: object) -> Iterator[object]:
    if not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from content
        else:
            yield message


def _is_media(kind: object) -> bool:
    return isinstance(kind, str) and kind in _MEDIA_TYPES


def _text_bytes(part: object) -> int:
    """Add up all strings in a value; without recursion, since a client decides how deep it is."""
    total = 0
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            total += len(value.encode("utf-8", "replace"))
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return total


def _media_tokens(part: dict[object, object]) -> int:
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    size = _data_url_size(url) if isinstance(url, str) else None
    if size is None:
        return DEFAULT_MEDIA_TOKENS
    side = PIXELS_PER_TOKEN_SIDE
    width, height = size
    return min(MAX_MEDIA_TOKENS, max(1, -(-width // side) * -(-height // side)))


def _data_url_size(url: str) -> tuple[int, int] | None:
    if not url.startswith("data:"):
        return None
    start = url.find(",") + 1
    head = url[start : start + _HEAD_BYTES // 3 * 4]
    try:
        return image_size(base64.b64decode(head[: len(head) // 4 * 4]))
    except (binascii.Error, ValueError):
        return None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Walk the segments to the frame header (ITU T.81, B.2.2)."""
    position = 2
    while position + 9 <= len(head) and head[position] == 0xFF:  # noqa: PLR2004 - marker prefix
        marker = head[position + 1]
        is_frame = 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)  # noqa: PLR2004
        if is_frame:
            height = int.from_bytes(head[position + 5 : position + 7])
            width = int.from_bytes(head[position + 7 : position + 9])
            return width, height
        position += 2 + int.from_bytes(head[position + 2 : position + 4])
    return None
