"""CPU per small POST of the engine client and of aiohttp's, against one trivial server.

The server is another process, so that process time is the client's alone. Rounds alternate, the
lowest of each client counts. Run: python benchmarks/micro_upstream.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Awaitable, Callable
from typing import cast

import aiohttp
import uvloop

from pdproxy.core.instance import Endpoint
from pdproxy.upstream.client import ClientLimits, EngineClient, Timeouts

BODY = b'{"model": "m", "prompt": "' + b"x" * 900 + b'", "max_tokens": 16}'
ANSWER_BODY = b'{"id": "1", "choices": [{"text": "' + b"y" * 900 + b'"}]}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
) % (len(ANSWER_BODY), ANSWER_BODY)
EVENT = b"data: " + b"z" * 190 + b"\n\n"
STREAM_EVENTS = 200
HEADERS = [
    ("content-type", "application/json"),
    ("x-request-id", "0123456789abcdef0123456789abcdef"),
    ("accept", "*/*"),
]
TIMEOUTS = Timeouts(connect_s=5, head_s=30, idle_s=30)

Post = Callable[[], Awaitable[object]]
Stream = Callable[[], Awaitable[int]]


class Server(asyncio.Protocol):
    """Answers each request once its body is there; a streaming one with spaced events."""

    def __init__(self) -> None:
        self.pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[explicit-override]  # typing has it from 3.12 on
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:  # type: ignore[explicit-override]  # typing has it from 3.12 on
        self.pending += data
        if not self.pending.endswith(BODY):
            return
        is_stream = self.pending.startswith(b"POST /stream")
        self.pending = b""
        if not is_stream:
            self.transport.write(ANSWER)
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.next_event(STREAM_EVENTS)

    def next_event(self, count: int) -> None:
        if not count:
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        asyncio.get_running_loop().call_later(0.005, self.next_event, count - 1)


def serve(ready: multiprocessing.connection.Connection) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Server, "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


class Count:
    """Counts reads of a body."""

    def __init__(self, done: asyncio.Future[int]) -> None:
        self.done = done
        self.reads = 0

    def body_received(self, data: bytes) -> None:
        self.reads += 1

    def body_ended(self) -> None:
        self.done.set_result(self.reads)

    def body_failed(self, error: Exception) -> None:
        self.done.set_exception(error)


async def cpu_us(post: Post, count: int, concurrency: int) -> float:
    """Return microseconds of CPU per call of `post`."""

    async def worker(calls: int) -> None:
        for _ in range(calls):
            await post()

    begin_s = time.process_time()
    await asyncio.gather(*(worker(count // concurrency) for _ in range(concurrency)))
    return (time.process_time() - begin_s) / count * 1e6


async def cpu_us_per_read(stream: Stream, concurrency: int) -> float:
    """Return microseconds of CPU per read: a busy machine joins several events in one."""
    begin_s = time.process_time()
    reads = await asyncio.gather(*(stream() for _ in range(concurrency)))
    return (time.process_time() - begin_s) / sum(reads) * 1e6


async def measure(port: int, rounds: int, count: int) -> None:
    endpoint = Endpoint.of("127.0.0.1", port)
    url = f"http://127.0.0.1:{port}"
    client = EngineClient(ClientLimits())
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=dict(HEADERS)) as session:

        async def ours() -> bytes:
            response = await client.send(
                endpoint, "POST", "/v1/completions", HEADERS, BODY, timeouts=TIMEOUTS
            )
            return await response.read()

        async def theirs() -> bytes:
            async with session.post(f"{url}/v1/completions", data=BODY) as response:
                return await response.read()

        async def our_stream() -> int:
            response = await client.send(
                endpoint, "POST", "/stream", HEADERS, BODY, timeouts=TIMEOUTS
            )
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            response.pipe(Count(done))
            return await done

        async def their_stream() -> int:
            async with session.post(f"{url}/stream", data=BODY) as response:
                return len([None async for _ in response.content.iter_any()])

        for concurrency in (1, 32):
            pairs = [
                (await cpu_us(ours, count, concurrency), await cpu_us(theirs, count, concurrency))
                for _ in range(rounds)
            ]
            report(f"POST, C={concurrency}, us per request", pairs)
        pairs = [
            (await cpu_us_per_read(our_stream, 100), await cpu_us_per_read(their_stream, 100))
            for _ in range(rounds)
        ]
        report("stream, C=100, us per read", pairs)
    await client.close()


def report(title: str, pairs: list[tuple[float, float]]) -> None:
    ours = min(pair[0] for pair in pairs)
    theirs = min(pair[1] for pair in pairs)
    print(f"{title}: {ours:.1f} against {theirs:.1f} with aiohttp ({theirs / ours:.1f} times)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=3200)
    arguments = parser.parse_args()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,), daemon=True)
    server.start()
    try:
        uvloop.run(measure(receiver.recv(), arguments.rounds, arguments.count))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
