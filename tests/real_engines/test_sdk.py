"""The official SDK through the proxy to real engines."""

from __future__ import annotations

import openai
import pytest

from tests.fakes.waiting import until_answer
from tests.real_engines.engines import WITHIN_S
from tests.real_engines.exchange import CHAT, Lab


@pytest.fixture
def sdk(lab: Lab) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{lab.proxy.url}/v1", api_key="none", timeout=WITHIN_S, max_retries=0
    )


async def test_stream_of_the_sdk_equals_the_plain_answer(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    body = lab.chat()
    pieces: list[str] = []
    usage = None

    async with sdk:
        stream = await sdk.chat.completions.create(
            model=body["model"],
            messages=body["messages"],
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage

    expected = await lab.plain(CHAT, {**body, "stream": True})
    assert "".join(pieces) == expected.text
    assert usage is not None
    assert usage.completion_tokens == 24


async def test_sdk_raises_the_engines_error(lab: Lab, sdk: openai.AsyncOpenAI) -> None:
    async with sdk:
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            await sdk.completions.create(model="no-such-model", prompt="x")


async def test_stream_closed_by_the_sdk_frees_the_decoder(
    lab: Lab, sdk: openai.AsyncOpenAI
) -> None:
    body = lab.chat()
    async with sdk:
        stream = await sdk.chat.completions.create(
            model=body["model"],
            messages=body["messages"],
            max_tokens=1500,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        async for _ in stream:
            break
        await until_answer(lab.engines.running_on_decoders, 30)
        await stream.close()

    await lab.engines.assert_idle()
