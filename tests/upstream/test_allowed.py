"""Under an allow list no name leads elsewhere, neither at first nor later."""

from __future__ import annotations

import pytest

from pdproxy.core.allow import AllowList
from pdproxy.core.instance import Endpoint
from pdproxy.errors import UpstreamUnreachable
from pdproxy.upstream.allowed import NOT_ALLOWED, allowed_hosts, is_admissible
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.limits import Timeouts
from pdproxy.upstream.prober import Prober
from tests.cases.scene import CHAT, chat
from tests.cases.test_lifecycle import WATCHFUL, change, told, until_state
from tests.fakes import client
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import refusing_port
from tests.fakes.proxy import run_command, running_proxy

LOCAL = AllowList(["127.0.0.0/8", "::1"])
ELSEWHERE = AllowList(["192.0.2.0/24"])
NAME = Endpoint("localhost", 1)


@pytest.mark.case("C88")
async def test_all_addresses_of_a_name_have_to_be_allowed():
    assert await is_admissible(None, NAME)
    assert await is_admissible(LOCAL, NAME)
    assert not await is_admissible(ELSEWHERE, NAME)
    assert not await is_admissible(LOCAL, Endpoint("no-such-name.invalid", 1))
    assert await is_admissible(
        AllowList(["no-such-name.invalid"]), Endpoint("no-such-name.invalid", 1)
    )


async def test_only_allowed_addresses_are_connected_to():
    assert await allowed_hosts(None, NAME) == ["localhost"]
    assert "127.0.0.1" in await allowed_hosts(LOCAL, NAME)
    for host in ("localhost", "127.0.0.1"):
        with pytest.raises(PermissionError, match="instance-allow"):
            await allowed_hosts(ELSEWHERE, Endpoint(host, 1))


@pytest.mark.case("C88")
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_neither_client_nor_prober_connects_to_what_is_not_allowed(host):
    async with FakeEngine("decode") as engine:
        endpoint = Endpoint(host, engine.port)
        async with Prober(5.0, None, ELSEWHERE) as prober:
            found = await prober.probe(endpoint)
        sender = EngineClient(allow=ELSEWHERE)
        with pytest.raises(UpstreamUnreachable) as caught:
            await sender.send(endpoint, "GET", "/health", [], None, timeouts=Timeouts(5, 5, 5))
        await sender.close()

        assert engine.connections == 0
    assert NOT_ALLOWED in found.why
    assert NOT_ALLOWED in caught.value.detail


async def test_client_and_prober_reach_a_name_by_its_allowed_addresses():
    async with FakeEngine("decode") as engine:
        endpoint = Endpoint("localhost", engine.port)
        async with Prober(5.0, None, LOCAL) as prober:
            assert await prober.is_serving(endpoint)
        sender = EngineClient(allow=LOCAL)
        reply = await sender.send(endpoint, "GET", "/health", [], None, timeouts=Timeouts(5, 5, 5))
        with reply:
            assert reply.status == 200
        await sender.close()


@pytest.mark.case("C88")
async def test_refusal_is_the_same_whether_something_listens_or_not():
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        FakeEngine("decode", host="127.0.0.9") as there,
    ):
        args = (*WATCHFUL, "--instance-allow", "127.0.0.1", "192.0.2.0/24")
        with refusing_port() as port:
            async with running_proxy([p1], [d1], *args) as proxy:
                hosts = [there.address, f"127.0.0.9:{port}", "no-such-name.invalid:1"]
                refused = [await change(proxy, "add", "decode", host) for host in hosts]
                listed = await told(proxy, there.address)
                allowed = await change(proxy, "add", "decode", f"127.0.0.1:{port}")
                await until_state(proxy, f"127.0.0.1:{port}", "gone")
                served = await client.post(proxy.port, CHAT, chat(max_tokens=2))

        assert there.connections == 0
    assert [reply.status for reply in refused] == [403] * 3
    messages = {r.error["message"].replace(h, "X") for r, h in zip(refused, hosts, strict=True)}
    assert messages == {"instances: not in --instance-allow: X"}
    assert listed == {}
    assert allowed.status == served.status == 200


async def test_configured_instance_that_is_not_allowed_is_a_fault():
    code, output = await run_command(
        "--check-config", "--prefillers", "10.0.0.1:1", "--instance-allow", "192.0.2.0/24"
    )

    assert code == 2
    assert "--instance-allow: does not allow the instance 10.0.0.1:1" in output


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "10.0.0.0/99", "a b", "x/8"])
async def test_bad_entry_is_named(entry):
    code, output = await run_command("--check-config", "--instance-allow", entry)

    assert code == 2
    assert entry in output
