import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdproxy.sim.books import Books, BooksError, block_hashes
from pdproxy.sim.handles import Handles

SIZE = 4
BLOCKS = 24


def ids(length, start=0):
    return list(range(start, start + length))


def allocate(books, tokens):
    return books.allocate(block_hashes(tokens, SIZE), len(tokens))


def test_a_prompt_takes_the_blocks_that_it_fills():
    books = Books(BLOCKS, SIZE)

    table = allocate(books, ids(9))

    assert len(table.blocks) == 3
    assert books.held_blocks == 3
    assert 0 not in table.blocks


def test_a_published_prefix_is_found_again_but_never_its_last_token():
    books = Books(BLOCKS, SIZE)
    prompt = ids(8)
    first = allocate(books, prompt)
    books.publish(first, block_hashes(prompt, SIZE))
    books.release(first)

    again, longer = allocate(books, prompt), allocate(books, [*prompt, 99])

    assert again.cached_tokens == 4
    assert longer.cached_tokens == 8


def test_another_salt_finds_nothing():
    prompt = ids(12)

    assert not set(block_hashes(prompt, SIZE)) & set(block_hashes(prompt, SIZE, "salt"))


def test_hashes_go_on_from_known_ones():
    prompt = ids(23)
    known = block_hashes(prompt[:10], SIZE)

    assert block_hashes(prompt, SIZE, known=known) == block_hashes(prompt, SIZE)


def test_the_least_recently_used_prefix_goes_first():
    books = Books(7, SIZE)
    prompts = [ids(8), ids(8, 100), ids(8, 200)]
    for prompt in prompts:
        table = allocate(books, prompt)
        books.publish(table, block_hashes(prompt, SIZE))
        books.release(table)
    books.release(allocate(books, [*prompts[0], 1]))

    books.release(allocate(books, ids(8, 300)))

    cached = []
    for prompt in prompts:
        table = allocate(books, [*prompt, 1])
        cached.append(table.cached_tokens)
        books.release(table)
    assert cached == [8, 4, 8]


def test_too_few_blocks_change_nothing():
    books = Books(3, SIZE)
    table = allocate(books, ids(8))

    assert allocate(books, ids(8, 50)) is None
    assert books.grow(table, 4 * SIZE) is False
    assert books.grow(table, 3 * SIZE) is True
    assert books.available_blocks == 0


def test_giving_back_twice_is_a_fault():
    books = Books(3, SIZE)
    table = allocate(books, ids(8))
    books.release(table)

    with pytest.raises(BooksError):
        books.release(table)


def test_the_cache_is_reset_only_when_nothing_is_held():
    books = Books(BLOCKS, SIZE)
    prompt = ids(8)
    table = allocate(books, prompt)
    books.publish(table, block_hashes(prompt, SIZE))

    assert books.reset_prefix_cache() is False
    books.release(table)
    assert books.reset_prefix_cache() is True
    assert allocate(books, prompt).cached_tokens == 0


class BooksMachine(RuleBasedStateMachine):
    """Any order of what an engine does keeps every block in exactly one place."""

    def __init__(self):
        super().__init__()
        self.books = Books(BLOCKS, SIZE)
        self.handles = Handles(self.books, lease_s=10.0)
        self.tables = []
        self.pinned = {}
        self.spent = []
        self.now_s = 0.0

    @rule(length=st.integers(1, 40), start=st.integers(0, 3), publishes=st.booleans())
    def admit(self, length, start, publishes):
        prompt = ids(length, start * 2)
        table = allocate(self.books, prompt)
        if table is None:
            return
        assert table.cached_tokens < length
        if publishes:
            self.books.publish(table, block_hashes(prompt, SIZE))
        self.tables.append((table, length))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 12))
    def grow(self, data, more):
        place = data.draw(st.integers(0, len(self.tables) - 1))
        table, length = self.tables[place]
        if self.books.grow(table, length + more):
            self.tables[place] = (table, length + more)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        place = data.draw(st.integers(0, len(self.tables) - 1))
        self.books.release(self.tables.pop(place)[0])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data):
        table, length = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        name = f"handle-{len(self.pinned) + len(self.spent)}"
        self.handles.pin(name, table, state=length, tokens=length, now_s=self.now_s)
        self.pinned[name] = (list(table.blocks), length)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def pull(self, data):
        name = data.draw(st.sampled_from(sorted(self.pinned)))
        blocks, length = self.pinned.pop(name)
        pulled = self.handles.pull(name, blocks, self.now_s)
        assert (pulled.is_valid, pulled.state) == (True, length)
        self.spent.append(name)

    @precondition(lambda self: self.spent)
    @rule(data=st.data())
    def pull_again(self, data):
        name = data.draw(st.sampled_from(self.spent))
        assert not self.handles.pull(name, [1], self.now_s).is_valid

    @rule(passed_s=st.floats(0, 12))
    def wait(self, passed_s):
        self.now_s += passed_s
        self.handles.expire(self.now_s)
        if passed_s > 10:
            self.spent += list(self.pinned)
            self.pinned = {}
        else:
            gone = [name for name in self.pinned if name not in self.handles]
            self.spent += gone
            for name in gone:
                del self.pinned[name]

    @rule()
    def reset(self):
        assert self.books.reset_prefix_cache() is (self.books.held_blocks == 0)

    @invariant()
    def every_block_is_in_one_place(self):
        self.books.verify()
        held = {b for table, _ in self.tables for b in table.blocks}
        held |= {b for blocks, _ in self.pinned.values() for b in blocks}
        assert self.books.held_blocks == len(held)
        assert 0 <= self.books.usage <= 1
        assert len(self.handles) == len(self.pinned)


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
