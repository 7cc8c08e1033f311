import pytest

from pdproxy.sim.books import Books, block_hashes
from pdproxy.sim.handles import Handles

STATE = 77


@pytest.fixture
def books():
    return Books(16, 4)


@pytest.fixture
def handles(books):
    return Handles(books, lease_s=30.0)


def pin(books, handles, name="h", tokens=9, now_s=0.0):
    prompt = list(range(tokens))
    table = books.allocate(block_hashes(prompt, 4), tokens)
    assert books.grow(table, tokens + 4)
    handles.pin(name, table, STATE, tokens, now_s)
    return list(table.blocks)


def test_only_the_prompts_blocks_stay_pinned(books, handles):
    pin(books, handles)

    assert books.held_blocks == 3


def test_a_handle_is_valid_once(books, handles):
    blocks = pin(books, handles)

    first, second = handles.pull("h", blocks, 1.0), handles.pull("h", blocks, 1.0)

    assert (first.is_valid, first.state, first.tokens) == (True, STATE, 9)
    assert not second.is_valid
    assert second.state != STATE
    assert books.held_blocks == 0
    assert handles.counts.late == 1


def test_wrong_blocks_give_a_wrong_state_and_free_the_right_ones(books, handles):
    pin(books, handles)

    pulled = handles.pull("h", [7, 8, 9], 1.0)

    assert not pulled.is_valid
    assert books.held_blocks == 0


def test_a_wrong_state_is_always_the_same(handles):
    assert handles.pull("x", [1], 0.0) == handles.pull("x", [1], 0.0)


def test_the_lease_ends(books, handles):
    blocks = pin(books, handles)

    assert handles.next_expiry_s() == 30.0
    assert not handles.pull("h", blocks, 30.0).is_valid
    assert books.held_blocks == 0
    assert handles.counts.expired == 1


def test_a_sign_of_life_extends_the_lease_but_never_shortens_it(books, handles):
    pin(books, handles)

    handles.extend("h", 1.0)
    assert handles.next_expiry_s() == 30.0
    handles.extend("h", 25.0)
    assert handles.next_expiry_s() == 45.0


def test_a_released_handle_is_gone(books, handles):
    pin(books, handles)

    assert handles.release("h")
    assert not handles.release("h")
    assert books.held_blocks == 0
