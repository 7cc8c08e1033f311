"""The OpenAPI document: complete, and served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pdproxy.server.app import build_app
from pdproxy.server.context import Context
from pdproxy.server.openapi import PATHS, document
from tests.fakes.client import get
from tests.server.stage import listening, server


def test_every_route_is_in_it_and_nothing_else():
    context = cast("Context", SimpleNamespace(rules=SimpleNamespace(max_body_bytes=1)))
    routes = {
        (route.method, route.resource.canonical)
        for route in build_app(context).router.routes()
        if route.resource is not None and route.method not in {"HEAD", "*"}
    }

    assert set(PATHS) == routes


async def test_it_is_served_as_it_is():
    async with server() as made, listening(build_app(made.context)) as port:
        reply = await get(port, "/openapi.json")

    assert reply.json == document()
