"""The official OpenAI SDK, asynchronous: many at once, and leaving at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from pdproxy.sim.config import SimConfig
from tests.clients import asked
from tests.clients.asked import ALL, Asked, chat, endless, lasting, says, text_of
from tests.clients.lab import HOST, MODEL, Lab, everything
from tests.fakes.ports import refusing_port
from tests.fakes.waiting import until

AT_ONCE = 200
TOKENS = 16


def sdk(url: str, **options: Any) -> AsyncOpenAI:
    """Return a client that neither tries again by itself nor heeds proxies of the environment."""
    # Without TLS there is nothing to verify, and certificates take long to load.
    http = DefaultAsyncHttpxClient(trust_env=False, verify=False)
    # Its own limit of 5 s for a connection is too tight for 200 at once on a busy machine.
    settings: dict[str, Any] = {"api_key": "sk-test", "max_retries": 0, "timeout": 60}
    settings |= {"http_client": http, **options}
    return AsyncOpenAI(base_url=f"{url}/v1", **settings)


@pytest.fixture
async def client(lab: Lab) -> AsyncIterator[AsyncOpenAI]:
    async with sdk(lab.url) as client:
        yield client


@pytest.fixture
async def plain(lab: Lab) -> AsyncIterator[AsyncOpenAI]:
    async with sdk(lab.plain.url) as client:
        yield client


async def chunks_of(client: AsyncOpenAI, request: Asked, **more: Any) -> list[Any]:
    return [chunk async for chunk in await request.create(client, stream=True, **more)]


async def has_settled(lab: Lab) -> None:
    """Wait until the engines are free and the proxy's load reads zero."""
    await until(lambda: not lab.left_behind())


# --- answers


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
async def test_answer_and_stream_are_the_plain_engines(
    client: AsyncOpenAI, plain: AsyncOpenAI, request_: Asked
) -> None:
    answer = await request_.create(client)
    stream = await request_.create(client, **asked.USAGE_IN_STREAM)
    last = [chunk async for chunk in stream][-1]

    expected = await request_.create(plain)
    assert lasting(answer) == lasting(expected)
    assert lasting(last.usage) == lasting(expected.usage)


async def test_everything_asked_at_once_is_answered_as_alone(
    client: AsyncOpenAI, plain: AsyncOpenAI
) -> None:
    answers = await asyncio.gather(*(request.create(client) for request in ALL.values()))

    for request, answer in zip(ALL.values(), answers, strict=True):
        assert lasting(answer) == lasting(await request.create(plain))


async def test_models_embeddings_and_responses(client: AsyncOpenAI, plain: AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    embedded = await client.embeddings.create(model=MODEL, input=["un", "deux"])
    response = await client.responses.create(model=MODEL, input="Oui", max_output_tokens=4)

    assert models == [MODEL]
    assert lasting(embedded) == lasting(
        await plain.embeddings.create(model=MODEL, input=["un", "deux"])
    )
    assert response.output_text
    assert response.usage
    assert response.usage.output_tokens == 4


async def test_request_id_is_in_the_answer(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=says("Bonjour"),  # type: ignore[arg-type] # plain data
        max_completion_tokens=2,
        extra_headers={"X-Request-Id": "mine-2"},
    )

    assert raw.headers["x-request-id"] == "mine-2"


# --- many at once


@pytest.mark.slow
async def test_two_hundred_streams_at_once_are_complete() -> None:
    requests = [
        chat(f"Question {number}", max_completion_tokens=TOKENS, **asked.EXACT)
        for number in range(AT_ONCE)
    ]
    options = {"stream_options": {"include_usage": True}}

    # In this loop: two threads that are busy take the interpreter from each other.
    async with (
        everything(asyncio.get_running_loop(), SimConfig()) as lab,
        sdk(lab.url) as client,
        sdk(lab.plain.url) as plain,
    ):
        streams = await asyncio.gather(*(chunks_of(client, r, **options) for r in requests))
        await has_settled(lab)
        expected = await asyncio.gather(*(request.create(plain) for request in requests))
        prefilled, decoded = (
            [len(e.requests) for e in es] for es in (lab.prefillers, lab.decoders)
        )
        wrong = sum(engine.engine.counters.wrong_transfers for engine in lab.decoders)

    for chunks, whole in zip(streams, expected, strict=True):
        assert text_of(chunks) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == TOKENS
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert sum(prefilled) == sum(decoded) == AT_ONCE
    assert min(prefilled + decoded) > AT_ONCE / 4
    assert wrong == 0


# --- errors by class


async def test_errors_have_their_classes(lab: Lab, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await chat(max_completion_tokens=-1).create(client)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="Oui")
    for engine in lab.decoders:
        engine.faults.status = [429]
        engine.faults.retry_after_s = 3
    with pytest.raises(openai.RateLimitError) as busy:
        await chunks_of(client, chat())
    for engine in lab.decoders:
        engine.faults.status = [503] * 3
        engine.faults.retry_after_s = None
    with pytest.raises(openai.InternalServerError) as broken:
        await chat().create(client)

    assert busy.value.response.headers["retry-after"] == "3"
    assert broken.value.status_code == 503


async def test_wrong_key_is_no_authentication(lab: Lab) -> None:
    with lab.another_proxy("--api-key", "sk-right") as worker:
        async with sdk(f"http://{HOST}:{worker.port}", api_key="sk-wrong") as wrong:
            with pytest.raises(openai.AuthenticationError):
                await chunks_of(wrong, chat())


async def test_nobody_listening_is_a_connection_error() -> None:
    with refusing_port() as port:
        async with sdk(f"http://{HOST}:{port}") as client:
            with pytest.raises(openai.APIConnectionError):
                await chat().create(client)


async def test_failure_in_a_stream_is_raised(lab: Lab, client: AsyncOpenAI) -> None:
    for engine in lab.decoders:
        engine.faults.error_after = [5]

    with pytest.raises(openai.APIError) as found:
        await chunks_of(client, chat(**asked.EXACT))

    assert not isinstance(found.value, openai.APIStatusError)


async def test_pause_that_the_engine_asks_for_is_kept_by_the_sdk(lab: Lab) -> None:
    async with sdk(lab.url, max_retries=2) as patient:
        for engine in lab.decoders:
            engine.faults.status = [429]
            engine.faults.retry_after_s = 1
        started_s = asyncio.get_running_loop().time()

        answer = await chat().create(patient)

        waited_s = asyncio.get_running_loop().time() - started_s
    assert answer.choices[0].message.content
    assert waited_s >= 0.9


# --- leaving


@pytest.fixture
async def slow_lab() -> AsyncIterator[Lab]:
    """A lab in this loop that takes minutes for an endless answer, and little of the machine."""
    config = SimConfig(decode_base_s=0.02)
    async with everything(asyncio.get_running_loop(), config) as lab:
        yield lab
        await has_settled(lab)


@pytest.fixture
async def slow_client(slow_lab: Lab) -> AsyncIterator[AsyncOpenAI]:
    async with sdk(slow_lab.url) as client:
        yield client


async def test_stream_closed_early_frees_the_engine(
    slow_lab: Lab, slow_client: AsyncOpenAI
) -> None:
    stream = await endless().create(slow_client, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert slow_lab.running() == 1

    await stream.close()

    await has_settled(slow_lab)


async def test_cancelled_answer_frees_the_engine(slow_lab: Lab, slow_client: AsyncOpenAI) -> None:
    asking = asyncio.get_running_loop().create_task(endless().create(slow_client))
    await until(slow_lab.running)

    asking.cancel()
    await asyncio.wait({asking})

    assert asking.cancelled()
    await has_settled(slow_lab)


async def test_cancelled_streams_free_the_engines_together(
    slow_lab: Lab, slow_client: AsyncOpenAI
) -> None:
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(chunks_of(slow_client, endless())) for _ in range(50)]

    try:
        await until(lambda: slow_lab.running() == len(tasks), 30)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    await has_settled(slow_lab)
    assert all(task.cancelled() for task in tasks)


async def test_cancel_at_any_moment_frees_the_engine(
    slow_lab: Lab, slow_client: AsyncOpenAI
) -> None:
    loop = asyncio.get_running_loop()
    for number in range(30):
        request = endless() if number % 2 else chat(n=2)
        task = loop.create_task(chunks_of(slow_client, request))
        await asyncio.wait({task}, timeout=number / 1000)
        task.cancel()
        await asyncio.wait({task})

    await has_settled(slow_lab)
