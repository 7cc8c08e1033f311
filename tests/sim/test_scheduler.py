"""The engine under load, over real sockets: memory, queue, aborts, delays."""

import asyncio

import aiohttp
import pytest

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from tests.sim.clients import CHAT, COMPLETIONS, prefill, send, until

PROMPT = "Some words to begin with, and a few more"


def completion(text=PROMPT, **fields):
    return {"prompt": text, "max_tokens": 40, "ignore_eos": True} | fields


def finish(answer):
    choice = answer.json["choices"][0]
    return choice["finish_reason"], choice["stop_reason"]


async def test_when_blocks_run_out_the_newest_request_is_recomputed(session):
    # Two prompts of one block each; both answers together need more than the six blocks.
    async with in_process(SimConfig(num_blocks=6, decode_base_s=0.005)) as sim:
        older = asyncio.create_task(send(session, sim, COMPLETIONS, completion(max_tokens=70)))
        await until(lambda: len(sim.engine.running) == 1)
        newer = await send(session, sim, COMPLETIONS, completion("Newer " + PROMPT, max_tokens=70))
        first = await older

        assert finish(newer) == ("stop", "recomputed")
        assert finish(first) == ("length", None)
        assert 0 < newer.json["usage"]["completion_tokens"] < 70
        assert sim.engine.counters.preemptions == 1
        assert sim.books.held_blocks == 0


async def test_a_recomputed_answer_goes_on_seamlessly_from_its_ids(session, decoder):
    plain = await send(session, decoder, COMPLETIONS, completion(return_token_ids=True))
    decoder.faults.recompute_after = [13]
    cut = await send(session, decoder, COMPLETIONS, completion(return_token_ids=True))
    choice = cut.json["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]

    rest = await send(session, decoder, COMPLETIONS, completion(ids, max_tokens=40 - 13))

    assert finish(cut) == ("stop", "recomputed")
    assert len(choice["token_ids"]) == 13
    assert cut.text + rest.text == plain.text


async def test_a_recomputed_chat_answer_goes_on_from_an_open_turn(session, decoder):
    messages = [{"role": "user", "content": "Tell me something"}]
    body = {"messages": messages, "max_tokens": 40, "ignore_eos": True}
    plain = await send(session, decoder, CHAT, body)
    decoder.faults.recompute_after = [17]
    cut = await send(session, decoder, CHAT, body | {"stream": True})
    opened = [*messages, {"role": "assistant", "content": cut.text}]

    rest = await send(
        session, decoder, CHAT, body | {
            "messages": opened, "continue_final_message": True, "add_generation_prompt": False,
            "max_tokens": 40 - 17,
        },
    )  # fmt: skip

    last = cut.events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "recomputed")
    assert plain.text.startswith(cut.text + rest.text)


async def test_a_prompt_that_can_never_fit_is_refused(session):
    async with in_process(SimConfig(num_blocks=2)) as sim:
        answer = await send(session, sim, COMPLETIONS, {"prompt": list(range(300, 340))})

    assert answer.status == 400
    assert answer.json["error"]["param"] == "input_tokens"


async def test_requests_beyond_the_batch_wait_their_turn(session):
    async with in_process(SimConfig(max_num_seqs=2, decode_base_s=0.008)) as sim:
        sending = [
            asyncio.create_task(send(session, sim, COMPLETIONS, completion(f"{i} {PROMPT}")))
            for i in range(6)
        ]
        await until(lambda: len(sim.engine.running) == 2 and len(sim.engine.waiting) == 4)
        answers = await asyncio.gather(*sending)

    assert [finish(answer) for answer in answers] == [("length", None)] * 6


async def test_a_full_queue_answers_503(session):
    config = SimConfig(max_num_seqs=1, max_queued_requests=1, decode_base_s=0.012)
    async with in_process(config) as sim:
        sending = [asyncio.create_task(send(session, sim, COMPLETIONS, completion()))]
        await until(lambda: len(sim.engine.running) == 1)
        sending.append(asyncio.create_task(send(session, sim, COMPLETIONS, completion())))
        await until(lambda: len(sim.engine.waiting) == 1)

        refused = await send(session, sim, COMPLETIONS, completion())
        await asyncio.gather(*sending)

    assert (refused.status, refused.json["error"]["code"]) == (503, 503)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_frees_everything(stream, n):
    async with in_process(SimConfig(decode_base_s=0.005)) as sim:
        async with aiohttp.ClientSession() as session:
            body = completion(max_tokens=2000, stream=stream, n=n)
            task = asyncio.create_task(send(session, sim, COMPLETIONS, body))
            await until(lambda: len(sim.engine.running) == n)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await until(lambda: sim.books.held_blocks == 0 and not sim.engine.running)
        assert sim.engine.counters.finished["abort"] == n
        assert sim.node.in_flight == 0


async def test_a_client_that_leaves_the_queue_is_forgotten(session):
    async with in_process(SimConfig(max_num_seqs=1, decode_base_s=0.012)) as sim:
        first = asyncio.create_task(send(session, sim, COMPLETIONS, completion()))
        await until(lambda: len(sim.engine.running) == 1)
        second = asyncio.create_task(send(session, sim, COMPLETIONS, completion()))
        await until(lambda: len(sim.engine.waiting) == 1)
        second.cancel()

        await until(lambda: not sim.engine.waiting)
        assert finish(await first) == ("length", None)


async def test_a_prefill_takes_longer_by_its_uncached_tokens(session):
    prompt = list(range(300, 300 + 320))
    loop = asyncio.get_running_loop()
    async with in_process(SimConfig(prefill_base_s=0.01, prefill_per_token_s=0.0005)) as sim:
        body = {"prompt": prompt, "max_tokens": 1}
        began_s = loop.time()
        await send(session, sim, COMPLETIONS, body)
        cold_s = loop.time() - began_s
        again = await send(session, sim, COMPLETIONS, body)

    assert cold_s >= 0.01 + 320 * 0.0005
    assert again.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 304}


async def test_tokens_come_as_they_are_made(session):
    async with in_process(SimConfig(decode_base_s=0.02)) as sim:
        body = completion(max_tokens=2000, stream=True)
        async with session.post(sim.url + COMPLETIONS, json=body) as response:
            for _ in range(3):
                block = await response.content.readuntil(b"\n\n")
                assert block.startswith(b"data: {")
            generation = sim.engine.running[0].generation
            assert generation is not None
            written = len(generation.output)

    assert 3 <= written < 100


async def test_pinned_blocks_hold_up_the_queue_until_the_lease_ends(session):
    async with in_process(SimConfig(num_blocks=4, kv_lease_s=0.2)) as sim:
        prompt = list(range(300, 348))
        await prefill(session, sim, COMPLETIONS, {"prompt": prompt})
        assert sim.books.held_blocks == 3

        answer = await send(session, sim, COMPLETIONS, {"prompt": prompt[::-1], "max_tokens": 1})

    assert answer.status == 200
    assert sim.engine.handles.counts.expired == 1


async def test_a_lease_ends_on_an_engine_with_nothing_else_to_do(session):
    async with in_process(SimConfig(kv_lease_s=0.1)) as sim:
        await prefill(session, sim, COMPLETIONS, {"prompt": list(range(300, 348))})
        assert sim.books.held_blocks == 3

        await until(lambda: sim.books.held_blocks == 0)


async def test_several_tokens_can_come_in_one_event(session):
    async with in_process(SimConfig(tokens_per_step=4)) as sim:
        body = completion(max_tokens=10, stream=True, return_token_ids=True)
        answer = await send(session, sim, COMPLETIONS, body)

    assert [len(e["choices"][0]["token_ids"]) for e in answer.events] == [4, 4, 2]


async def test_two_hundred_streams_at_once(decoder):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies = [completion(f"{i} words", stream=True, max_tokens=20) for i in range(200)]
        answers = await asyncio.gather(*(send(session, decoder, COMPLETIONS, b) for b in bodies))

    assert [len(answer.events) for answer in answers] == [20] * 200
    assert decoder.books.held_blocks == 0
    decoder.books.verify()
