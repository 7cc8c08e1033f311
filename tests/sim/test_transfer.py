"""P/D pairs over real sockets: right handles give the plain answer, wrong ones another text."""

import asyncio

import pytest

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.sim.clients import ASK_HANDLE, CHAT, COMPLETIONS, prefill, send, until

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Explain this: class Reader(object):\n    pass\n"},
]
BODIES = [
    pytest.param(CHAT, {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True}, id="chat"),
    pytest.param(
        COMPLETIONS,
        {"prompt": "Once upon a time, in a land", "max_tokens": 30, "ignore_eos": True},
        id="completions",
    ),
    pytest.param(
        COMPLETIONS,
        {"prompt": list(range(300, 380)), "max_tokens": 30, "ignore_eos": True},
        id="token-ids",
    ),
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


async def test_decode_without_a_handle_prefills_here(session, decoder):
    body = {"prompt": "No handle for this one", "max_tokens": 4}

    answer = await send(session, decoder, COMPLETIONS, body)

    assert answer.status == 200
    assert decoder.engine.counters.by_source["local_compute"] == len_of(answer)


async def test_transferred_prompts_are_counted_as_external(session, prefiller, decoder):
    body = {"prompt": "Count this prompt", "max_tokens": 4}
    handle = await prefill(session, prefiller, COMPLETIONS, body)

    answer = await send(session, decoder, COMPLETIONS, body | {"kv_transfer_params": handle})

    assert decoder.engine.counters.by_source["external_kv_transfer"] == len_of(answer)
    assert decoder.engine.counters.by_source["local_compute"] == 0


async def test_a_streamed_prefill_shows_no_handle_but_keeps_its_blocks(session, prefiller):
    body = {"prompt": "Streamed", "max_tokens": 1, "stream": True, "kv_transfer_params": ASK_HANDLE}

    answer = await send(session, prefiller, COMPLETIONS, body)

    assert b"kv_transfer_params" not in answer.raw
    assert prefiller.books.held_blocks == 1


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
async def test_nothing_is_pinned_unless_asked_for(session, prefiller, params):
    body = {"prompt": "Plain", "max_tokens": 1, "kv_transfer_params": params}

    answer = await send(session, prefiller, COMPLETIONS, body)

    assert answer.json["kv_transfer_params"] is None
    assert prefiller.books.held_blocks == 0


@pytest.mark.parametrize("crash", [False, True], ids=["counted", "crashing"])
@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_request_id"])
async def test_a_malformed_handle_is_an_engine_crash(session, prefiller, missing, crash):
    body = {"prompt": "Broken handle", "max_tokens": 4}
    handle = await prefill(session, prefiller, COMPLETIONS, body)
    del handle[missing]
    async with in_process(SimConfig(crash_on_bad_handle=crash)) as decoder:
        answer = await send(session, decoder, COMPLETIONS, body | {"kv_transfer_params": handle})

        assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
        assert decoder.engine.counters.bad_handles == 1
        async with session.get(decoder.url + "/health") as health:
            assert health.status == (503 if crash else 200)


async def test_a_handle_of_a_shorter_prompt_is_an_engine_crash(session, prefiller, decoder):
    handle = await prefill(session, prefiller, COMPLETIONS, {"prompt": "Short"})
    body = {"prompt": list(range(300, 340)), "kv_transfer_params": handle}

    answer = await send(session, decoder, COMPLETIONS, body)

    assert answer.status == 500
    assert decoder.engine.counters.bad_handles == 1


@pytest.mark.parametrize("change", [{"remote_port": 1}, {"remote_engine_id": "another"}])
async def test_a_failed_pull_is_a_500_or_a_local_prefill(session, prefiller, decoder, change):
    body = {"prompt": "Who is there?", "max_tokens": 6}
    handle = await prefill(session, prefiller, COMPLETIONS, body) | change
    asked = body | {"kv_transfer_params": handle}

    failed = await send(session, decoder, COMPLETIONS, asked)
    streamed = await send(session, decoder, COMPLETIONS, asked | {"stream": True})
    async with in_process(SimConfig(load_failure_policy="recompute")) as lenient:
        recomputed = await send(session, lenient, COMPLETIONS, asked)

    plain = await send(session, decoder, COMPLETIONS, body)
    assert (failed.status, failed.json["error"]["message"]) == (500, "Internal server error")
    assert streamed.status == 200
    assert streamed.events[0]["error"]["code"] == 500
    assert (recomputed.status, recomputed.text) == (200, plain.text)
    assert decoder.books.held_blocks == 0


async def test_a_request_refused_after_parsing_frees_its_handle(session, prefiller, decoder):
    body = {"prompt": "Refused later", "max_tokens": 4}
    handle = await prefill(session, prefiller, COMPLETIONS, body)
    asked = body | {"max_tokens": 10**6, "kv_transfer_params": handle}

    answer = await send(session, decoder, COMPLETIONS, asked)

    assert answer.status == 400
    await until(lambda: prefiller.books.held_blocks == 0)


async def test_a_body_that_does_not_parse_frees_nothing(session, prefiller, decoder):
    body = {"prompt": "Refused at once", "max_tokens": 4}
    handle = await prefill(session, prefiller, COMPLETIONS, body)

    answer = await send(
        session, decoder, COMPLETIONS, body | {"max_tokens": "x", "kv_transfer_params": handle}
    )

    assert answer.status == 400
    assert prefiller.books.held_blocks == 1


async def test_a_queued_decode_keeps_its_handle_alive(session):
    busy = {"prompt": "Busy", "max_tokens": 60, "ignore_eos": True}
    body = {"prompt": "Waiting for its turn", "max_tokens": 4}
    async with (
        in_process(SimConfig(kv_lease_s=0.9)) as prefiller,
        in_process(SimConfig(kv_lease_s=0.9, max_num_seqs=1, decode_base_s=0.02)) as decoder,
    ):
        first = asyncio.create_task(send(session, decoder, COMPLETIONS, busy))
        await until(lambda: len(decoder.engine.running) == 1)
        handle = await prefill(session, prefiller, COMPLETIONS, body)

        answer = await send(session, decoder, COMPLETIONS, body | {"kv_transfer_params": handle})
        await first

        plain = await send(session, decoder, COMPLETIONS, body)
        assert answer.text == plain.text
        assert prefiller.engine.handles.counts.pulled == 1


async def test_n_choices_come_from_one_handle(session, prefiller, decoder):
    body = {"prompt": "Several answers", "max_tokens": 6, "n": 3, "temperature": 0.7, "seed": 1}
    plain = await send(session, decoder, COMPLETIONS, body)
    handle = await prefill(session, prefiller, COMPLETIONS, body | {"n": 1})

    split = await send(session, decoder, COMPLETIONS, body | {"kv_transfer_params": handle})

    assert [c["text"] for c in split.json["choices"]] == [c["text"] for c in plain.json["choices"]]
    assert len({c["text"] for c in split.json["choices"]}) == 3


async def test_one_handle_for_two_prompts_spoils_the_second(session, prefiller, decoder):
    body = {"prompt": ["First of the two", "Other of the two"], "max_tokens": 6}
    plain = await send(session, decoder, COMPLETIONS, body)
    handle = await prefill(session, prefiller, COMPLETIONS, body)

    split = await send(session, decoder, COMPLETIONS, body | {"kv_transfer_params": handle})

    same = [
        a["text"] == b["text"]
        for a, b in zip(split.json["choices"], plain.json["choices"], strict=True)
    ]
    assert same == [True, False]


def len_of(answer):
    return answer.json["usage"]["prompt_tokens"]
