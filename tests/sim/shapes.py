"""Comparing answers field by field: recorded exchanges and the shape of JSON values.

A shape keeps keys, their order, and the type of each value; fixed words such as `object` or
`finish_reason` also by value. Lists count as the kinds of their elements.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

_CAPTURES = Path(__file__).parent / "captures"
_FIXED = {
    "object", "role", "finish_reason", "stop_reason", "type", "owned_by", "transfer_mode",
    "tp_size", "dcp_size", "pp_size", "code", "param", "organization", "service_tier",
    "do_remote_prefill", "do_remote_decode", "tool_choice", "truncation", "status", "output_mode",
}  # fmt: skip
# Maps whose keys are tokens.
_MAPS = {"top_logprobs", "prompt_logprobs"}


@dataclass(frozen=True, slots=True)
class Capture:
    """One recorded exchange with a real engine."""

    method: str
    path: str
    sent_headers: dict[str, str]
    sent: Any
    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


def load(name: str) -> Capture:
    stored = orjson.loads((_CAPTURES / f"{name}.json").read_bytes())
    request = stored["request"]
    return Capture(
        method=request["method"],
        path=request["path"],
        sent_headers=request["headers"],
        sent=request["body"],
        status=stored["status"],
        headers=stored["headers"],
        body=stored["body"],
    )


def shape(value: Any, key: str = "") -> Any:
    """The shape of a JSON value that stands under a key."""
    if isinstance(value, dict):
        if key in _MAPS and "token" not in value:
            return ("map", *_kinds(value.values(), ""))
        return tuple((name, shape(item, name)) for name, item in value.items())
    if isinstance(value, list):
        # The bytes of half a character are an empty list.
        return ["list", *(_kinds(value, key) if key != "bytes" else ())]
    return value if key in _FIXED else type(value).__name__


def _kinds(values: Any, key: str) -> list[Any]:
    kinds: list[Any] = []
    for value in values:
        kind = shape(value, key)
        if kind not in kinds:
            kinds.append(kind)
    return kinds


def stream_shapes(raw: bytes | str) -> list[Any]:
    """The kinds of events in the order they first occur.

    Events that show nothing (half a character) are left out: they depend on the text.
    """
    text = raw.decode() if isinstance(raw, bytes) else raw
    kinds: list[Any] = []
    for block in filter(None, text.split("\n\n")):
        name, _, data = block.partition("data: ")
        event = data if data == "[DONE]" else orjson.loads(data)
        if _shows_something(event):
            kind = (name, shape(event))
            if kind not in kinds:
                kinds.append(kind)
    return kinds


def _shows_something(event: Any) -> bool:
    """False for half a character; one at the very end counts as empty content."""
    if not isinstance(event, dict) or not event.get("choices"):
        return True
    choice = cast(dict[str, Any], event["choices"][0])
    if choice.get("delta") == {} and choice["finish_reason"] is not None:
        choice["delta"] = {"content": ""}
    return choice.get("delta") != {}
