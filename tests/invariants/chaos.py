"""Requests in all ways that end badly, for the invariants to be looked at afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from pdproxy.core.api import Api
from pdproxy.errors import PDProxyError
from pdproxy.upstream.limits import ClientLimits
from tests.dispatch.stage import FakeDownstream, Stage
from tests.fakes import behaviours
from tests.fakes.answer import event_bytes
from tests.fakes.behaviours import Behaviour

ROLE = event_bytes({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
WORD = event_bytes({"choices": [{"index": 0, "delta": {"content": "x"}, "text": "x"}]})
ERROR = event_bytes({"error": {"message": "no", "code": 500}})

PREFILLERS: Sequence[Behaviour] = (
    behaviours.prefill,
    behaviours.prefill,
    behaviours.late(0.01, behaviours.prefill),
    behaviours.json_answer({"choices": []}),
    behaviours.json_answer([]),
    behaviours.error(400),
    behaviours.error(429),
    behaviours.error(500),
    behaviours.close,
    behaviours.reset,
    behaviours.hang,
)
DECODERS: Sequence[Behaviour] = (
    behaviours.decode,
    behaviours.decode,
    behaviours.late(0.01, behaviours.decode),
    behaviours.error(400),
    behaviours.error(503, headers=[("Retry-After", "1")]),
    behaviours.error(500),
    behaviours.close,
    behaviours.reset,
    behaviours.hang,
    behaviours.stream([]),
    behaviours.stream([ROLE, ERROR]),
    behaviours.stream([ROLE], then="reset"),
    behaviours.stream([ROLE, WORD], then="close"),
    behaviours.stream([ROLE, WORD, ERROR]),
    behaviours.stream([ROLE, WORD], then="hang"),
)
# A kept connection that closes without an answer is tried once more on the same instance, which
# is one attempt seen twice; without kept ones, each attempt is one request.
NO_REUSE = ClientLimits(max_idle_per_endpoint=0)
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
LIST = {"model": "toy", "prompt": ["a", "b", "c"], "max_tokens": 3}


def at_random(rng: random.Random, choices: Sequence[Behaviour]) -> Behaviour:
    """An engine that behaves differently with each request."""

    async def behaviour(request: Any, answer: Any) -> None:
        await rng.choice(choices)(request, answer)

    return behaviour


async def one_request(play: Stage, rng: random.Random) -> FakeDownstream:
    """Make a request of any kind; its client may leave at any moment."""
    body = rng.choice((CHAT, LIST))
    api = Api.CHAT if body is CHAT else Api.COMPLETIONS
    asked = {**body, "stream": rng.random() < 0.6}
    downstream = FakeDownstream()
    running = asyncio.get_running_loop().create_task(play.run(downstream, asked, api))
    await asyncio.wait({running}, timeout=rng.choice((0.005, 0.02, 0.05, 0.3)))
    running.cancel()
    (outcome,) = await asyncio.gather(running, return_exceptions=True)
    expected = (FakeDownstream, PDProxyError, asyncio.CancelledError)
    assert isinstance(outcome, expected), repr(outcome)
    return downstream
