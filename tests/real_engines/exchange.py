"""The same request to the proxy and to the plain engine, and their answers made comparable."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import client
from tests.fakes.client import JSON_TYPE, RawClient, Reply, as_json, assert_whole_stream
from tests.fakes.proxy import ProxyProcess
from tests.real_engines.engines import WITHIN_S, Engines, ask

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

_WORDS = (
    "river stone cloud engine paper winter garden silver copper market bridge lantern anchor "
    "def return class import self value index number string while print lambda yield assert"
)


@dataclass(frozen=True, slots=True)
class Lab:
    """The proxy in front of real engines, and the engine it is compared with."""

    proxy: ProxyProcess
    engines: Engines

    def chat(self, words: int = 40, **fields: Any) -> dict[str, Any]:
        """Return a greedy chat request with a fresh prompt; `fields` are added or replaced."""
        messages = [
            {"role": "system", "content": text(words)},
            {"role": "user", "content": "Go on."},
        ]
        return {**self._greedy(), "messages": messages, **fields}

    def completion(self, words: int = 40, **fields: Any) -> dict[str, Any]:
        """Return a greedy completions request with a fresh prompt."""
        return {**self._greedy(), "prompt": text(words), **fields}

    def _greedy(self) -> dict[str, Any]:
        return {"model": self.engines.model, "temperature": 0, "max_tokens": 24}

    async def post(self, path: str, body: object) -> Reply:
        return await client.post(self.proxy.port, path, body, within_s=WITHIN_S)

    async def get(self, path: str) -> Reply:
        return await client.get(self.proxy.port, path)

    @asynccontextmanager
    async def asking(self, path: str, body: object) -> AsyncIterator[RawClient]:
        """Send a request and hand out its connection, to read from or to leave."""
        async with await RawClient.connect(self.proxy.port) as peer:
            await peer.send_request("POST", path, as_json(body), JSON_TYPE)
            yield peer

    async def plain(self, path: str, body: object) -> Reply:
        return await ask(self.engines.plain, "POST", path, body)

    async def assert_equal(self, path: str, body: dict[str, Any]) -> Answer:
        """Ask both the same, check that the proxy's answer equals the other; return it."""
        reply = await self.post(path, body)
        expected = answer_of(await self.plain(path, body))
        seen = answer_of(reply)
        if body.get("stream"):
            assert_whole_stream(reply)
        assert seen == expected
        return seen


def text(words: int) -> str:
    """Return a text that no engine has seen before, so that no cache of its prefix helps."""
    chosen = random.choices(_WORDS.split(), k=words)
    return " ".join([uuid.uuid4().hex, *chosen])


@dataclass(slots=True)
class Choice:
    """One choice of an answer, streamed or not."""

    text: str = ""
    finish_reason: str | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What must be the same with and without the proxy: all but ids, times and cache figures."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0


def answer_of(reply: Reply) -> Answer:
    """Return the answer in a chat or completions reply, streamed or not."""
    assert reply.status == 200, (reply.status, reply.body)
    answer = Answer()
    for document in _documents(reply):
        assert "error" not in document, document
        for choice in document["choices"]:
            _add(answer.choices.setdefault(choice["index"], Choice()), choice)
        usage = document.get("usage") or {}
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.completion_tokens = usage.get("completion_tokens", answer.completion_tokens)
    return answer


def _documents(reply: Reply) -> Iterable[dict[str, Any]]:
    if reply.headers["content-type"].startswith("text/event-stream"):
        return reply.chunks_of_json
    return [reply.json]


def _add(choice: Choice, piece: dict[str, Any]) -> None:
    said = piece.get("delta") or piece.get("message") or {}
    choice.text += piece.get("text") or said.get("content") or ""
    choice.finish_reason = piece.get("finish_reason") or choice.finish_reason
    choice.token_ids += piece.get("token_ids") or []
    for position, call in enumerate(said.get("tool_calls") or []):
        function = call["function"]
        known = choice.calls.setdefault(call.get("index", position), ["", ""])
        known[0] += function.get("name") or ""
        known[1] += function.get("arguments") or ""
    logprobs = piece.get("logprobs") or {}
    choice.tokens += logprobs.get("tokens") or []
    choice.tokens += [entry["token"] for entry in logprobs.get("content") or []]
