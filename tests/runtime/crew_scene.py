"""A proxy of several workers on a stage of fake engines, and streams that run until let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

from tests.cases.scene import CHAT, Scene, chat, scene
from tests.fakes import behaviours, client
from tests.fakes.answer import Answer, EngineRequest
from tests.fakes.client import Reply
from tests.fakes.proxy import ProxyProcess
from tests.fakes.waiting import until
from tests.fakes.wire import PeerGone

START_S = 30.0
TICK_S = 0.02


class Gate:
    """A decoder's behaviour: a word every tick, until it is let go."""

    def __init__(self) -> None:
        self.is_open = False

    async def __call__(self, request: EngineRequest, answer: Answer) -> None:
        events = behaviours.stream_events(request, 2, "length")
        await answer.start_stream()
        await answer.event(events[0])
        while not self.is_open:
            await answer.event(events[1])
            await asyncio.sleep(TICK_S)
        for event in events[2:]:
            await answer.event(event)
        await answer.chunk(behaviours.DONE)
        await answer.end()


def workers_of(proxy: ProxyProcess) -> list[int]:
    found = Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()
    return [int(pid) for pid in found]


async def until_serving(proxy: ProxyProcess, count: int) -> None:
    await until(lambda: proxy.log_text().count("client connections at once") >= count, START_S)


@asynccontextmanager
async def crew(
    count: int = 2,
    decoders: int = 2,
    gate: Gate | None = None,
    *args: str,
    exit_code: int = 0,
) -> AsyncIterator[Scene]:
    """Run a proxy of some workers, all of which serve."""
    flags = ("--workers", str(count))
    behaviours_ = (gate,) * decoders
    async with scene(
        (None,), behaviours_, *flags, *args, process=True, exit_code=exit_code
    ) as made:
        await until_serving(process(made), count)
        # Until all serve, those that do accept from the sockets of the others, too.
        await process(made).wait_for_log(f" and {count} workers", START_S)
        yield made


def process(made: Scene) -> ProxyProcess:
    assert isinstance(made.proxy, ProxyProcess)
    return made.proxy


class Stream:
    """A streamed request that runs."""

    def __init__(self, made: Scene) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(made.port))
        self.reply: Reply | None = None
        self.is_broken = False

    async def _run(self, port: int) -> None:
        body = chat(stream=True, max_tokens=2)
        try:
            async with client.streaming(port, CHAT, body) as (connection, self.reply):
                await connection.read_rest(self.reply, 60.0)
        except (PeerGone, OSError):
            self.is_broken = True
        self.is_broken = self.is_broken or self.reply is None or not self.reply.ended

    @property
    def has_begun(self) -> bool:
        return self.reply is not None and len(self.reply.chunks) > 0

    async def end(self) -> Reply:
        await self._task
        assert self.reply is not None
        return self.reply

    @property
    def largest_gap_s(self) -> float:
        assert self.reply is not None
        times = [at for at, _ in self.reply.chunks]
        return max(after - before for before, after in pairwise(times))


async def begin(made: Scene, count: int) -> list[Stream]:
    streams = [Stream(made) for _ in range(count)]
    await until(lambda: all(each.has_begun or each.is_broken for each in streams), 30.0)
    assert not any(each.is_broken for each in streams)
    return streams


async def is_refused(port: int) -> bool:
    try:
        await client.get(port, "/health")
    except ConnectionRefusedError:
        return True
    except (PeerGone, OSError):
        return False
    return False
