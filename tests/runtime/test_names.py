"""Every address of a name is an instance, for as long as the name has it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pdproxy.core.instance import Endpoint, Role, Source, State
from pdproxy.core.load import Cost
from pdproxy.runtime.names import NameWatch, resolve_by_system
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import proxy_here
from tests.runtime.test_roster import QUICK, rig

NAME = Endpoint("engines.lab", 8100)
D = Role.DECODE


class FakeResolver:
    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def __call__(self, host: str, port: int) -> list[str]:
        if host not in self.addresses:
            raise socket.gaierror("no such name")
        return self.addresses[host]


def labels(made):
    return [instance.label for instance in made.fleet.instances(D)]


async def test_addresses_come_and_go_and_a_failure_changes_nothing(caplog):
    async with rig(QUICK) as made:
        resolver = FakeResolver()
        watch = NameWatch([(D, NAME)], made.roster, resolver)
        made.prober.up |= {Endpoint(f"10.0.0.{n}", 8100) for n in (1, 2, 3)}

        resolver.addresses["engines.lab"] = ["10.0.0.1", "10.0.0.2"]
        await watch.resolve()
        assert sorted(labels(made)) == ["10.0.0.1:8100", "10.0.0.2:8100"]

        resolver.addresses.clear()
        await watch.resolve()
        await watch.resolve()
        assert len(labels(made)) == 2
        assert caplog.text.count("is not resolved, nothing changes") == 1

        resolver.addresses["engines.lab"] = ["10.0.0.2", "10.0.0.3"]
        await watch.resolve()
        assert sorted(labels(made)) == ["10.0.0.2:8100", "10.0.0.3:8100"]


async def test_vanished_address_drains_and_comes_back():
    async with rig(QUICK) as made:
        resolver = FakeResolver()
        watch = NameWatch([(D, NAME)], made.roster, resolver)
        resolver.addresses["engines.lab"] = ["10.0.0.1"]
        await watch.resolve()
        made.fleet.admit(made.instance(Endpoint("10.0.0.1", 8100)))
        with made.fleet.lease(D, Cost()) as lease:
            resolver.addresses["engines.lab"] = ["10.0.0.2"]
            await watch.resolve()
            assert made.fleet.state(lease.instance) is State.DRAINING
            resolver.addresses["engines.lab"] = ["10.0.0.1"]
            await watch.resolve()
            assert made.fleet.state(lease.instance) is State.ACTIVE


async def test_address_that_another_name_or_a_call_wants_stays():
    async with rig(QUICK) as made:
        resolver = FakeResolver()
        other = Endpoint("other.lab", 8100)
        watch = NameWatch([(D, NAME), (D, other)], made.roster, resolver)
        await made.roster.add(D, Endpoint("10.0.0.2", 8100))
        resolver.addresses["engines.lab"] = ["10.0.0.1", "10.0.0.2"]
        resolver.addresses["other.lab"] = ["10.0.0.1"]
        await watch.resolve()
        resolver.addresses["engines.lab"] = ["10.0.0.3"]
        await watch.resolve()

        assert sorted(labels(made)) == ["10.0.0.1:8100", "10.0.0.2:8100", "10.0.0.3:8100"]


async def test_what_a_call_drained_is_not_brought_back_by_its_name():
    async with rig(QUICK) as made:
        resolver = FakeResolver()
        watch = NameWatch([(D, NAME)], made.roster, resolver)
        resolver.addresses["engines.lab"] = ["10.0.0.1"]
        await watch.resolve()
        await made.roster.drain(D, Endpoint("10.0.0.1", 8100), None)
        await watch.resolve()

        assert labels(made) == []
        await made.roster.undrain(D, Endpoint("10.0.0.1", 8100))
        member = made.fleet.members.find(D, Endpoint("10.0.0.1", 8100))
        assert member is not None
        assert member.source is Source.NAME


async def test_slow_resolver_is_a_failure(monkeypatch):
    async def never(_host: str, _port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr("pdproxy.runtime.names.RESOLVE_S", 0.01)
    async with rig(QUICK) as made:
        await NameWatch([(D, NAME)], made.roster, never).resolve()

        assert labels(made) == []


async def test_system_resolver_gives_each_address_once():
    assert "127.0.0.1" in await resolve_by_system("localhost", 1)
    with pytest.raises(socket.gaierror):
        await resolve_by_system("no-such-name.invalid", 1)


async def test_proxy_serves_by_names_alone():
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1:
        args = ("--prefiller-dns", f"localhost:{p1.port}", "--decoder-dns", f"localhost:{d1.port}")
        async with proxy_here([], [], *args):
            pass
