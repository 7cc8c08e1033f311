"""The routes: which path is answered by what, and how strangers are turned away."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from pdproxy.server.app import PASSED_PATHS, build_app
from tests.fakes import behaviours
from tests.fakes.client import ask
from tests.server.stage import listening, server

OWN = {
    "/health": {"GET", "HEAD"},
    "/ping": {"GET", "HEAD", "POST"},
    "/ready": {"GET", "HEAD"},
    "/version": {"GET", "HEAD"},
    "/healthcheck": {"GET", "HEAD"},
    "/metrics": {"GET", "HEAD"},
    "/v1/models": {"GET", "HEAD"},
    "/v1/chat/completions": {"POST"},
    "/v1/completions": {"POST"},
    "/instances/add": {"POST"},
    "/instances/remove": {"POST"},
    "/reset_prefix_cache": {"POST"},
}


@asynccontextmanager
async def application(**options):
    async with server(**options) as made, listening(build_app(made.context)) as port:
        made.port = port
        yield made


@pytest.mark.case("C78")
@pytest.mark.parametrize("path", sorted(OWN))
async def test_own_paths_take_their_methods_and_name_them(path):
    async with application() as made:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            reply = await ask(made.port, method, path, b"" if method != "HEAD" else None)
            if method in OWN[path]:
                assert reply.status != 405
                continue
            assert reply.status == 405
            assert set(reply.headers["allow"].split(", ")) == OWN[path]
            assert method == "HEAD" or reply.error["code"] == "method_not_allowed"


@pytest.mark.case("C78")
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/start_profile",
        "/sleep",
        "/v2/x",
        "/v1",
        "/v1x/y",
        "/metrics/",
        "/v1/completions/",
        "/v1/models/",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/..%2fsleep",
        "/v1/..%5csleep",
        "/v1/%252e%252e/sleep",
        "/v1/x/..",
        "/%ff",
    ],
)
async def test_unknown_paths_are_404_and_reach_no_engine(path):
    async with application() as made:
        for method in ("GET", "POST"):
            reply = await ask(made.port, method, path, b"{}")

            assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert not [call for e in (*made.play.p, *made.play.d) for call in e.requests]


@pytest.mark.parametrize("path", [*PASSED_PATHS, "/v1/embeddings", "/v1/a..b", "/v1/.x/y"])
async def test_paths_of_engines_pass(path):
    async with application() as made:
        made.play.d[0].routes[path] = behaviours.json_answer({"from": "engine"})
        reply = await ask(made.port, "POST", path, b"{}", [("Content-Type", "application/json")])

        assert reply.json == {"from": "engine"}
        assert made.requests.started == ["passthrough"]


async def test_no_answer_tells_the_librarys_version():
    async with application() as made:
        for path in ("/health", "/v1/completions", "/nowhere", "/instances/add", "/metrics"):
            reply = await ask(made.port, "GET", path)

            assert reply.headers.get("server") == "pdproxy", path


async def test_admin_calls_and_operations_are_not_counted_as_requests():
    async with application() as made:
        for path in ("/health", "/ready", "/metrics", "/healthcheck"):
            await ask(made.port, "GET", path)

        assert made.requests.started == []
