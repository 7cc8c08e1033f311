"""The port for scrapers alone, with the real command."""

from __future__ import annotations

import pytest

from pdproxy.errors import ConfigError
from pdproxy.runtime.metrics_site import bind_metrics
from pdproxy.runtime.settings import Settings
from tests.fakes import client
from tests.fakes.ports import free_port
from tests.fakes.proxy import proxy_here


async def test_metrics_are_served_on_a_port_of_their_own_and_nothing_else_is():
    port = free_port()
    async with proxy_here([], [], "--metrics-port", str(port), wait_ready=False) as proxy:
        there = await client.get(port, "/metrics")
        here = await client.get(proxy.port, "/metrics")
        health = await client.get(port, "/health")
        others = [await client.get(port, path) for path in ("/instances", "/v1/models")]

    assert there.status == here.status == health.status == 200
    assert there.headers["content-type"] == here.headers["content-type"]
    assert b"pdproxy_build_info" in there.body
    assert [reply.status for reply in others] == [404, 404]


async def test_openmetrics_is_served_to_who_asks():
    port = free_port()
    asking = [("Accept", "application/openmetrics-text;version=1.0.0;q=0.7,text/plain;q=0.3")]
    async with proxy_here([], [], "--metrics-port", str(port), wait_ready=False):
        reply = await client.get(port, "/metrics", asking)

    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.body.endswith(b"# EOF\n")


def test_no_port_is_opened_by_default():
    assert bind_metrics(Settings()) == []


def test_port_in_use_is_told_by_its_flag():
    (taken, *others) = bind_metrics(Settings(metrics_host="127.0.0.1", metrics_port=free_port()))
    try:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--metrics-host, --metrics-port"):
            bind_metrics(Settings(metrics_host="127.0.0.1", metrics_port=port))
    finally:
        for each in (taken, *others):
            each.close()
