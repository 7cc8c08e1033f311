"""KV handles of a prefiller: valid once, pinned until pulled or until the lease ends.

PURE: the time is an argument, in seconds of any steady clock.
"""

from dataclasses import dataclass

from pdproxy.sim.books import Books, Table

# Long enough to tell a late pull from a foreign one; bounded, since handles come for ever.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefilled prompt that waits for its decoder."""

    table: Table
    state: int
    tokens: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a decoder receives.

    Attributes:
        state: The prefix state of the blocks; a wrong one if the handle was not valid.
        is_valid: Whether the blocks were still the prompt's.
        tokens: Tokens transferred.
    """

    state: int
    is_valid: bool
    tokens: int


@dataclass(slots=True)
class HandleCounts:
    """What became of handles, for /metrics."""

    issued: int = 0
    pulled: int = 0
    released: int = 0
    expired: int = 0
    late: int = 0


class Handles:
    """The pins of one engine over its books."""

    def __init__(self, books: Books, lease_s: float) -> None:
        self._books = books
        self._lease_s = lease_s
        self._pins: dict[str, Pin] = {}
        self._gone: dict[str, None] = {}
        self.counts = HandleCounts()

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, handle_id: object) -> bool:
        return handle_id in self._pins

    def pin(self, handle_id: str, table: Table, state: int, tokens: int, now_s: float) -> Pin:
        """Keep a finished prompt's blocks; the table belongs to the pin from here on."""
        self._books.shrink(table, tokens)
        pin = Pin(table, state, tokens, now_s + self._lease_s)
        self._pins[handle_id] = pin
        self.counts.issued += 1
        return pin

    def pull(self, handle_id: str, block_ids: list[int], now_s: float) -> Pulled:
        """Hand the blocks over and free them.

        Used, expired and foreign handles, and wrong block ids, give a state that belongs to no
        prompt, as reused blocks do; always the same one for the same handle.
        """
        self.expire(now_s)
        pin = self._forget(handle_id)
        if pin is None:
            self.counts.late += handle_id in self._gone
            return Pulled(_stale_state(handle_id), is_valid=False, tokens=0)
        self.counts.pulled += 1
        if block_ids[: len(pin.table.blocks)] != pin.table.blocks[: len(block_ids)]:
            return Pulled(_stale_state(str(block_ids)), is_valid=False, tokens=pin.tokens)
        return Pulled(pin.state, is_valid=True, tokens=pin.tokens)

    def release(self, handle_id: str) -> bool:
        """Free a handle's blocks without a transfer; False if it is not pinned."""
        if self._forget(handle_id) is None:
            return False
        self.counts.released += 1
        return True

    def extend(self, handle_id: str, now_s: float) -> None:
        """A waiting decoder's sign of life: two thirds of the lease from now."""
        pin = self._pins.get(handle_id)
        if pin is not None:
            expires_s = max(pin.expires_s, now_s + self._lease_s * 2 / 3)
            self._pins[handle_id] = Pin(pin.table, pin.state, pin.tokens, expires_s)

    def expire(self, now_s: float) -> int:
        """Free the blocks whose lease has ended; how many handles that were."""
        ended = [name for name, pin in self._pins.items() if pin.expires_s <= now_s]
        for name in ended:
            self._forget(name)
        self.counts.expired += len(ended)
        return len(ended)

    def next_expiry_s(self) -> float | None:
        """When the next lease ends."""
        return min((pin.expires_s for pin in self._pins.values()), default=None)

    def _forget(self, handle_id: str) -> Pin | None:
        pin = self._pins.pop(handle_id, None)
        if pin is None:
            return None
        self._books.release(pin.table)
        self._gone[handle_id] = None
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        return pin


def _stale_state(name: str) -> int:
    """The state of blocks that hold something else by now."""
    state = 0x5EED
    for byte in name.encode():
        state = (state * 31 + byte) & 0xFFFFFFFF
    return state
