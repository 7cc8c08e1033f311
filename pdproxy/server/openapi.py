"""The OpenAPI 3.1 document of the proxy's own paths, for clients and tools that read one.

Rule: it says what the proxy itself takes and answers. What engines define, such as most fields of
a request, is left open; paths that only pass to an engine are the engine's to describe.
"""

from __future__ import annotations

from aiohttp import web

from pdproxy import __version__
from pdproxy.core.api import Api
from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import encode
from pdproxy.server.context import Context
from pdproxy.server.downstream import SERVER
from pdproxy.server.operations import JSON_TYPE

Schema = dict[str, object]

EVENT_STREAM = "text/event-stream"
HTML = "text/html"
TEXT = "text/plain"

GENERATE, OPERATE, ADMINISTER = "generate", "operate", "administer"

_OBJECT: Schema = {"type": "object"}
_NUMBER: Schema = {"type": "integer", "minimum": 0}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": ["string", "null"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_COMMON: Schema = {
    "model": {"type": "string"},
    "stream": {"type": ["boolean", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1},
    "max_tokens": {"type": ["integer", "null"], "minimum": 0},
    "temperature": {"type": ["number", "null"], "minimum": 0},
}
_CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {**_COMMON, "messages": {"type": "array", "items": _OBJECT}},
}
_COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {**_COMMON, "prompt": {"type": ["string", "array"]}},
}
_ADDRESS: Schema = {"type": "string", "examples": ["10.0.0.5:8100", "[::1]:8100"]}
_INSTANCES: Schema = {
    "type": "object",
    "required": ["type", "instances"],
    "properties": {
        "type": {"enum": [role.value for role in Role]},
        "instances": {"anyOf": [_ADDRESS, {"type": "array", "items": _ADDRESS, "minItems": 1}]},
    },
}
_DRAIN: Schema = {
    **_INSTANCES,
    "properties": {
        **dict(_INSTANCES["properties"]),  # type: ignore[call-overload] # a dict of our own above
        "deadline_s": {"type": ["number", "null"], "minimum": 0},
    },
}
_STATUS: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}
_HEALTHCHECK: Schema = {
    "type": "object",
    "required": ["status", "prefill_instances", "decode_instances", "request_num"],
    "properties": {
        "status": {"const": "ok"},
        "prefill_instances": _NUMBER,
        "decode_instances": _NUMBER,
        "request_num": _NUMBER,
    },
}

# What a path does, whom it is for, its body if it takes one, and what it answers with by type.
Row = tuple[str, str, Schema | None, dict[str, Schema]]
_JSON: dict[str, Schema] = {JSON_TYPE: _OBJECT}
_ANSWER: dict[str, Schema] = {JSON_TYPE: _OBJECT, EVENT_STREAM: {"type": "string"}}

PATHS: dict[tuple[str, str], Row] = {
    ("POST", Api.CHAT.value): ("Complete a chat", GENERATE, _CHAT, _ANSWER),
    ("POST", Api.COMPLETIONS.value): ("Complete a text", GENERATE, _COMPLETION, _ANSWER),
    ("GET", "/v1/models"): ("List the models of an engine", GENERATE, None, _JSON),
    ("GET", "/health"): ("Tell that the proxy lives", OPERATE, None, {JSON_TYPE: _STATUS}),
    ("GET", "/ping"): ("Tell that the proxy lives", OPERATE, None, {JSON_TYPE: _STATUS}),
    ("POST", "/ping"): ("Tell that the proxy lives", OPERATE, None, {JSON_TYPE: _STATUS}),
    ("GET", "/ready"): ("Tell whether requests can be served", OPERATE, None, {JSON_TYPE: _STATUS}),
    ("GET", "/healthcheck"): ("Count instances", OPERATE, None, {JSON_TYPE: _HEALTHCHECK}),
    ("GET", "/version"): ("Tell the proxy's version", OPERATE, None, _JSON),
    ("GET", "/metrics"): ("Metrics for Prometheus", OPERATE, None, {TEXT: {"type": "string"}}),
    ("GET", "/openapi.json"): ("This document", OPERATE, None, _JSON),
    ("GET", "/dashboard"): ("The live page", OPERATE, None, {HTML: {"type": "string"}}),
    ("GET", "/dashboard/data"): ("What the live page shows", ADMINISTER, None, _JSON),
    ("GET", "/debug/requests"): ("The requests in flight", ADMINISTER, None, _JSON),
    ("GET", "/instances"): ("What each instance is doing", ADMINISTER, None, _JSON),
    ("POST", "/instances/add"): ("Let engines join", ADMINISTER, _INSTANCES, _JSON),
    ("POST", "/instances/remove"): ("Take engines out", ADMINISTER, _INSTANCES, _JSON),
    ("POST", "/instances/drain"): ("Let engines finish", ADMINISTER, _DRAIN, _JSON),
    ("POST", "/instances/undrain"): ("Take a drain back", ADMINISTER, _INSTANCES, _JSON),
    ("POST", "/reset_prefix_cache"): ("Empty the prefix caches", ADMINISTER, None, {}),
}
# Statuses beside 200 that the proxy itself gives, by whom a path is for.
_REFUSALS: dict[str, tuple[int, ...]] = {
    GENERATE: (400, 401, 404, 408, 413, 429, 500, 502, 503, 504, 508),
    OPERATE: (),
    ADMINISTER: (400, 401, 403, 408, 413, 500, 503),
}


def document() -> Schema:
    """Return the document as a plain value."""
    paths: dict[str, dict[str, object]] = {}
    for (method, path), row in PATHS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, row)
        if method == "GET":
            paths[path]["head"] = {**_operation(path, row), "summary": "The same without a body"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pdproxy",
            "version": __version__,
            "description": "An OpenAI-compatible proxy for engines with disaggregated prefill and "
            "decode. Other /v1 paths are passed to an engine.",
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Keys are wanted only where the operator has set them.
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(path: str, row: Row) -> Schema:
    summary, group, body, answers = row
    error = {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/Error"}}}
    good = {name: {"schema": schema} for name, schema in answers.items()}
    responses: dict[str, object] = {"200": {"description": "done", "content": good}}
    for status in _REFUSALS[group]:
        responses[str(status)] = {"description": "refused or failed", "content": error}
    if path == "/ready":
        responses["503"] = {"description": "not ready", "content": good}
    if path == "/reset_prefix_cache":
        responses["500"] = {
            "description": "some instances failed",
            "content": {JSON_TYPE: {"schema": _OBJECT}},
        }
    operation: Schema = {"summary": summary, "tags": [group], "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": body}}}
    return operation


_DOCUMENT = encode(document())


async def openapi(_context: Context, _request: web.Request) -> web.Response:
    """Answer GET /openapi.json."""
    return web.Response(body=_DOCUMENT, headers={"Content-Type": JSON_TYPE, "Server": SERVER})
