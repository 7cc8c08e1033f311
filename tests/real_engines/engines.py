"""The engines that an operator names: where they are, and what they tell of themselves."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import aiohttp
import pytest

from tests.fakes.client import Reply
from tests.fakes.waiting import until_answer

PREFILLERS = "PDPROXY_REAL_PREFILLERS"
DECODERS = "PDPROXY_REAL_DECODERS"
PLAIN = "PDPROXY_REAL_PLAIN"

WITHIN_S = 180.0
# An engine that gave up a request shows it in its gauges after its next step.
IDLE_WITHIN_S = 30.0
PULLED_WITHIN_S = 20.0

_SAMPLE = re.compile(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_SOURCE = re.compile(r'source="(\w+)"')


@dataclass(frozen=True, slots=True)
class Engines:
    """Addresses as `host:port`.

    Attributes:
        prefillers: engines that fill KV caches for others.
        decoders: engines that pull them.
        plain: an engine of the same model without any KV connector; its answers are the reference.
        model: the name under which all of them serve the model.
        context_tokens: the longest prompt and answer together that the model takes.
    """

    prefillers: Sequence[str]
    decoders: Sequence[str]
    plain: str
    model: str
    context_tokens: int

    @classmethod
    async def from_environment(cls) -> Self:
        """Read the addresses from the environment, and the model from the plain engine."""
        missing = [name for name in (PREFILLERS, DECODERS, PLAIN) if not os.environ.get(name)]
        if missing:
            pytest.fail(f"--real-engines needs {', '.join(missing)} in the environment")
        plain = os.environ[PLAIN].strip()
        model = (await get_json(plain, "/v1/models"))["data"][0]
        return cls(
            prefillers=_addresses(PREFILLERS),
            decoders=_addresses(DECODERS),
            plain=plain,
            model=model["id"],
            context_tokens=model["max_model_len"],
        )

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.prefillers, *self.decoders, self.plain)

    async def assert_alive(self) -> None:
        """Fail unless each engine answers /health with 200; a dead one must be started again."""
        health = {engine: await _health(engine) for engine in self.all}
        assert set(health.values()) == {200}, health

    async def assert_idle(self) -> None:
        """Wait until no engine has a request running or waiting."""
        for engine in self.all:
            await until_answer(partial(_is_idle, engine), IDLE_WITHIN_S)

    async def assert_no_kv_cache_held(self) -> None:
        """Wait until no engine holds KV cache: every handle was pulled.

        The bound is below the lease after which an engine gives up a handle (30 s in vLLM).
        """
        for engine in self.all:
            await until_answer(partial(_holds_nothing, engine), PULLED_WITHIN_S)

    async def prompt_tokens_by_source(self) -> Counter[str]:
        """Return where all decoders together had the KV cache of their prompt tokens from.

        Keys are vLLM's: `local_compute`, `local_cache_hit`, `external_kv_transfer`.
        """
        total: Counter[str] = Counter()
        for engine in self.decoders:
            for name, labels, value in await samples(engine):
                if name == "vllm:prompt_tokens_by_source_total":
                    total[_SOURCE.findall(labels)[0]] += int(value)
        assert total.keys() >= {"local_compute", "external_kv_transfer"}, (
            "the decoders do not tell where prompt tokens come from; is their vLLM too old?"
        )
        return total

    async def running_on_decoders(self) -> float:
        return await self.sum_on_decoders("vllm:num_requests_running")

    async def sum_on_decoders(self, metric: str) -> float:
        return sum([await total_of(engine, metric) for engine in self.decoders])


def _addresses(name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in os.environ[name].split(",") if part.strip())


async def ask(
    engine: str,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Ask an engine directly and read its whole answer."""
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(
            method, f"http://{engine}{path}", json=body, headers=headers or {}
        ) as answer,
    ):
        pairs = list(answer.headers.items())
        return Reply(answer.status, pairs, await answer.read(), ended=True)


async def get_json(engine: str, path: str) -> Any:
    reply = await ask(engine, "GET", path)
    assert reply.status == 200, (engine, path, reply.status)
    return reply.json


async def samples(engine: str) -> list[tuple[str, str, float]]:
    """Return name, labels and value of the engine's own metrics."""
    page = (await ask(engine, "GET", "/metrics")).body.decode()
    return [(name, labels, float(value)) for name, labels, value in _SAMPLE.findall(page)]


async def total_of(engine: str, metric: str) -> float:
    return sum(value for name, _, value in await samples(engine) if name == metric)


async def _health(engine: str) -> int | str:
    try:
        return (await ask(engine, "GET", "/health")).status
    except aiohttp.ClientError as error:
        return type(error).__name__


async def _is_idle(engine: str) -> bool:
    running = await total_of(engine, "vllm:num_requests_running")
    waiting = await total_of(engine, "vllm:num_requests_waiting")
    return running == waiting == 0


async def _holds_nothing(engine: str) -> bool:
    return await total_of(engine, "vllm:kv_cache_usage_perc") == 0
