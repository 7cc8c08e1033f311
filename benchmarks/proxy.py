"""The real command as a child process, for benchmarks."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from pdproxy.sim.cluster import Child


@asynccontextmanager
async def running(
    prefillers: Sequence[Child], decoders: Sequence[Child], *args: str
) -> AsyncIterator[str]:
    """Run the command in front of these engines; yield its URL once it is ready."""
    async with started(prefillers, decoders, *args) as (url, _):
        yield url


@asynccontextmanager
async def started(
    prefillers: Sequence[Child], decoders: Sequence[Child], *args: str
) -> AsyncIterator[tuple[str, int]]:
    """Do the same; yield the process id, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "pdproxy", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--log-level", "ERROR", *args]
    command += ["--prefillers", *(f"127.0.0.1:{child.port}" for child in prefillers)]
    command += ["--decoders", *(f"127.0.0.1:{child.port}" for child in decoders)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(url)
        yield url, process.pid
    finally:
        process.terminate()
        await process.wait()


async def _until_ready(url: str) -> None:
    async with aiohttp.ClientSession(trust_env=False) as session, asyncio.timeout(30):
        while True:
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
