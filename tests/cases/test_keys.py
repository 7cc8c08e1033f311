"""Which path needs which key: the documented table against the real routes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pdproxy.server.app import PASSED_PATHS, build_app
from pdproxy.server.context import Context
from tests.cases.scene import Scene, scene
from tests.documents import code, read, rows, section
from tests.fakes import client

KEYS = ("--api-key", "API-KEY", "--admin-token", "ADMIN-TOKEN")
PASSED = [f"POST {path}" for path in PASSED_PATHS] + ["GET /v1/anything", "PUT /v1/anything"]
REFUSED = {401, 403}
# Which of no key, an API key and the admin token opens a path.
OPENERS = {"API": {"API-KEY"}, "ADMIN": {"ADMIN-TOKEN"}, "OPEN": {"", "API-KEY", "ADMIN-TOKEN"}}


def table() -> dict[str, list[str]]:
    """Return the documented calls of clients, of administrators and of everybody."""
    kinds = [
        code(cells[0]) for cells in rows(section(read("docs/operations.md"), "Who may call what"))
    ]
    return dict(zip(("API", "ADMIN", "OPEN"), kinds, strict=True))


async def status(stage: Scene, call: str, key: str = "") -> int:
    method, path = call.split()
    headers = [("Authorization", f"Bearer {key}")] if key else []
    body = b"{}" if method in {"POST", "PUT"} else None
    return (await client.ask(stage.port, method, path, body, headers)).status


def test_the_table_has_every_route() -> None:
    context = cast("Context", SimpleNamespace(rules=SimpleNamespace(max_body_bytes=1)))
    routes = [
        f"{route.method} {route.resource.canonical}"
        for route in build_app(context).router.routes()
        if route.resource is not None and route.method not in {"HEAD", "*"}
    ]

    assert sorted(call for calls in table().values() for call in calls) == sorted(routes)


@pytest.mark.case("C88")
@pytest.mark.parametrize("kind", OPENERS)
async def test_each_path_opens_to_its_own_key_only(kind: str) -> None:
    calls = table()[kind] + (PASSED if kind == "API" else [])

    async with scene((None,), (None,), *KEYS) as stage:
        for call in calls:
            for key in ("", "API-KEY", "ADMIN-TOKEN"):
                is_open = await status(stage, call, key) not in REFUSED

                assert is_open is (key in OPENERS[kind]), (call, key)
            if kind != "OPEN":
                assert await status(stage, call, "API-KEYS") == 401, call


@pytest.mark.case("C88")
async def test_without_keys_this_machine_may_call_all() -> None:
    async with scene() as stage:
        for call in [call for calls in table().values() for call in calls] + PASSED:
            assert await status(stage, call) not in REFUSED, call


@pytest.mark.case("C88")
async def test_a_refused_call_reaches_no_engine() -> None:
    async with scene((None,), (None,), *KEYS) as stage:
        for call in table()["API"] + table()["ADMIN"] + PASSED:
            await status(stage, call)

        calls = [call.path for engine in (stage.p1, stage.d1) for call in engine.calls]

    assert calls == []
