"""What clients may do without harm to the engines: each is alive and idle after every test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.proxy import loads
from tests.fakes.waiting import until_answer
from tests.real_engines.engines import WITHIN_S
from tests.real_engines.exchange import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Lab, text

FOREIGN_HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "00000000-0000-0000-0000-000000000000",
    "remote_request_id": "cmpl-foreign-0",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
# The first two end a decoder that is given them; so does the last where there is no handle.
FORBIDDEN: list[Any] = [
    pytest.param({"kv_transfer_params": handle}, id=name)
    for name, handle in {
        "no block ids": {"do_remote_prefill": True},
        "no request id": {"do_remote_prefill": True, "remote_block_ids": [[1]]},
        "a foreign handle": FOREIGN_HANDLE,
        "a request for a handle": {"do_remote_decode": True},
        "a text": "text",
    }.items()
] + [pytest.param({"vllm_xargs": {"kv_transfer_params": ""}}, id="in engine arguments")]
LONG = 1500


@pytest.mark.parametrize("fields", FORBIDDEN)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_kv_handle_sent_by_a_client_reaches_no_engine(
    lab: Lab, fields: dict[str, Any], stream: bool
) -> None:
    for path, body in ((CHAT, lab.chat()), (COMPLETIONS, lab.completion())):
        clean = {**body, "stream": stream}
        reply = await lab.post(path, {**clean, **fields})

        assert reply.status == 200
        assert reply.text == (await lab.post(path, clean)).text


@pytest.mark.parametrize("fields", FORBIDDEN)
async def test_kv_handle_reaches_no_engine_where_the_decoder_computes_alone(
    lab: Lab, fields: dict[str, Any]
) -> None:
    echo = lab.completion(echo=True, logprobs=1, **fields)
    listed = lab.completion(prompt=[text(5), text(90)], **fields)
    model = lab.engines.model

    replies = [
        await lab.post(COMPLETIONS, echo),
        await lab.post(COMPLETIONS, listed),
        await lab.post(RESPONSES, {"model": model, "input": "Go on.", **fields}),
        await lab.post(MESSAGES, _message(lab, **fields)),
    ]

    assert [reply.status for reply in replies] == [200] * 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_client_that_leaves_frees_the_decoder(lab: Lab, path: str, stream: bool) -> None:
    make = lab.chat if path == CHAT else lab.completion
    body = make(max_tokens=LONG, ignore_eos=True, stream=stream)
    generated = await lab.engines.sum_on_decoders("vllm:generation_tokens_total")

    async with lab.asking(path, body) as peer:
        if stream:
            await peer.read_event(await peer.read_head(WITHIN_S), WITHIN_S)
        await until_answer(lab.engines.running_on_decoders, WITHIN_S)
        peer.leave("rst")

    await lab.engines.assert_idle()
    await until_answer(lambda: _is_quiet(lab), 5)
    now = await lab.engines.sum_on_decoders("vllm:generation_tokens_total")
    assert now - generated < LONG
    await lab.engines.assert_no_kv_cache_held()


async def test_twenty_streams_at_once_are_whole_and_exact(lab: Lab) -> None:
    usage = {"include_usage": True}
    bodies = [
        lab.chat(words=10 + 9 * count, stream=True, stream_options=usage, ignore_eos=True)
        for count in range(20)
    ]
    before = await lab.engines.prompt_tokens_by_source()

    answers = await asyncio.gather(*(lab.post(CHAT, body) for body in bodies))

    usages = [reply.chunks_of_json[-1]["usage"] for reply in answers]
    after = await lab.engines.prompt_tokens_by_source()
    assert [usage["completion_tokens"] for usage in usages] == [24] * 20
    assert after - before == {"external_kv_transfer": sum(u["prompt_tokens"] for u in usages)}
    await lab.engines.assert_no_kv_cache_held()


ERRORS: list[Any] = [
    pytest.param({"model": "no-such-model"}, 404, id="unknown model"),
    pytest.param({"temperature": -1}, 400, id="value out of range"),
    pytest.param({"max_tokens": 0}, 400, id="no output"),
    pytest.param({"max_tokens": "many"}, 400, id="wrong type"),
    pytest.param({"messages": None}, 400, id="no messages"),
    pytest.param({"max_tokens": 10_000_000}, 400, id="more output than context"),
    pytest.param({"n": 0}, 400, id="no choices"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fields", "status"), ERRORS)
async def test_refusal_of_an_engine_is_passed_on(
    lab: Lab, fields: dict[str, Any], status: int, stream: bool
) -> None:
    body = lab.chat(stream=stream, **fields)

    reply = await lab.post(CHAT, body)

    expected = await lab.plain(CHAT, body)
    assert (reply.status, expected.status) == (status, status)
    assert reply.error == expected.error


async def test_prompt_longer_than_the_context_is_the_engines_400(lab: Lab) -> None:
    body = lab.completion(prompt=[5] * (lab.engines.context_tokens + 1))

    reply = await lab.post(COMPLETIONS, body)

    expected = await lab.plain(COMPLETIONS, body)
    assert reply.status == expected.status == 400
    assert reply.error["type"] == expected.error["type"]


def _message(lab: Lab, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go on."}]
    return {"model": lab.engines.model, "messages": messages, "max_tokens": 8, **fields}


async def _is_quiet(lab: Lab) -> bool:
    return not any((await loads(lab.proxy)).values())
