"""The load board that processes share: a row of memory for each, summed by whoever reads.

Rule: a row is written by its owner alone, with aligned stores of eight bytes, so there is no lock
and nobody waits. The row of a process that died is cleared by the supervisor, once it is dead.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections import deque

from pdproxy.core.load import NO_LOAD, Cost, Load, LoadAnomalyError, OnAnomaly, raise_anomaly

# More than instances live and in the tail of their last requests; memory is taken as it is used.
SLOTS = 4096
# The slots of no instance: client requests of the whole proxy, those behind its door, and what
# waits there.
RUNNING_SLOT = 0
ADMITTED_SLOT = 1
QUEUED_SLOT = 2
_FIRST_SLOT = 3
COLUMNS = 4  # those of `Load`
_FIELD_BYTES = 8


class BoardMemory:
    """Room for every process's row, in an anonymous file whose descriptor is passed on.

    All rows of a slot lie side by side, so that a sum is one read.
    """

    def __init__(self, rows: int, descriptor: int | None = None, slots: int = SLOTS) -> None:
        """Map memory that exists, or make some that is all zero."""
        self.slots = slots
        self._stride = rows * COLUMNS
        size = slots * self._stride * _FIELD_BYTES
        self.descriptor = os.memfd_create("pdproxy-board") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        self.fields = memoryview(self._map).cast("q")
        self._read = struct.Struct(f"{self._stride}q").unpack_from
        self._stride_bytes = self._stride * _FIELD_BYTES

    def sum(self, slot: int) -> Load:
        """Return what all processes together hold in a slot."""
        found = self._read(self._map, slot * self._stride_bytes)
        return Load(sum(found[0::4]), sum(found[1::4]), sum(found[2::4]), sum(found[3::4]))

    def write(self, slot: int, row: int, load: Load) -> None:
        """Set what one process holds in a slot."""
        at = slot * self._stride + row * COLUMNS
        fields = self.fields
        fields[at] = load.requests
        fields[at + 1] = load.compute_tokens
        fields[at + 2] = load.kv_tokens
        fields[at + 3] = load.body_bytes

    def clear(self, row: int) -> None:
        """Forget all that a process held; it must be dead."""
        nothing = memoryview(array("q", bytes(self.slots * _FIELD_BYTES)))
        for column in range(COLUMNS):
            self.fields[row * COLUMNS + column :: self._stride] = nothing

    def close(self) -> None:
        """Give the memory back."""
        self.fields.release()
        self._map.close()
        os.close(self.descriptor)


class SharedLoadBoard:
    """A `Board` whose loads are those of all processes; what this one charges is in its row.

    The process that opens slots (the supervisor) decides which instance has which; the others
    open the slots they are told.
    """

    def __init__(
        self, memory: BoardMemory, row: int | None, on_anomaly: OnAnomaly = raise_anomaly
    ) -> None:
        """Make a board that writes to `row`; None for one that only reads."""
        self._memory = memory
        self._row = row
        self._on_anomaly = on_anomaly
        self._held: dict[int, Load] = {}  # by this process, in open slots
        self._next = _FIRST_SLOT
        self._closed: deque[int] = deque()

    def open(self) -> int:
        """Return a slot in which nobody holds anything.

        Slots are reused late, when all have been used: a process that has yet to learn that an
        instance is gone may still charge it.

        Raises:
            LoadAnomalyError: there is none left.
        """
        if self._next < self._memory.slots:
            slot, self._next = self._next, self._next + 1
            self._held[slot] = NO_LOAD
            return slot
        for _ in range(len(self._closed)):
            slot = self._closed.popleft()
            if self._memory.sum(slot) == NO_LOAD:
                self._held[slot] = NO_LOAD
                return slot
            self._closed.append(slot)
        raise LoadAnomalyError(f"all {self._memory.slots} slots are in use")

    def open_at(self, slot: int) -> None:
        """Open the slot that another process has chosen."""
        self._held.setdefault(slot, NO_LOAD)

    def close(self, slot: int) -> None:
        """Give a slot back; one in which this process holds load is reported and stays open."""
        held = self._held.get(slot)
        if held != NO_LOAD:
            self._on_anomaly(slot, f"closed with {held}")
            return
        del self._held[slot]
        self._closed.append(slot)

    def charge(self, slot: int, cost: Cost) -> None:
        """Add a cost to a slot."""
        held = self._held.get(slot)
        if held is None:
            self._on_anomaly(slot, f"charged while closed: {cost}")
            return
        self._hold(
            slot,
            Load(
                held.requests + cost.requests,
                held.compute_tokens + cost.compute_tokens,
                held.kv_tokens + cost.kv_tokens,
                held.body_bytes + cost.body_bytes,
            ),
        )

    def release(self, slot: int, cost: Cost) -> None:
        """Take back a cost that was charged to the slot by this process."""
        held = self._held.get(slot)
        if held is None:
            self._on_anomaly(slot, f"released while closed: {cost}")
            return
        held = Load(
            held.requests - cost.requests,
            held.compute_tokens - cost.compute_tokens,
            held.kv_tokens - cost.kv_tokens,
            held.body_bytes - cost.body_bytes,
        )
        self._hold(slot, held)
        if held.is_negative:
            self._on_anomaly(slot, f"negative after a release: {held}")

    def load(self, slot: int) -> Load:
        """Return what all processes together hold in the slot now."""
        return self._memory.sum(slot)

    def _hold(self, slot: int, load: Load) -> None:
        assert self._row is not None, "this board only reads"
        self._held[slot] = load
        self._memory.write(slot, self._row, load)


class SharedInFlight:
    """A number of client requests in all processes."""

    def __init__(self, memory: BoardMemory, row: int | None, slot: int) -> None:
        """Count in a slot of `row`; None only reads."""
        self._memory = memory
        self._row = row
        self._slot = slot
        self._own = 0

    def count(self) -> int:
        """Return the number of all processes."""
        return self._memory.sum(self._slot).requests

    def add(self, change: int) -> None:
        """Change this process's part."""
        assert self._row is not None, "this one only reads"
        self._own += change
        self._memory.write(self._slot, self._row, Load(requests=self._own))
