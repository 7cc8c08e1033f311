"""What metrics, access log and timelines cost: the proxy's CPU with them, and without.

    python -m benchmarks.observing

Three proxies run side by side, each a process of its own: one as it is, one without metrics and
access log, and one that does not note either where the time of a request goes, which
`Server-Timing` and `/debug/requests` tell (no setting does that; see `switch_off`). Load goes to
one after the other, so that what else the machine does meets all. The figures are CPU time of each
process, per request with a whole answer, and per token of streams whose events arrive one by one;
ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import socket
import statistics
import sys
from enum import StrEnum
from pathlib import Path
from typing import cast

import uvloop

from pdproxy.core.fleet import Fleet
from pdproxy.core.pulse import Pulse
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch import account, delivery
from pdproxy.dispatch.relay import StreamRelay
from pdproxy.runtime import worker
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.sources import load_settings

REQUESTS, CLIENTS = 200, 8
STREAMS, TOKENS, GAP_S = 100, 200, 0.02
ROUNDS_OF_REQUESTS = 8  # for each round of streams, which takes that much longer
PREFILLED = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"a"},"finish_reason":"length"}],"usage":{"prompt_tokens":250,'
    b'"completion_tokens":1,"total_tokens":251},"kv_transfer_params":{"remote_block_ids":[1,2,3]}}'
)
WHOLE = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":250,'
    b'"completion_tokens":16,"total_tokens":266}}'
) % (b"word " * 16)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" symbol"},"logprobs":null,"finish_reason":null}]}\n\n'
)
END = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"stop"') + b"data: [DONE]\n\n"
BODY = b'{"model":"m","messages":[{"role":"user","content":"%b"}],"max_tokens":200,"stream":%b}%b'


# --- the engine: both roles, in this process


class Engine(asyncio.Protocol):
    """Answers with canned bytes; a stream's events come GAP_S apart."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[explicit-override] # typing has it from 3.12
        self._transport = cast("asyncio.Transport", transport)
        self._data = b""

    def data_received(self, data: bytes) -> None:  # type: ignore[explicit-override] # typing has it from 3.12
        self._data += data
        head, blank, body = self._data.partition(b"\r\n\r\n")
        if not blank or len(body) < _length(head):
            return
        self._data = b""
        if head.startswith(b"GET"):
            self._answer(b"{}")
        elif b'"max_tokens":1,' in body or b'"max_tokens":1}' in body:
            self._answer(PREFILLED)
        elif b'"stream":true' in body:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._say(TOKENS)
        else:
            self._answer(WHOLE)

    def _say(self, left: int) -> None:
        event = EVENT if left else END
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        if left:
            asyncio.get_running_loop().call_later(GAP_S, self._say, left - 1)
        else:
            self._transport.write(b"0\r\n\r\n")

    def _answer(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


# --- the proxies


class NoPulse(Pulse):
    """Notes nothing."""

    def beat(self, now: float, events: int) -> bool:  # type: ignore[explicit-override] # typing has it from 3.12
        return False


# The requests in flight are counted for other parts, too.
SILENT = frozenset(
    name
    for name in vars(Metrics)
    if not name.startswith("_") and name not in {"in_flight", "exposition", "scrape", "registry"}
)


def _nothing(*_args: object, **_more: object) -> None:
    return None


class Kept(StrEnum):
    """What a proxy keeps of its requests."""

    ALL = "all"
    TIMES = "times only"
    NOTHING = "nothing"


def switch_off(kept: Kept) -> None:
    """Let this process record no more than that."""
    if kept is Kept.ALL:
        return

    def begin(self: Metrics, fleet: Fleet, *_more: object) -> None:
        Metrics.__init__(self, fleet)

    class SilentRelay(StreamRelay):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **{**more, "clock": lambda: 0.0})  # type: ignore[arg-type] # as dispatch passes them

    silent_metrics = type(
        "Silent", (Metrics,), {"__init__": begin, **dict.fromkeys(SILENT, _nothing)}
    )
    silent: list[tuple[object, str, object]] = [
        (worker, "Reporter", silent_metrics),
        (account, "Pulse", NoPulse),
    ]
    if kept is Kept.NOTHING:
        silent.append((delivery, "StreamRelay", SilentRelay))
        marks = (name for name in vars(Timeline) if name.startswith("mark_"))
        silent += [(Timeline, mark, _nothing) for mark in marks]
    for where, name, stand_in in silent:
        setattr(where, name, stand_in)


def serve(engine_port: int, port: int, kept: Kept) -> None:
    """Run one proxy until it is terminated; its log goes nowhere, but is written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    switch_off(kept)
    engine = f"127.0.0.1:{engine_port}"
    argv = ["--host", "127.0.0.1", "--port", str(port), "--prefillers", engine, "--decoders"]
    level = "INFO" if kept is Kept.ALL else "ERROR"
    worker.run(load_settings([*argv, engine, "--log-level", level], {}))


# --- the load


async def ask(port: int, *, is_stream: bool, count: int) -> None:
    """Send `count` requests on one connection, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = BODY % (b"word " * 200, b"true" if is_stream else b"false", b"")
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b"
    ) % (len(body), body)
    for _ in range(count):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        if is_stream:
            await reader.readuntil(b"data: [DONE]")
            await reader.readuntil(b"0\r\n\r\n")
        else:
            await reader.readexactly(_length(head))
    writer.close()


async def whole_answers(port: int) -> int:
    """Ask for whole answers, some at a time; return how many."""
    await asyncio.gather(
        *(ask(port, is_stream=False, count=REQUESTS // CLIENTS) for _ in range(CLIENTS))
    )
    return REQUESTS


async def streams(port: int) -> int:
    """Ask for streams at once; return how many tokens came."""

    async def one() -> None:
        await asyncio.sleep(random.random() * GAP_S)
        await ask(port, is_stream=True, count=1)

    await asyncio.gather(*(one() for _ in range(STREAMS)))
    return STREAMS * TOKENS


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process's threads so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1000


async def measure(rounds: int) -> None:
    """Print the cost of both, and the ratio."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    engine_port = server.sockets[0].getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ports = {kept: free_port() for kept in Kept}
    children = {
        kept: context.Process(target=serve, args=(engine_port, port, kept))
        for kept, port in ports.items()
    }
    for child in children.values():
        child.start()
    try:
        for port in ports.values():
            await until_open(port)
        for name, load, times in (
            ("request", whole_answers, ROUNDS_OF_REQUESTS),
            ("streamed token", streams, 1),
        ):
            for port in ports.values():
                await load(port)  # to warm up
            costs: dict[Kept, list[float]] = {kept: [] for kept in Kept}
            for number in range(rounds * times):
                for kept in tuple(Kept) if number % 2 else reversed(Kept):
                    pid = children[kept].pid
                    assert pid is not None
                    before = cpu_us(pid)
                    count = await load(ports[kept])
                    costs[kept].append((cpu_us(pid) - before) / count)
            told(name, costs)
    finally:
        for child in children.values():
            child.terminate()
            child.join()
        server.close()


def told(name: str, costs: dict[Kept, list[float]]) -> None:
    every = costs[Kept.ALL]
    print(f"per {name}: {statistics.median(every):7.2f} us; to that with", end=" ")
    for kept in (Kept.TIMES, Kept.NOTHING):
        ratio = statistics.median(a / b for a, b in zip(every, costs[kept], strict=True))
        least = min(every) / min(costs[kept])
        print(f"{kept} kept {ratio:.3f} (least of each {least:.3f});", end=" ")
    print(f"{len(every)} rounds")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_open(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await whole_answers(port)
            except (OSError, AssertionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
            else:
                return


def main(argv: list[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(options.rounds))


if __name__ == "__main__":
    main()
