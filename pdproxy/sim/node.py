"""One engine as seen by its HTTP handlers: the scheduler, and what tests look at."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from aiohttp import web

from pdproxy.sim.config import SimConfig
from pdproxy.sim.faults import Faults
from pdproxy.sim.problems import malformed, unsupported_media
from pdproxy.sim.scheduler import Engine


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it arrived.

    Attributes:
        headers: Found by name in any case.
        body: None if it was empty or no JSON object.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, object] | None


@dataclass(slots=True)
class Node:
    """What the handlers share.

    Attributes:
        in_flight: Generation requests being answered: vLLM's /load.
    """

    config: SimConfig
    engine: Engine
    faults: Faults = field(default_factory=Faults)
    requests: deque[SeenRequest] = field(default_factory=deque)
    in_flight: int = 0


NODE = web.AppKey("node", Node)


async def read_body(request: web.Request) -> dict[str, object]:
    """The JSON object in a request.

    Raises:
        Problem: It is none, or is not declared as JSON.
    """
    media = request.content_type
    if request.headers.get("Content-Type") is not None and media != "application/json":
        raise unsupported_media()
    raw = await request.read()
    if not raw:
        raise malformed("missing", "body", "Field required", "None")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        shown, said = "<dict of 0 items>", "Expecting value"
        message = "JSON decode error"
        raise malformed("json_invalid", f"body.{error.pos}", message, shown, said) from error
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary"
        raise malformed("model_attributes_type", "body", message, str(body)[:100])
    return body


def json_response(
    body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A JSON answer with vLLM's content type, which has no charset."""
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
