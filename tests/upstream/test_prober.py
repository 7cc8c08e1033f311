"""Whether an engine serves, asked by GET /health or, without one, by /v1/models."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.core.instance import Endpoint
from pdproxy.upstream.prober import Prober
from tests.fakes import behaviours
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import black_hole, refusing_port


async def is_serving(address: str, timeout_s: float = 5.0) -> bool:
    async with Prober(timeout_s, None) as prober:
        return await prober.is_serving(Endpoint.parse(address))


def status(code: int) -> behaviours.Behaviour:
    return behaviours.json_answer({}, code)


@pytest.mark.case("C54")
@pytest.mark.parametrize(
    ("health", "models", "serves"),
    [
        pytest.param(200, 500, True, id="healthy"),
        pytest.param(503, 200, False, id="not-yet"),
        pytest.param(500, 200, False, id="broken"),
        pytest.param(404, 200, True, id="models-instead"),
        pytest.param(404, 401, True, id="models-ask-for-a-key"),
        pytest.param(404, 403, True, id="models-forbidden"),
        pytest.param(404, 404, False, id="neither"),
        pytest.param(404, 503, False, id="models-not-yet"),
        pytest.param(302, 200, False, id="redirect"),
    ],
)
async def test_status_decides(health, models, serves):
    async with FakeEngine("decode") as engine:
        engine.routes = {"/health": status(health), "/v1/models": status(models)}

        assert await is_serving(engine.address) is serves


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(behaviours.hang, id="silent"),
        pytest.param(behaviours.close, id="closed"),
        pytest.param(behaviours.reset, id="reset"),
        pytest.param(behaviours.raw([b"hello\r\n\r\n"], then="close"), id="no-http"),
        pytest.param(
            behaviours.raw([b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"], then="close"),
            id="bad-head",
        ),
    ],
)
async def test_whatever_else_happens_it_does_not_serve(behaviour):
    async with FakeEngine("decode") as engine:
        engine.routes = {"/health": behaviour}

        assert await is_serving(engine.address, 0.2) is False


async def test_nobody_there_does_not_serve():
    with refusing_port() as port:
        assert await is_serving(f"127.0.0.1:{port}") is False


@pytest.mark.case("C58")
async def test_probe_of_a_black_hole_ends_in_time():
    loop = asyncio.get_running_loop()
    with black_hole() as port:
        started_s = loop.time()
        assert await is_serving(f"127.0.0.1:{port}", 0.2) is False

    assert loop.time() - started_s < 3


async def test_probes_carry_no_key_and_no_cookie_and_go_through_no_proxy(monkeypatch):
    with refusing_port() as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        async with FakeEngine("decode") as engine, Prober(5, None) as prober:
            cookie = behaviours.json_answer({}, 200, [("Set-Cookie", "a=b; Path=/")])
            engine.routes = {"/health": cookie}
            for _ in range(2):
                assert await prober.is_serving(Endpoint.parse(engine.address))

    assert engine.connections == 2
    for request in engine.requests:
        assert not {"authorization", "cookie"} & request.headers.keys()


async def test_prober_cannot_be_used_before_it_is_entered():
    with pytest.raises(AssertionError, match="async with"):
        await Prober(1, None).is_serving(Endpoint("h", 1))


async def test_metrics_page_is_read_up_to_a_bound(monkeypatch):
    monkeypatch.setattr("pdproxy.upstream.prober.MAX_METRICS_BYTES", 5)
    async with FakeEngine("decode") as engine, Prober(5.0, None) as prober:
        endpoint = Endpoint.parse(engine.address)
        engine.routes["/metrics"] = behaviours.json_answer({"long": "page"})
        assert await prober.metrics(endpoint) == b'{"lon'
        engine.routes["/metrics"] = status(404)
        assert await prober.metrics(endpoint) == b""
        await engine.stop()
        assert await prober.metrics(endpoint) == b""
