"""Measure from outside how long a server's event loop is away, as a process of its own.

It asks for /healthcheck on one connection again and again, so the longest answer is the longest
gap that a stream of the same server can have seen. As a process it is not held up by the test.
Time that a process was ready to run and had no processor is the machine's and is taken off.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

PAUSE_S = 0.005
REQUEST = b"GET /healthcheck HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(slots=True)
class Pings:
    """Answer times in seconds; complete when the measuring block has ended.

    `queued_s` is how long the server waited for a processor meanwhile.
    """

    answer_s: list[float] = field(default_factory=list)
    queued_s: float = 0.0

    @property
    def longest_s(self) -> float:
        return max(0.0, max(self.answer_s) - self.queued_s)


@asynccontextmanager
async def pinging(port: int, pid: int) -> AsyncIterator[Pings]:
    """Ping the server that is process `pid` while the block runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.pinger", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    pings = Pings()
    async with asyncio.timeout(20):
        await process.stdout.readline()
    queued_before_s = queued_s(pid)
    try:
        yield pings
    finally:
        pings.queued_s = queued_s(pid) - queued_before_s
        async with asyncio.timeout(20):
            output, _ = await process.communicate(b"\n")
    pings.answer_s = json.loads(output)


def queued_s(pid: int | str) -> float:
    """Return how long a process was ready to run without a processor; 0 if the kernel keeps mum.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def main(port: int) -> None:
    answer_s: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            started, queued = time.perf_counter(), queued_s("self")
            connection.sendall(REQUEST)
            answer = b""
            while b"}" not in answer:
                answer += connection.recv(65536) or sys.exit("the server left")
            answer_s.append(time.perf_counter() - started - (queued_s("self") - queued))
            if len(answer_s) == 1:
                sys.stdout.write("measuring\n")
                sys.stdout.flush()
    sys.stdout.write(json.dumps(answer_s))


if __name__ == "__main__":
    main(int(sys.argv[1]))
