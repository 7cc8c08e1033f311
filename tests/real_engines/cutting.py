"""Decoders that lose answers: real ones, behind a server that cuts what it is told to cut.

An upstream vLLM gives no answer back. One that was given back is made of an answer that a real
engine ended at a limit of just so many tokens: its parsers and its detokenizer have done then what
they do at an end, whatever the reason. Only the reason is changed, and a stream gets an event of
its own for it.

Source: vllm-ascend, `recompute_scheduler.py`: the terminal event has no new tokens.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from tests.fakes.ports import free_port
from tests.real_engines.engines import WITHIN_S
from tests.real_engines.exchange import CHAT, COMPLETIONS

JsonObject = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_COMPLETIONS_LIMIT = 16
_HOP_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_RESETTING = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The decoder gives the answer back after so many tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The decoder's connection is reset after so many tokens, or before a whole answer."""

    tokens: int


Cut = GivenBack | Lost


@dataclass(slots=True)
class Cutting:
    """What becomes of the next answers, of whichever decoder.

    Attributes:
        cuts: of the requests to come, in order; the answers of later ones stay whole.
        asked: path and body of each request, in order.
        made: the cuts that cut something; an answer may end before.
    """

    cuts: deque[Cut] = field(default_factory=deque)
    asked: list[tuple[str, JsonObject]] = field(default_factory=list)
    made: list[Cut] = field(default_factory=list)

    def begin(self, cuts: Sequence[Cut]) -> None:
        """Forget what was, and cut the next answers so."""
        self.cuts = deque(cuts)
        self.asked.clear()
        self.made.clear()


@asynccontextmanager
async def cutting_decoders(
    engines: Sequence[str], cutting: Cutting
) -> AsyncIterator[tuple[str, ...]]:
    """Serve in front of each engine; return the addresses."""
    async with AsyncExitStack() as stack:
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S))
        await stack.enter_async_context(session)
        servers = [_Server(engine, session, cutting) for engine in engines]
        yield tuple([await stack.enter_async_context(server.running()) for server in servers])


class _Server:
    """One decoder."""

    def __init__(self, engine: str, session: aiohttp.ClientSession, cutting: Cutting) -> None:
        self._engine = engine
        self._session = session
        self._cutting = cutting

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        port = free_port()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.method != "POST" or request.path not in (CHAT, COMPLETIONS):
            return await self._pass_on(request, raw)
        body: JsonObject = orjson.loads(raw)
        self._cutting.asked.append((request.path, body))
        cut = self._cutting.cuts.popleft() if self._cutting.cuts else None
        match cut:
            case GivenBack(tokens) if tokens < _limit(request.path, body):
                return await self._give_back(request, body, cut)
            case Lost():
                return await self._lose(request, body, cut)
            case _:
                return await self._pass_on(request, raw)

    def _ask(self, request: web.Request, body: bytes) -> Any:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        url = f"http://{self._engine}{request.raw_path}"
        return self._session.request(request.method, url, data=body or None, headers=headers)

    async def _pass_on(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self._ask(request, body) as answer:
            response = await _begun(request, answer)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _give_back(
        self, request: web.Request, body: JsonObject, cut: GivenBack
    ) -> web.StreamResponse:
        asked = orjson.dumps(_limited(body, max(1, cut.tokens)))
        async with self._ask(request, asked) as answer:
            if answer.status != web.HTTPOk.status_code:
                return web.Response(status=answer.status, body=await answer.read())
            ends = _Ends(body, cut)
            if not body.get("stream"):
                document = ends.of_whole(orjson.loads(await answer.read()))
                response: web.StreamResponse = web.json_response(document)
            else:
                response = await _begun(request, answer)
                async for event in _events(answer):
                    await response.write(event if event == _DONE else ends.of_event(event))
                await response.write_eof()
        if ends.is_cut:
            self._cutting.made.append(cut)
        return response

    async def _lose(self, request: web.Request, body: JsonObject, cut: Lost) -> web.StreamResponse:
        async with self._ask(request, orjson.dumps(body)) as answer:
            if not body.get("stream"):
                await answer.read()
                return self._reset(request, web.StreamResponse(), cut)
            response, tokens = await _begun(request, answer), 0
            async for event in _events(answer):
                tokens += 0 if event == _DONE else _count(orjson.loads(event[6:]))
                if tokens > cut.tokens:
                    return self._reset(request, response, cut)
                await response.write(event)
            await response.write_eof()
            return response

    def _reset(
        self, request: web.Request, response: web.StreamResponse, cut: Cut
    ) -> web.StreamResponse:
        self._cutting.made.append(cut)
        transport = request.transport
        if transport is not None:
            peer = transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETTING)
            transport.abort()
        return response


class _Ends:
    """Makes an end at a limit one of an answer that was given back."""

    def __init__(self, body: JsonObject, cut: GivenBack) -> None:
        self._tokens = cut.tokens
        self._shows_ids = body.get("return_token_ids") is True
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        is_held = stops and not body.get("include_stop_str_in_output")
        # So much text waits in an engine until the answer ends.
        self._held = max(map(len, stops)) - 1 if is_held else 0
        self.is_cut = False

    def of_whole(self, document: JsonObject) -> JsonObject:
        for choice in filter(self._is_end, document["choices"]):
            choice.update(self._end(choice))
            if self._tokens == 0:
                self._empty(choice)
        self._count(document)
        return document

    def _empty(self, choice: JsonObject) -> None:
        """Take out the one token that an engine makes at least."""
        said = choice.get("message", choice)
        nothing: JsonObject = {"text": "", "content": "", "reasoning": None, "tool_calls": []}
        said.update({name: value for name, value in nothing.items() if name in said})
        choice.update({"logprobs": None, "token_ids": [] if self._shows_ids else None})

    def of_event(self, event: bytes) -> bytes:
        chunk: JsonObject = orjson.loads(event[6:])
        self._count(chunk)
        if self._tokens == 0 and _count(chunk):
            last = [self._terminal(choice, "") for choice in chunk["choices"]]
            self.is_cut = True
            return _event({**chunk, "choices": last})
        if not any(self._is_end(choice) for choice in chunk["choices"]):
            return event if self._tokens else _event(chunk)
        held = "".join(self._take_held(choice) for choice in chunk["choices"])
        last = [self._terminal(choice, held) for choice in chunk["choices"]]
        for choice in chunk["choices"]:
            choice.update({"finish_reason": None, "stop_reason": None})
        return _event(chunk) + _event({**chunk, "choices": last})

    def _is_end(self, choice: JsonObject) -> bool:
        reason = choice.get("finish_reason")
        is_end = reason == "length" or (reason == "tool_calls" and not choice.get("stop_reason"))
        self.is_cut |= is_end
        return is_end

    def _end(self, choice: JsonObject) -> JsonObject:
        reason = choice.get("finish_reason")
        reason = "tool_calls" if reason == "tool_calls" else "stop"
        return {"finish_reason": reason, "stop_reason": "recomputed"}

    def _terminal(self, choice: JsonObject, held: str) -> JsonObject:
        last = {"index": choice["index"], "logprobs": None, **self._end(choice)}
        last |= {"token_ids": [] if self._shows_ids else None}
        if "delta" in choice:
            return {**last, "delta": {"content": held} if held else {}}
        return {**last, "text": held}

    def _take_held(self, choice: JsonObject) -> str:
        """Take off the text that the engine kept until the end."""
        said, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        text = said.get(name) or ""
        if not self._held or not text:
            return ""
        said[name] = text[: -self._held]
        return str(text[-self._held :])

    def _count(self, document: JsonObject) -> None:
        usage = document.get("usage")
        if usage and self._tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}


def _limit(path: str, body: JsonObject) -> float:
    limits = [body.get("max_completion_tokens") if path == CHAT else None, body.get("max_tokens")]
    given = [limit for limit in limits if limit is not None]
    if given:
        return float(given[0])
    return float("inf") if path == CHAT else _COMPLETIONS_LIMIT


def _limited(body: JsonObject, tokens: int) -> JsonObject:
    limited = {**body, "max_tokens": tokens}
    limited.pop("max_completion_tokens", None)
    if body.get("min_tokens"):
        limited["min_tokens"] = min(body["min_tokens"], tokens)
    return limited


def _count(chunk: JsonObject) -> int:
    """Return how many tokens an event tells of, at least one if it shows output."""
    tokens = 0
    for choice in chunk.get("choices", []):
        said = choice.get("delta", choice)
        names = ("text", "content", "reasoning", "reasoning_content", "tool_calls")
        shows = any(said.get(name) for name in names)
        tokens += len(choice.get("token_ids") or []) or shows
    return tokens


async def _begun(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_HEADERS}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    return response


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the events of a stream of vLLM: one `data` line each, then an empty one."""
    async for line in answer.content:
        if line.strip():
            yield line.rstrip() + b"\n\n"


def _event(chunk: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
