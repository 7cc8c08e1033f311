"""One lab for all client suites; after each test nothing may be in flight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdproxy.sim.config import SimConfig
from pdproxy.sim.faults import Faults
from tests.clients import lab as labs
from tests.clients.lab import Lab

STEP_S = 0.001  # per token, so that a stream can be left in its middle
EOS_ODDS = 60  # answers without a limit end after so many tokens, more or less


@pytest.fixture(scope="package")
def shared_lab() -> Iterator[Lab]:
    with labs.lab(SimConfig(decode_base_s=STEP_S, eos_odds=EOS_ODDS)) as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    yield shared_lab
    for engine in shared_lab.engines:
        engine.node.faults = Faults()
    shared_lab.assert_quiescent()
