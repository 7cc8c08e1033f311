"""The KV books: which block holds what, who holds it, and what can be reused.

PURE. The rules: a block is free, held by one or more tables, or cached without a holder; cached
blocks are found by the chained hash of all tokens up to their end and go in least recently used
order when space is needed; what a table holds is given back exactly once.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_HASH_BYTES = 8


class BooksError(Exception):
    """A table was used after it was given back: a fault of the engine, never of a client."""


@dataclass(slots=True, eq=False)
class Table:
    """The blocks that one running request holds, in order of its tokens.

    Attributes:
        cached_tokens: Prompt tokens that were found in the prefix cache.
    """

    blocks: list[int]
    cached_tokens: int
    is_released: bool = field(default=False)


def block_hashes(
    ids: Sequence[int], block_size: int, salt: str = "", known: Sequence[bytes] = ()
) -> list[bytes]:
    """The chained hash of every full block of a token sequence; `known` are those of its start."""
    buffer = array("I", ids).tobytes()
    width = 4 * block_size
    hashes = list(known)
    previous = hashes[-1] if hashes else salt.encode()
    for start in range(len(hashes) * width, len(buffer) - width + 1, width):
        digest = blake2b(buffer[start : start + width], key=previous[:64], digest_size=_HASH_BYTES)
        previous = digest.digest()
        hashes.append(previous)
    return hashes


class Books:
    """The blocks of one engine.

    Args:
        num_blocks: Capacity.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # vLLM keeps block 0 for itself.
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._holders: dict[int, int] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held_blocks(self) -> int:
        """Blocks that a request or a pin holds."""
        return len(self._holders)

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had now, cached ones without a holder included."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Held part of the capacity, 0 to 1: vLLM's kv_cache_usage_perc."""
        return len(self._holders) / self.num_blocks

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens fill."""
        return -(-tokens // self.block_size)

    def allocate(self, hashes: Sequence[bytes], tokens: int) -> Table | None:
        """Blocks for a prompt, cached ones first; None, and nothing changed, if there are too few.

        The block with the last token is never taken from the cache: that token must be computed.
        """
        reusable = (tokens - 1) // self.block_size
        found: list[int] = []
        for block_hash in hashes[:reusable]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        fresh = self.blocks_for(tokens) - len(found)
        idle_hits = sum(block in self._idle for block in found)
        if fresh > self.available_blocks - idle_hits:
            return None
        for block in found:
            self._hold(block)
        blocks = found + [self._take() for _ in range(fresh)]
        return Table(blocks, len(found) * self.block_size)

    def grow(self, table: Table, tokens: int) -> bool:
        """Extend a table to so many tokens; False, and nothing changed, if no block is left."""
        self._check(table)
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.available_blocks:
            return False
        for _ in range(missing):
            table.blocks.append(self._take())
        return True

    def publish(self, table: Table, hashes: Sequence[bytes]) -> None:
        """Make computed blocks findable; the first block with a hash stays the cached one."""
        self._check(table)
        for block, block_hash in zip(table.blocks, hashes, strict=False):
            if block_hash not in self._by_hash and block not in self._hash_of:
                self._by_hash[block_hash] = block
                self._hash_of[block] = block_hash

    def shrink(self, table: Table, tokens: int) -> None:
        """Give back the blocks beyond so many tokens."""
        self._check(table)
        while len(table.blocks) > self.blocks_for(tokens):
            self._let_go(table.blocks.pop())

    def release(self, table: Table) -> None:
        """Give everything back, the end of the sequence first, so that its start is reused longest.

        Raises:
            BooksError: The table was given back before.
        """
        self._check(table)
        table.is_released = True
        for block in reversed(table.blocks):
            self._let_go(block)

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False, and nothing changed, while blocks are held."""
        if self._holders:
            return False
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_hash.clear()
        self._hash_of.clear()
        return True

    def verify(self) -> None:
        """Check that every block is in exactly one place.

        Raises:
            BooksError: It is not.
        """
        places = [*self._free, *self._idle, *self._holders]
        if sorted(places) != list(range(1, self.num_blocks + 1)):
            raise BooksError("a block is lost or in two places")
        if any(count < 1 for count in self._holders.values()):
            raise BooksError("a block is held less than once")
        if any(self._by_hash[h] != block for block, h in self._hash_of.items()):
            raise BooksError("the cache points at another block")

    def _take(self) -> int:
        """A block without content; the least recently used cached one if none is free."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._by_hash[self._hash_of.pop(block)]
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        del self._holders[block]
        if block in self._hash_of:
            self._idle[block] = None
        else:
            self._free.append(block)

    @staticmethod
    def _check(table: Table) -> None:
        if table.is_released:
            raise BooksError("the blocks were given back before")
