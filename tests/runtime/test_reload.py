"""The configuration file is followed: on SIGHUP and on a change, whole or not at all."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.cases.scene import CHAT, chat
from tests.cases.test_lifecycle import WATCHFUL, change, slow, told, until_state
from tests.fakes import client
from tests.fakes.client import RawClient, assert_whole_stream
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import running_proxy
from tests.fakes.waiting import until


class Rig:
    def __init__(self, path, engines):
        self.path = path
        self.p1, self.d1, self.d2 = engines
        self.proxy: Any = None

    def write(self, *decoders, more=""):
        names = ", ".join(f'"{engine.address}"' for engine in decoders)
        text = f'prefillers = ["{self.p1.address}"]\ndecoders = [{names}]\n{more}'
        self.path.write_text(text)


@asynccontextmanager
async def rig(tmp_path):
    async with FakeEngine("prefill") as p1, FakeEngine("decode") as d1, FakeEngine("decode") as d2:
        made = Rig(tmp_path / "pdproxy.toml", (p1, d1, d2))
        made.write(d1)
        async with running_proxy([], [], "--config", str(made.path), *WATCHFUL) as proxy:
            made.proxy = proxy
            yield made


@pytest.mark.parametrize("by_signal", [True, False], ids=["signal", "change"])
async def test_new_list_takes_effect_and_old_streams_end_well(tmp_path, by_signal):
    async with rig(tmp_path) as made:
        slow(made.d1)
        async with await RawClient.connect(made.proxy.port) as peer:
            body = client.as_json(chat(stream=True, max_tokens=60))
            await peer.send_request("POST", CHAT, body, client.JSON_TYPE)
            await made.d1.wait_for_calls(1)
            made.write(made.d2)
            if by_signal:
                made.proxy.process.send_signal(signal.SIGHUP)
            await until_state(made.proxy, made.d2.address, "active")
            await until_state(made.proxy, made.d1.address, "draining")
            other = await client.post(made.proxy.port, CHAT, chat(max_tokens=2))
            assert_whole_stream(await peer.read_rest(await peer.read_head()))
        await until_state(made.proxy, made.d1.address, "gone")

    assert other.status == 200
    assert len(made.d1.calls) == 1
    assert made.d2.calls
    assert "is no longer there" in made.proxy.log_text()


async def test_broken_file_is_refused_and_the_old_list_stays(tmp_path):
    async with rig(tmp_path) as made:
        made.write(more="decoders = 7 [\n")
        await made.proxy.wait_for_log("the configuration is not taken over", 20.0)
        kept = await told(made.proxy, made.d1.address)
        made.write(made.d1, made.d2, more='log_level = "DEBUG"\n')
        await until_state(made.proxy, made.d2.address, "active")
        await made.proxy.wait_for_log("takes effect at the next start only: log_level", 20.0)

    assert kept["state"] == "active"


async def test_instances_added_by_calls_are_left_alone(tmp_path):
    async with rig(tmp_path) as made:
        await change(made.proxy, "add", "decode", made.d2.address)
        await until_state(made.proxy, made.d2.address, "active")
        made.write(made.d1, more="# a comment\n")
        made.proxy.process.send_signal(signal.SIGHUP)
        await until(lambda: "configuration read: 0 changes" in made.proxy.log_text(), 20.0)

        assert (await told(made.proxy, made.d2.address))["state"] == "active"


async def test_what_a_call_removed_stays_away_until_the_file_lists_it_anew(tmp_path):
    async with rig(tmp_path) as made:
        port, address = made.proxy.port, made.d1.address
        body = {"type": "decode", "instances": address}
        assert (await client.post(port, "/instances/remove", body)).status == 200
        made.write(made.d1, made.d2)
        made.proxy.process.send_signal(signal.SIGHUP)
        await until_state(made.proxy, made.d2.address, "active")
        after_reload = await told(made.proxy, address)
        made.write(made.d2, more='log_level = "DEBUG"\n')
        made.proxy.process.send_signal(signal.SIGHUP)
        await made.proxy.wait_for_log("at the next start only: log_level", 20.0)
        made.write(made.d1, made.d2)
        made.proxy.process.send_signal(signal.SIGHUP)
        await until_state(made.proxy, address, "active")

    assert after_reload["state"] == "gone"


async def test_signal_without_a_file_does_not_end_the_proxy():
    async with (
        FakeEngine("prefill") as p1,
        FakeEngine("decode") as d1,
        running_proxy([p1], [d1]) as proxy,
    ):
        proxy.process.send_signal(signal.SIGHUP)
        reply = await client.post(proxy.port, CHAT, chat(max_tokens=2))

    assert reply.status == 200
