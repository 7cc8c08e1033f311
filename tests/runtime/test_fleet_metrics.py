"""What the metrics page says of instances: by the proxy's own count, and by what engines say."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Endpoint, Role, State
from pdproxy.core.load import Cost, LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.core.record import EngineReport
from pdproxy.runtime.fleet_metrics import FleetCollector
from tests.cases.scene import Scene, scene
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.proxy import metrics
from tests.fakes.waiting import until_answer

USAGE = "pdproxy_instance_engine_kv_usage_ratio"
RUNNING = "pdproxy_instance_engine_requests_running"
WAITING = "pdproxy_instance_engine_requests_waiting"
FORECAST = "pdproxy_instance_kv_usage_ratio"


class Rig:
    """A collector of one prefiller and one decoder."""

    def __init__(self):
        self.now_s = 0.0
        policies = {role: POLICIES["least_load"](role, random.Random(0)) for role in Role}
        self.fleet = Fleet(LoadBoard(), policies, lambda: self.now_s)
        self.p1, self.d1 = (
            self.fleet.add(role, Endpoint("h", 1), state=State.ACTIVE)[0] for role in Role
        )
        self.collector = FleetCollector(self.fleet)

    def samples(self, name):
        """Values by role."""
        self.collector.read()
        (metric,) = [found for found in self.collector.collect() if found.name == name]
        return {sample.labels["role"]: sample.value for sample in metric.samples}


@pytest.fixture
def rig():
    return Rig()


def test_circuit_is_open_while_ejected_and_half_open_until_a_request_goes_well(rig):
    circuit = "pdproxy_instance_circuit_state"
    seen = [rig.samples(circuit)["decode"]]
    rig.fleet.report_failure(rig.d1, certain=True)
    seen.append(rig.samples(circuit)["decode"])
    rig.now_s = 60.0
    rig.fleet.admit(rig.d1)
    seen.append(rig.samples(circuit)["decode"])
    rig.fleet.report_success(rig.d1)
    seen.append(rig.samples(circuit)["decode"])

    assert seen == [0, 2, 1, 0]
    assert rig.samples(circuit)["prefill"] == 0


def test_what_engines_say_is_told_and_what_they_do_not_say_has_no_series(rig):
    assert rig.samples(USAGE) == rig.samples(RUNNING) == rig.samples(WAITING) == {}

    rig.fleet.judge.engine_reported(rig.d1, EngineReport(kv_usage=0.0, running=3, waiting=0))
    rig.fleet.judge.engine_reported(rig.p1, EngineReport(waiting=2))

    assert rig.samples(USAGE) == {"decode": 0.0}
    assert rig.samples(RUNNING) == {"decode": 3}
    assert rig.samples(WAITING) == {"decode": 0, "prefill": 2}


def test_forecast_is_by_the_proxys_own_count_whatever_the_engine_says(rig):
    report = EngineReport(capacity_tokens=200, kv_usage=0.1)
    rig.fleet.judge.engine_reported(rig.d1, report)

    with rig.fleet.lease(Role.DECODE, Cost(kv_tokens=250)):
        assert rig.samples(FORECAST) == {"decode": 1.25}
        assert rig.samples(USAGE) == {"decode": 0.1}


def test_engine_that_is_dead_has_no_series_of_what_it_said(rig):
    rig.fleet.judge.engine_reported(rig.d1, EngineReport(kv_usage=0.9, running=3, waiting=1))
    rig.fleet.report_failure(rig.d1, certain=True)

    assert rig.samples(USAGE) == rig.samples(RUNNING) == rig.samples(WAITING) == {}


# --- through the real command


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "3"])
async def test_page_follows_what_engines_say_and_whether_they_do(workers: str) -> None:
    async with talkative(workers) as stage:
        name = stage.d1.address
        await until_answer(lambda: has(stage, {(USAGE, name): 0.75, (WAITING, name): 4.0}), 10)
        stage.d1.routes["/metrics"] = page(b"vllm:num_requests_running 9\n")
        await until_answer(lambda: has(stage, {(RUNNING, name): 9.0}), 10)
        await stage.d1.stop()
        await until_answer(lambda: has(stage, {}), 10)
        await stage.d1.start()
        await until_answer(lambda: has(stage, {(RUNNING, name): 9.0}), 10)


@asynccontextmanager
async def talkative(workers: str) -> AsyncIterator[Scene]:
    flags = ("--workers", workers, "--probe-interval", "0.1", "--scrape-interval", "0.1")
    async with scene([None], [None], *flags, process=True) as stage:
        stage.p1.routes["/metrics"] = page(b"")
        stage.d1.routes["/metrics"] = page(
            b"vllm:kv_cache_usage_perc 0.75\nvllm:num_requests_waiting 4\n"
        )
        yield stage


def page(text: bytes):
    async def behaviour(_: EngineRequest, answer: Answer) -> None:
        await answer.whole(200, text, [("content-type", "text/plain")])

    return behaviour


async def has(stage: Scene, expected: dict[tuple[str, str], float]) -> bool:
    """Whether what engines say, as the page tells it, is exactly this; all workers may answer."""
    for _ in range(6):
        found = {
            (sample.name, sample.labels["instance"]): sample.value
            for sample in await metrics(stage.proxy)
            if sample.name in {USAGE, RUNNING, WAITING}
        }
        if found != expected:
            return False
    return True
