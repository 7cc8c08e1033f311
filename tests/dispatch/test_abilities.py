"""What a model's engines can do: asked once, remembered, told as plain values."""

from __future__ import annotations

import pytest

from pdproxy.core.planner import Abilities
from pdproxy.dispatch.abilities import MAX_MODELS, AbilityBook
from pdproxy.sim import tokenizer as toy


class Asked:
    """A tokenizer of engines that know only some texts as a token, or do not answer."""

    def __init__(self, **tokens: int) -> None:
        self.tokens = tokens
        self.answers = True
        self.count = 0

    async def ask(self, path, body):
        self.count += 1
        if not self.answers:
            return None
        known = [number for text, number in self.tokens.items() if text in body.decode()]
        return {"tokens": known or [1, 2, 3], "max_model_len": 99}


async def test_engines_are_asked_once_per_model():
    book, engines = AbilityBook(), Asked(**{"</think>": toy.THINK_END})

    found = [await book.find("m", engines.ask) for _ in range(3)]

    assert found == [Abilities(reasoning_end_id=toy.THINK_END, max_model_len=99)] * 3
    assert engines.count == 1


async def test_engines_that_do_not_tell_are_asked_again():
    book, engines = AbilityBook(), Asked(**{"</think>": 11})
    engines.answers = False

    assert await book.find("m", engines.ask) == Abilities()
    engines.answers = True

    assert (await book.find("m", engines.ask)).reasoning_end_id == 11


@pytest.mark.parametrize("token", ["5", None, 1.5, True, {}])
async def test_what_is_no_token_id_is_taken_for_none(token):
    async def ask(path, body):
        return {"tokens": [token], "max_model_len": token}

    assert await AbilityBook().find("m", ask) == Abilities()


async def test_given_id_is_that_of_every_model():
    book, engines = AbilityBook(7), Asked(**{"</think>": 11})

    assert await book.find("m", engines.ask) == Abilities(reasoning_end_id=7, max_model_len=99)


async def test_what_is_known_is_told_as_plain_values():
    book, engines = AbilityBook(), Asked(**{"</think>": 11})

    await book.find("b", engines.ask)
    book.note_recompute("b")
    book.note_ids("a", are_given=False)

    assert book.describe() == {
        "a": {
            "gives_back": False,
            "gives_token_ids": False,
            "reasoning_end_id": None,
            "max_model_len": None,
        },
        "b": {
            "gives_back": True,
            "gives_token_ids": None,
            "reasoning_end_id": 11,
            "max_model_len": 99,
        },
    }


@pytest.mark.parametrize("learn", [AbilityBook.note_recompute, AbilityBook.gives_back])
async def test_book_does_not_grow_without_end(learn):
    book, engines = AbilityBook(), Asked()

    for number in range(2 * MAX_MODELS):
        await book.find(f"m{number}", engines.ask)
        learn(book, f"m{number}")

    assert len(book.describe()) == MAX_MODELS
