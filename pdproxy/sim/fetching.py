"""The decoder's end of a KV transfer: prompts that are being pulled, and their outcome."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

from pdproxy.sim.config import SimConfig
from pdproxy.sim.handles import Pulled
from pdproxy.sim.jobs import Sequence
from pdproxy.sim.transfer import LoadFailure, RemoteHandle, Transfer, parse_handle

_HEARTBEATS_PER_LEASE = 6


class Fetcher:
    """Pulls prompts; owns its tasks.

    Args:
        config: The lease, which sets the pace of the signs of life.
        transfer: The way to other engines.
        on_arrival: Called with a sequence and its KV, or None if the pull failed. A sequence that
            is done by then is left out.
    """

    def __init__(
        self,
        config: SimConfig,
        transfer: Transfer,
        on_arrival: Callable[[Sequence, Pulled | None], None],
    ) -> None:
        self.pulling: list[Sequence] = []
        self._config = config
        self._transfer = transfer
        self._on_arrival = on_arrival
        self._tasks: set[asyncio.Task[None] | asyncio.Task[Pulled]] = set()

    def start(self, sequence: Sequence, handle: RemoteHandle) -> None:
        """Begin to pull; the choices of one prompt share one pull."""
        self.pulling.append(sequence)
        if sequence.prompt.pull is None:
            pull = self._transfer.pull(handle, len(sequence.prompt.ids))
            sequence.prompt.pull = asyncio.get_running_loop().create_task(pull)
            self._keep(sequence.prompt.pull)
        self._spawn(self._wait(sequence, sequence.prompt.pull))

    def free(self, params: object) -> None:
        """Tell the prefiller that a request refused here will not pull its blocks."""
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            return
        handle = parse_handle(params)
        if handle is not None:
            self._spawn(self._transfer.notify(handle, "release"))

    def keep_alive(self, queued: Callable[[], Iterable[Sequence]]) -> None:
        """From now on extend the leases of queued requests, as vLLM's decoders do."""
        self._spawn(self._heartbeats(queued))

    async def close(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, sequence: Sequence, pull: asyncio.Task[Pulled]) -> None:
        try:
            # Shielded: other choices of the prompt wait for the same pull.
            pulled = await asyncio.shield(pull)
        except LoadFailure:
            pulled = None
        if not sequence.is_done:
            self.pulling.remove(sequence)
            self._on_arrival(sequence, pulled)

    async def _heartbeats(self, queued: Callable[[], Iterable[Sequence]]) -> None:
        while True:
            await asyncio.sleep(self._config.kv_lease_s / _HEARTBEATS_PER_LEASE)
            for handle in {s.prompt.handle for s in queued() if s.prompt.handle is not None}:
                await self._transfer.notify(handle, "extend")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._keep(asyncio.get_running_loop().create_task(work))

    def _keep(self, task: asyncio.Task[None] | asyncio.Task[Pulled]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
