"""Answers that are cut: decoders that give them back, and what the engines were asked next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.cases.scene import Scene
from tests.fakes import behaviours, toy
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.behaviours import Behaviour
from tests.fakes.client import Reply
from tests.fakes.engine import FakeEngine

# Too short to notice; pauses between rounds have a floor of their own.
HASTE = ("--retry-delay", "0", "--kv-queue", "off")

Event = dict[str, Any]
Edit = Callable[[list[Event]], list[Event]]


def cut_after(*counts: int, then: Behaviour = behaviours.decode) -> Behaviour:
    """Return what decoders do in turn: give back after so many tokens each, then `then`.

    Given to several decoders, it counts the requests of all.
    """
    return behaviours.one_after_another(*(behaviours.recompute(count) for count in counts), then)


def scripted(
    count: int, edit: Edit, finish_reason: str = "stop", stop_reason: str | None = "recomputed"
) -> Behaviour:
    """Return a decoder that streams `count` tokens as `edit` has their events."""

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        events = edit(behaviours.stream_events(request, count, finish_reason, stop_reason))
        await answer.start_stream()
        for event in events:
            await answer.event(event)
        await answer.chunk(behaviours.DONE)
        await answer.end()

    return behaviour


def in_order(engines: Iterable[FakeEngine]) -> list[EngineRequest]:
    """Return the generate calls of all engines as they came."""
    calls = [call for engine in engines for call in engine.calls]
    return sorted(
        (call for call in calls if call.path in behaviours.GENERATE_PATHS),
        key=lambda call: call.at_s,
    )


def prefills(stage: Scene) -> list[EngineRequest]:
    return in_order(stage.prefillers)


def decodes(stage: Scene) -> list[EngineRequest]:
    return in_order(stage.decoders)


def prefix_of(call: EngineRequest) -> list[int]:
    """Return the ids that the engine starts from, whatever form they came in."""
    (ids,) = toy.prompts(call.json)
    return ids


def limit_of(call: EngineRequest) -> int | None:
    return toy.token_limit(call.json)


def handle_of(call: EngineRequest) -> object:
    return call.json["kv_transfer_params"]


def ends(reply: Reply, index: int = 0) -> list[str]:
    """Return the finish reasons that a choice was given."""
    chunks = reply.chunks_of_json if is_stream(reply) else [reply.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [
        choice["finish_reason"]
        for choice in choices
        if choice["index"] == index and choice["finish_reason"] is not None
    ]


def usages(reply: Reply) -> list[dict[str, Any]]:
    """Return every usage of a stream, in order."""
    return [chunk["usage"] for chunk in reply.chunks_of_json if chunk.get("usage")]


def is_stream(reply: Reply) -> bool:
    return reply.headers["content-type"].startswith("text/event-stream")


def spoken(body: object, count: int, choice: int = 0) -> list[int]:
    """Return the ids of the uncut answer to a body."""
    assert isinstance(body, dict)
    return toy.speak(toy.prompts(body)[0], count, choice=choice)


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(toy.text_of, ids))
