"""Addresses of instances: IPv6, aliases of this machine, and entries that are refused whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import client
from tests.fakes.client import Reply
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.fakes.proxy import HasPort, proxy_here, run_command

QUICK_JOIN = ("--waiting-retry-interval", "0.05", "--slow-start", "0")


async def change(proxy: HasPort, act: str, role: str, instances: object) -> Reply:
    body = {"type": role, "instances": instances}
    return await client.post(proxy.port, f"/instances/{act}", body)


async def listed(proxy: HasPort, role: str) -> list[str]:
    """Return the instances of a role as every reply of a change lists them."""
    reply = await change(proxy, "remove", role, [])
    if reply.status != 200:
        reply = await change(proxy, "remove", role, "198.51.100.1:1")
    return list(reply.json[f"current_{role}_instances"])


# --- C55


@pytest.mark.needs("ipv6")
@pytest.mark.case("C55")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_host_on_the_command_line_is_called_with_brackets(host: str) -> None:
    async with FakeEngine("prefill", host="::1") as p1, FakeEngine("decode") as d1:
        args = ["--prefiller-hosts", host, "--prefiller-ports", str(p1.port)]
        async with proxy_here([], [d1], *args) as proxy:
            reply = await client.post(proxy.port, CHAT, chat(max_tokens=2))
            prefillers = await listed(proxy, "prefill")

    assert reply.status == 200
    assert prefillers == [f"[::1]:{p1.port}"]
    assert p1.only_call.headers["host"] == f"[::1]:{p1.port}"


@pytest.mark.case("C55")
async def test_ipv6_zone_is_accepted_or_refused_with_a_clear_message() -> None:
    code, output = await run_command(
        "--check-config", "--prefiller-hosts", "fe80::1%eth0", "--prefiller-ports", "8100"
    )

    assert code == 0 or (code == 2 and "fe80::1%eth0" in output), output
    assert "Traceback" not in output


@pytest.mark.needs("ipv6")
@pytest.mark.case("C55")
async def test_ipv6_instance_is_added_and_removed_by_its_brackets() -> None:
    async with FakeEngine("decode", host="::1") as d2, scene([None], [None], *QUICK_JOIN) as stage:
        added = await change(stage.proxy, "add", "decode", d2.address)
        await wait_until_listed(stage, "decode", d2.address)
        for _ in range(4):
            await stage.post(CHAT, chat(max_tokens=2))
        removed = await change(stage.proxy, "remove", "decode", d2.address)
        left = await listed(stage.proxy, "decode")

    assert added.status == removed.status == 200
    assert d2.calls
    assert {call.headers["host"] for call in d2.calls} == {d2.address}
    assert left == [stage.d1.address]


@pytest.mark.case("C55")
async def test_ipv6_without_brackets_or_port_is_refused_by_name() -> None:
    async with scene() as stage:
        reply = await change(stage.proxy, "add", "decode", "::1")

    assert reply.status == 400
    assert "::1" in reply.body.decode()


async def wait_until_listed(stage: Scene, role: str, address: str) -> None:
    for _ in range(500):
        if address in await listed(stage.proxy, role):
            return
    raise AssertionError(f"{address} did not join")


# --- C56

REFUSED: list[Any] = [
    "h:8100/v1/",
    "h",
    "h:",
    "h:99999",
    "h:0",
    "h:8e3",
    ":8100",
    "",
    "ftp://h:8100",
    "a b:8100",
    8100,
    None,
    {"host": "h"},
    ["127.0.0.1:1", "h"],
    ["127.0.0.1:1", None],
]


@pytest.mark.case("C56")
@pytest.mark.parametrize("act", ["add", "remove"])
@pytest.mark.parametrize("instances", REFUSED, ids=repr)
async def test_bad_entry_is_named_and_nothing_changes(act: str, instances: Any) -> None:
    async with scene() as stage:
        before = (await stage.get("/healthcheck")).json
        reply = await change(stage.proxy, act, "decode", instances)
        after = (await stage.get("/healthcheck")).json
        decoders = await listed(stage.proxy, "decode")

    bad = instances[-1] if isinstance(instances, list) else instances
    assert reply.status == 400
    if isinstance(bad, str):
        assert bad in reply.json["error"]["message"]
    assert after == before
    assert decoders == [stage.d1.address]


@pytest.mark.case("C56")
@pytest.mark.parametrize("entry", ["http://127.0.0.1:{}", " 127.0.0.1:{} ", "127.0.0.1:{}/"])
async def test_harmless_spelling_is_normalised_or_refused_by_name(entry: str) -> None:
    async with FakeEngine("decode") as d2, scene([None], [None], *QUICK_JOIN) as stage:
        reply = await change(stage.proxy, "add", "decode", entry.format(d2.port))
        if reply.status == 200:
            await wait_until_listed(stage, "decode", d2.address)

    assert reply.status in {200, 400}


@pytest.mark.case("C56")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"type": "decoder", "instances": "h:1"}, id="unknown-type"),
        pytest.param({"type": 5, "instances": "h:1"}, id="number-type"),
        pytest.param({"type": ["decode"], "instances": "h:1"}, id="list-type"),
        pytest.param({"instances": "h:1"}, id="no-type"),
        pytest.param({"type": "decode"}, id="no-instances"),
        pytest.param({}, id="nothing"),
        pytest.param([], id="list"),
        pytest.param(b"{", id="no-json"),
        pytest.param(b"", id="empty"),
    ],
)
@pytest.mark.parametrize("act", ["add", "remove"])
async def test_incomplete_change_is_a_400_and_changes_nothing(act: str, body: object) -> None:
    async with scene() as stage:
        before = (await stage.get("/healthcheck")).json
        reply = await stage.post(f"/instances/{act}", body)
        after = (await stage.get("/healthcheck")).json

    assert reply.status == 400
    assert reply.error["message"]
    assert after == before


# --- C57


@pytest.mark.case("C57")
async def test_look_alikes_of_localhost_are_instances_of_their_own() -> None:
    hosts = ["localhost", "127.0.0.1", "0.0.0.0", "localhost.lab", "my-localhost"]
    hosts += ["127.0.0.10", "127.0.0.11"]
    port = str(free_port())
    args = ["--decoder-hosts", *hosts, "--decoder-ports", *[port] * len(hosts)]

    async with FakeEngine("prefill") as p1, proxy_here([p1], [], *args, wait_ready=False) as proxy:
        health = (await client.get(proxy.port, "/healthcheck")).json

    assert health["decode_instances"] == 5


@pytest.mark.case("C57")
@pytest.mark.parametrize("alias", ["127.0.0.1", "0.0.0.0", "LOCALHOST"])
async def test_alias_is_the_same_instance_under_the_name_typed_first(alias: str) -> None:
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        typed = f"localhost:{d1.port}"
        async with proxy_here([p1], [typed], *QUICK_JOIN) as proxy:
            added = await change(proxy, "add", "decode", f"{alias}:{d1.port}")
            decoders = await listed(proxy, "decode")
            removed = await change(proxy, "remove", "decode", f"{alias}:{d1.port}")
            left = await listed(proxy, "decode")

    assert added.status == removed.status == 200
    assert "waiting" not in added.json["message"]
    assert decoders == [typed]
    assert left == []


@pytest.mark.case("C57")
async def test_neighbour_address_gets_traffic_of_its_own() -> None:
    port = free_port("127.0.0.10")
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode", host="127.0.0.10", port=port) as d1,
        FakeEngine("decode", host="127.0.0.11", port=port) as d2,
        proxy_here([p1], [d1, d2]) as proxy,
    ):
        for _ in range(4):
            await client.post(proxy.port, CHAT, chat(max_tokens=1))

    assert d1.calls
    assert d2.calls
