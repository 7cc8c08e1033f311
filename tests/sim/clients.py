"""Small clients for the simulated engine's tests: requests, streams, one P/D pair."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import orjson

from pdproxy.sim.server import Sim

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Json = dict[str, Any]
ASK_HANDLE = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Json:
        return cast(Json, orjson.loads(self.raw))

    @property
    def events(self) -> list[Json]:
        """The JSON events of a stream; the end mark is checked and left out."""
        blocks = self.raw.split(b"\n\n")
        assert blocks[-2:] == [b"data: [DONE]", b""]
        return [orjson.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]

    @property
    def text(self) -> str:
        """The first choice's text, whole or streamed, chat or completions."""
        if self.headers["content-type"].startswith("text/event-stream"):
            choices = [c for e in self.events for c in e["choices"] if c["index"] == 0]
            return "".join(
                c.get("text") or c.get("delta", {}).get("content") or "" for c in choices
            )
        choice = self.json["choices"][0]
        return str(choice.get("text", choice.get("message", {}).get("content")))


async def send(
    session: aiohttp.ClientSession, sim: Sim, path: str, body: object, **headers: str
) -> Answer:
    async with session.post(sim.url + path, json=body, headers=headers) as response:
        names = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, names, await response.read())


async def prefill(session: aiohttp.ClientSession, sim: Sim, path: str, body: Json) -> Json:
    """The handle of a prefilled request."""
    short = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "min_tokens")}
    short |= {"max_tokens": 1, "kv_transfer_params": ASK_HANDLE}
    answer = await send(session, sim, path, short)
    assert answer.status == 200, answer.raw
    return cast(Json, answer.json["kv_transfer_params"])


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition, with a bound."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is the engine's own state
            await asyncio.sleep(0.005)
