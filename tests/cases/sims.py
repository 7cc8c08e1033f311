"""Simulated engines behind the real proxy, beside a plain one that gives the uncut answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdproxy.sim.cluster import in_process
from pdproxy.sim.config import SimConfig
from pdproxy.sim.server import Sim
from tests.fakes import client
from tests.fakes.client import DONE, Reply
from tests.fakes.proxy import HasPort, proxy_here
from tests.fakes.waiting import until

HASTE = ("--retry-delay", "0", "--kv-queue", "off", "--max-rounds", "20")


@dataclass(slots=True)
class Seen:
    """What a client makes of one choice."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ends: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Told:
    """What a client makes of an answer: its choices, its usage, and what went wrong."""

    choices: dict[int, Seen]
    usage: dict[str, int] | None
    errors: list[Any]


@dataclass(frozen=True, slots=True)
class Sims:
    """One prefiller, one decoder, the proxy, and an engine that never cuts."""

    proxy: HasPort
    prefiller: Sim
    decoder: Sim
    plain: Sim

    async def both(self, path: str, body: dict[str, Any]) -> tuple[Reply, Reply]:
        """Return the proxy's answer and the uncut one."""
        given = await client.post(self.proxy.port, path, body)
        return given, await client.post(self.plain.port, path, body)

    async def until_idle(self) -> None:
        """Wait until no engine holds anything."""
        await until(
            lambda: not (self.prefiller.books.held_blocks or self.decoder.books.held_blocks)
        )


@asynccontextmanager
async def sims(config: SimConfig, *args: str) -> AsyncIterator[Sims]:
    """Set the stage; `args` are further arguments of the command."""
    async with AsyncExitStack() as stack:
        prefiller, decoder, plain = [
            await stack.enter_async_context(in_process(config)) for _ in range(3)
        ]
        addresses = [f"127.0.0.1:{sim.port}" for sim in (prefiller, decoder)]
        here = proxy_here(addresses[:1], addresses[1:], *HASTE, *args)
        yield Sims(await stack.enter_async_context(here), prefiller, decoder, plain)


def told(reply: Reply) -> Told:
    """Read an answer as a client does, streamed or not."""
    assert reply.status == 200, reply.body
    assert b"recomputed" not in reply.body
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return _read([reply.json])
    chunks = reply.chunks_of_json
    if "error" not in chunks[-1]:
        assert reply.events.count(DONE) == 1
        assert reply.events[-1] == DONE
    heads = {(each["id"], each["created"], each["model"]) for each in chunks if "error" not in each}
    assert len(heads) == 1
    assert sum(each.get("usage") is not None for each in chunks if not each.get("choices")) <= 1
    return _read(chunks)


def _read(documents: Sequence[dict[str, Any]]) -> Told:
    choices: dict[int, Seen] = {}
    usage: dict[str, int] | None = None
    for document in documents:
        if document.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            usage = {name: document["usage"][name] for name in names}
        for choice in document.get("choices", []):
            _add(choices.setdefault(choice["index"], Seen()), choice)
    errors = [document["error"] for document in documents if document.get("error")]
    return Told(choices, usage, errors)


def _add(seen: Seen, choice: dict[str, Any]) -> None:
    said = choice.get("delta") or choice.get("message") or choice
    seen.content += said.get("content") or said.get("text") or ""
    seen.reasoning += said.get("reasoning") or ""
    seen.ids += choice.get("token_ids") or []
    seen.logprobs += _entries(choice.get("logprobs"))
    for place, call in enumerate(said.get("tool_calls") or []):
        known = seen.calls.setdefault(call.get("index", place), ["", ""])
        known[0] += call["function"].get("name") or ""
        known[1] += call["function"].get("arguments") or ""
    if choice["finish_reason"] is not None:
        seen.ends.append((choice["finish_reason"], choice.get("stop_reason")))


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """Return one entry for each token."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [_without_repeats(entry) for entry in logprobs["content"]]
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"])
    return list(zip(*columns, strict=True))


def _without_repeats(entry: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the simulated model gives twice: its alternatives may be the chosen token."""
    known = {each["token"]: each for each in entry["top_logprobs"]}
    return {**entry, "top_logprobs": known}
