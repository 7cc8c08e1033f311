"""P/D pairs over real sockets: right handles give the plain answer, wrong ones another text."""

import asyncio

import pytest

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.sim.clients import CHAT, COMPLETIONS, prefill, send, until

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Explain this: class Reader(object):\n    pass\n"},
]
BODIES = [
    pytest.param(CHAT, {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}, id="chat"),
    pytest.param(
        COMPLETIONS, {"prompt": "Once upon a time, in a land", "max_tokens": 30}, id="completions"
    ),
    pytest.param(COMPLETIONS, {"prompt": list(range(300, 380)), "max_tokens": 30}, id="token-ids"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_prefill_and_decode_equal_a_plain_engine(
    session, prefiller, decoder, path, body, stream
):
    plain = await send(session, decoder, path, body)
    handle = await prefill(session, prefiller, path, body)
    assert prefiller.books.held_blocks > 0

    split = await send(
        session, decoder, path, body | {"stream": stream, "kv_transfer_params": handle}
    )

    assert split.status == 200
    assert split.text == plain.text
    assert len(plain.text) > 30
    await until(lambda: prefiller.books.held_blocks == decoder.books.held_blocks == 0)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_used_handle_changes_the_text(session, prefiller, decoder, path, body):
    handle = await prefill(session, prefiller, path, body)
    first = await send(session, decoder, path, body | {"kv_transfer_params": handle})

    second = await send(session, decoder, path, body | {"kv_transfer_params": handle})

    assert (second.status, second.text != first.text) == (200, True)
    assert decoder.engine.counters.wrong_transfers == 1


async def test_an_expired_handle_changes_the_text_and_frees_its_blocks(session, decoder):
    body = {"prompt": "Some prompt for an old handle", "max_tokens": 8}
    loop = asyncio.get_running_loop()
    async with in_process(SimConfig(kv_lease_s=0.05)) as prefiller:
        handle = await prefill(session, prefiller, COMPLETIONS, body)
        await until(
            lambda: (
                prefiller.engine.handles.expire(loop.time()) >= 0 and not prefiller.engine.handles
            )
        )

        late = await send(session, decoder, COMPLETIONS, body | {"kv_transfer_params": handle})

        plain = await send(session, decoder, COMPLETIONS, body)
        assert (late.status, late.text != plain.text) == (200, True)
        assert prefiller.books.held_blocks == 0
        assert prefiller.engine.handles.counts.expired == 1


async def test_a_handle_of_another_prompt_changes_the_text(session, prefiller, decoder):
    mine = {"prompt": "One prompt with these words", "max_tokens": 8}
    other = {"prompt": "Other prompt with those words", "max_tokens": 8}
    handle = await prefill(session, prefiller, COMPLETIONS, other)

    wrong = await send(session, decoder, COMPLETIONS, mine | {"kv_transfer_params": handle})

    plain = await send(session, decoder, COMPLETIONS, mine)
    assert (wrong.status, wrong.text != plain.text) == (200, True)
