"""A case's stage: fake prefillers and decoders with the real proxy between them and the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes import client
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import RawClient, Reply
from tests.fakes.engine import FakeEngine
from tests.fakes.proxy import HasPort, assert_quiescent, proxy_here, running_proxy

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Headers = Iterable[tuple[str, str]]


def chat(**fields: Any) -> dict[str, Any]:
    """Return a small chat request; `fields` are added or replaced."""
    return {"model": "toy", "messages": [{"role": "user", "content": "Bonjour"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    """Return a small completions request; `fields` are added or replaced."""
    return {"model": "toy", "prompt": "Il était une fois", **fields}


@dataclass(frozen=True, slots=True)
class Scene:
    """What a case plays on: `p1` and `d1` are the first of each role."""

    proxy: HasPort
    prefillers: Sequence[FakeEngine]
    decoders: Sequence[FakeEngine]

    @property
    def port(self) -> int:
        return self.proxy.port

    @property
    def p1(self) -> FakeEngine:
        return self.prefillers[0]

    @property
    def p2(self) -> FakeEngine:
        return self.prefillers[1]

    @property
    def d1(self) -> FakeEngine:
        return self.decoders[0]

    @property
    def d2(self) -> FakeEngine:
        return self.decoders[1]

    @property
    def prefill_calls(self) -> int:
        return sum(len(engine.calls) for engine in self.prefillers)

    @property
    def decode_calls(self) -> int:
        return sum(len(engine.calls) for engine in self.decoders)

    async def post(self, path: str, body: object, headers: Headers = ()) -> Reply:
        return await client.post(self.port, path, body, headers)

    async def get(self, path: str, headers: Headers = ()) -> Reply:
        return await client.get(self.port, path, headers)

    def streaming(
        self, body: object, path: str = CHAT, headers: Headers = ()
    ) -> AbstractAsyncContextManager[tuple[RawClient, Reply]]:
        return client.streaming(self.port, path, body, headers)

    async def assert_quiescent(self) -> None:
        await assert_quiescent(self.proxy, *self.prefillers, *self.decoders)


@asynccontextmanager
async def scene(
    p: Sequence[Behaviour | None] = (None,),
    d: Sequence[Behaviour | None] = (None,),
    *args: str,
    process: bool = False,
    env: Mapping[str, str] | None = None,
    exit_code: int = 0,
) -> AsyncIterator[Scene]:
    """Set the stage: an engine per behaviour (None for a healthy one) and a ready proxy.

    Args:
        p: behaviours of the prefillers.
        d: behaviours of the decoders.
        args: further arguments of the command.
        process: run the command as a process of its own.
        env: its environment variables, beside the test's own for a process.
        exit_code: what a process has to end with.
    """
    async with AsyncExitStack() as stack:
        prefillers = [await stack.enter_async_context(FakeEngine("prefill", b)) for b in p]
        decoders = [await stack.enter_async_context(FakeEngine("decode", b)) for b in d]
        proxy: HasPort
        if process:
            running = running_proxy(prefillers, decoders, *args, env=env, exit_code=exit_code)
            proxy = await stack.enter_async_context(running)
        else:
            here = proxy_here(prefillers, decoders, *args, env=env)
            proxy = await stack.enter_async_context(here)
        yield Scene(proxy, prefillers, decoders)
