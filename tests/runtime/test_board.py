"""A shared board adds up as the one of one process does, over the rows of all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdproxy.core.load import NO_LOAD, Cost, Load, LoadAnomalyError, LoadBoard
from pdproxy.runtime.board import RUNNING_SLOT, BoardMemory, SharedInFlight, SharedLoadBoard
from tests.properties import UNHURRIED

COST = Cost(requests=1, compute_tokens=1000, kv_tokens=1200, body_bytes=4000)
amounts = st.integers(0, 2**40)
costs = st.builds(Cost, amounts, amounts, amounts, amounts)


@pytest.fixture
def memory():
    made = BoardMemory(3)
    yield made
    made.close()


class SameAsOneProcess(RuleBasedStateMachine):
    """Whatever is done by three processes, each sees what a board of one process says."""

    def __init__(self):
        super().__init__()
        self.memory = BoardMemory(3)
        self.owner = SharedLoadBoard(self.memory, None)
        self.boards = [SharedLoadBoard(self.memory, row) for row in range(3)]
        self.plain = LoadBoard()
        self.slots = {}  # of the shared board, by that of the plain one
        self.charged = []

    def teardown(self):  # type: ignore[explicit-override] # typing.override is new in 3.12
        self.memory.close()

    @rule()
    def open(self):
        slot = self.owner.open()
        for board in self.boards:
            board.open_at(slot)
        self.slots[self.plain.open()] = slot

    @precondition(lambda self: self.slots)
    @rule(place=st.integers(0), row=st.integers(0, 2), cost=costs)
    def charge(self, place, row, cost):
        plain = sorted(self.slots)[place % len(self.slots)]
        self.plain.charge(plain, cost)
        self.boards[row].charge(self.slots[plain], cost)
        self.charged.append((plain, row, cost))

    @precondition(lambda self: self.charged)
    @rule(place=st.integers(0))
    def release(self, place):
        plain, row, cost = self.charged.pop(place % len(self.charged))
        self.plain.release(plain, cost)
        self.boards[row].release(self.slots[plain], cost)

    @precondition(lambda self: self.slots)
    @rule(place=st.integers(0))
    def close_an_idle_one(self, place):
        plain = sorted(self.slots)[place % len(self.slots)]
        if any(plain == slot for slot, _, _ in self.charged):
            return
        self.plain.close(plain)
        slot = self.slots.pop(plain)
        for board in (self.owner, *self.boards):
            board.close(slot)

    @precondition(lambda self: self.charged)
    @rule(row=st.integers(0, 2))
    def process_dies(self, row):
        for plain, whose, cost in self.charged:
            if whose == row:
                self.plain.release(plain, cost)
        self.charged = [each for each in self.charged if each[1] != row]
        self.memory.clear(row)
        self.boards[row] = SharedLoadBoard(self.memory, row)
        for slot in self.slots.values():
            self.boards[row].open_at(slot)

    @invariant()
    def loads_are_equal(self):
        for plain, slot in self.slots.items():
            for board in (self.owner, *self.boards):
                assert board.load(slot) == self.plain.load(plain)


TestSameAsOneProcess = SameAsOneProcess.TestCase
TestSameAsOneProcess.settings = UNHURRIED


@pytest.mark.parametrize("act", ["charge", "release"])
def test_closed_slot_takes_nothing_and_reports(memory, act):
    anomalies = []
    board = SharedLoadBoard(memory, 0, lambda slot, text: anomalies.append(text))

    getattr(board, act)(7, COST)

    assert len(anomalies) == 1
    assert "closed" in anomalies[0]
    assert board.load(7) == NO_LOAD


def test_negative_sum_of_one_process_is_reported_and_stays_visible(memory):
    anomalies = []
    board = SharedLoadBoard(memory, 1, lambda slot, text: anomalies.append(text))
    slot = board.open()

    board.release(slot, COST)

    assert len(anomalies) == 1
    assert "negative" in anomalies[0]
    assert board.load(slot) == Load(-1, -1000, -1200, -4000)


def test_slot_with_load_is_not_closed_but_reported(memory):
    board = SharedLoadBoard(memory, 1)
    slot = board.open()
    board.charge(slot, COST)

    with pytest.raises(LoadAnomalyError, match="closed with"):
        board.close(slot)

    assert board.load(slot) == Load(1, 1000, 1200, 4000)


def test_slots_are_reused_only_when_all_were_used_and_nobody_holds_one():
    memory = BoardMemory(1, slots=7)
    owner, late = SharedLoadBoard(memory, None), SharedLoadBoard(memory, 0)
    slots = [owner.open() for _ in range(3)]
    for slot in slots[:2]:
        late.open_at(slot)
        owner.close(slot)
    late.charge(slots[0], COST)

    assert owner.open() == slots[-1] + 1
    assert owner.open() == slots[1]
    with pytest.raises(LoadAnomalyError, match="in use"):
        owner.open()
    late.release(slots[0], COST)
    assert owner.open() == slots[0]


def test_requests_in_flight_are_counted_over_all_processes(memory):
    counts = [SharedInFlight(memory, row, RUNNING_SLOT) for row in range(3)]
    for each in counts:
        each.add(2)
    counts[0].add(-1)

    reader = SharedInFlight(memory, None, RUNNING_SLOT)
    assert {each.count() for each in (*counts, reader)} == {5}
    memory.clear(1)
    assert counts[0].count() == 3


def test_another_process_sees_and_adds_to_the_sums(memory):
    board = SharedLoadBoard(memory, 0)
    slot = board.open()
    board.charge(slot, COST)
    code = (
        "import sys, time; from pdproxy.core.load import Cost;"
        "from pdproxy.runtime.board import BoardMemory, SharedLoadBoard;"
        f"board = SharedLoadBoard(BoardMemory(3, {memory.descriptor}), 2);"
        f"board.open_at({slot}); board.charge({slot}, Cost(5, 6, 7, 8));"
        f"print(board.load({slot}).requests, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=(memory.descriptor,), stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"6\n"
        os.kill(child.pid, signal.SIGKILL)

    assert board.load(slot) == Load(6, 1006, 1207, 4008)
    memory.clear(2)
    assert board.load(slot) == Load(1, 1000, 1200, 4000)
