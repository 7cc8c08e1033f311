"""The worker processes: started, kept in number, told what changes, and ended.

Rules: a worker that dies is replaced, at once if it had served for a while, else with a growing
pause. Meanwhile another one accepts the connections that wait at its sockets, so none is lost.
One that is silent is taken for dead in this at once, and killed when it stays so. The row of the
board is cleared when a worker is surely dead.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from functools import partial

from pdproxy.core.snapshot import Snapshot
from pdproxy.errors import ConfigError, PDProxyError, SupervisorSilent
from pdproxy.runtime.control import (
    Channel,
    Follow,
    Leaving,
    Message,
    NotStarted,
    OnMessage,
    OnQuestion,
    Peers,
    Ping,
    Started,
    Stop,
)
from pdproxy.tasks import spawn

logger = logging.getLogger(__name__)

# A worker that has lived so long died of something else than its start.
STEADY_S = 10.0
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
# Deaths in a row of workers that never came to serve, while none has: it will not get better.
MAX_FAILED_STARTS = 4
# For a worker to come to serve, which takes about one second: one that has not is killed.
START_S = 60.0
# Between two questions whether a worker is there, and for its answer.
PING_S = 1.0
SILENCE_S = 2.0
# Questions in a row without an answer, after which a worker is killed: its loop stands still.
MAX_SILENT = 5
# Beyond the grace, for workers to end by themselves before they are killed.
MARGIN_S = 5.0


class Child:
    """One worker process."""

    def __init__(self, row: int, process: asyncio.subprocess.Process, channel: Channel) -> None:
        """Take over a process that has been started."""
        self.row = row
        self.process = process
        self.channel = channel
        self.is_serving = False
        self.silent = 0  # questions in a row that it has not answered
        self.has_served = False
        self.watch: asyncio.Task[None] | None = None
        self.faults: tuple[str, ...] = ()
        self.version = -1  # of the last snapshot it was sent


Launch = Callable[[int], Awaitable[Child]]


class Crew:
    """All workers.

    Args:
        count: how many there shall be.
        launch: starts the worker of a row.
        on_message: told of what workers report.
        on_question: answers what they ask.
        on_death: called with the row of each that is dead.
        clock: a monotonic clock, in seconds.
        start_s: what a worker has to come to serve.
    """

    def __init__(  # noqa: PLR0913 -- what it is told of and asked, each named at the call
        self,
        count: int,
        launch: Launch,
        on_message: OnMessage,
        on_question: OnQuestion,
        on_death: Callable[[int], None],
        clock: Callable[[], float],
        *,
        start_s: float = START_S,
    ) -> None:
        self._start_s = start_s
        self._count = count
        self._launch = launch
        self._on_message = on_message
        self._on_question = on_question
        self._on_death = on_death
        self._clock = clock
        self._children: dict[int, Child] = {}
        self._stopping = asyncio.Event()
        self._failed_starts = 0
        self._fault: PDProxyError | None = None
        self._exit_codes: list[int] = []
        self.all_serve = asyncio.Event()

    async def run(self) -> bool:
        """Keep all workers at work until `stop`; return whether all ended well then.

        Raises:
            PDProxyError: the workers cannot be brought to serve; none is left.
        """
        keepers = [spawn(self._keep(row), name=f"worker {row}") for row in range(self._count)]
        try:
            await asyncio.gather(*keepers)
        finally:
            for child in self._children.values():
                child.process.kill()
        if self._fault is not None:
            raise self._fault
        return not any(self._exit_codes)

    @property
    def serving(self) -> list[Child]:
        """Those that serve now."""
        return [child for child in self._children.values() if child.is_serving]

    @property
    def answering(self) -> list[Child]:
        """Those that can be asked: they serve, or end with requests that still run."""
        return [child for child in self._children.values() if child.has_served]

    def stop(self, within_s: float) -> None:
        """Let all workers stop; those that have not ended after a while are killed.

        The second call takes the rest of the time that requests have.
        """
        is_hasty = self._stopping.is_set()
        if not is_hasty:
            self._stopping.set()
            _ = spawn(self._kill_late(within_s + MARGIN_S), name="kill late workers")
        for child in self._children.values():
            child.channel.tell(Stop(is_hasty))

    def fail(self, fault: PDProxyError) -> None:
        """End all at once, and `run` with this fault; no effect if they are ending anyway."""
        if not self._stopping.is_set():
            self._fault = fault
            self.stop(0)

    def publish(self, snapshot: Snapshot) -> None:
        """Send a snapshot to those that have not got it and read what they are sent.

        One that stands still gets the newest when it goes on, not all of those between.
        """
        for child in self._children.values():
            if child.version < snapshot.version and child.channel.has_room:
                child.channel.tell(Follow(snapshot))
                child.version = snapshot.version

    async def _keep(self, row: int) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = self._clock()
            child = await self._launch(row)
            self._children[row] = child
            child.watch = spawn(self._limit_start(child), name=f"start of worker {row}")
            if self._stopping.is_set():
                child.channel.tell(Stop())
            await child.channel.listen(partial(self._receive, child), self._on_question)
            code = await self._wait(child)
            await self._bury(child)
            if self._stopping.is_set():
                self._exit_codes.append(code)
                return
            lived_s = self._clock() - began_s
            self._judge_death(child, code, lived_s)
            pause_s = FIRST_PAUSE_S if lived_s > STEADY_S else min(2 * pause_s, MAX_PAUSE_S)
            if lived_s <= STEADY_S:
                await self._pause(pause_s)

    async def _wait(self, child: Child) -> int:
        """Wait for the end of a worker whose channel is closed; make sure of it."""
        try:
            async with asyncio.timeout(MARGIN_S):
                return await child.process.wait()
        except TimeoutError:
            child.process.kill()
            return await child.process.wait()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _receive(self, child: Child, message: Message) -> None:
        if isinstance(message, Started):
            child.is_serving = child.has_served = True
            self._failed_starts = 0
            if child.watch is not None:
                child.watch.cancel()
            child.watch = spawn(self._watch(child), name=f"watch of worker {child.row}")
            self._tell_peers()
            if len(self.serving) == self._count:
                self.all_serve.set()
        elif isinstance(message, Leaving):
            child.is_serving = False
            self._tell_peers()
        elif isinstance(message, NotStarted):
            child.faults = message.faults
        else:
            self._on_message(message)

    async def _limit_start(self, child: Child) -> None:
        """Kill a worker that does not come to serve: nobody asks it yet whether it is there."""
        await self._pause(self._start_s)
        if not self._stopping.is_set():
            logger.error(
                "worker %d (process %d) has not started in %.0f s and is killed",
                *(child.row, child.process.pid, self._start_s),
            )
            child.process.kill()

    async def _watch(self, child: Child) -> None:
        """Let others accept for a worker that is silent, and kill one that stays so."""
        while not self._stopping.is_set():
            await self._pause(PING_S)
            try:
                await child.channel.ask(Ping(), SILENCE_S)
            except SupervisorSilent:
                child.silent += 1
            else:
                child.silent = 0
            if self._stopping.is_set():
                return
            if child.is_serving is bool(child.silent):
                child.is_serving = not child.silent
                self._tell_peers()
            if child.silent == MAX_SILENT:
                logger.error(
                    "worker %d (process %d) has not answered for %d questions and is killed",
                    *(child.row, child.process.pid, MAX_SILENT),
                )
                child.process.kill()

    async def _bury(self, child: Child) -> None:
        if child.watch is not None:
            child.watch.cancel()
        del self._children[child.row]
        self._on_death(child.row)
        self._tell_peers()
        await child.channel.close()

    def _judge_death(self, child: Child, code: int, lived_s: float) -> None:
        pid, how = child.process.pid, _told(code)
        if child.has_served:
            logger.warning(
                "worker %d (process %d) ended after %.0f s: %s; it is replaced",
                *(child.row, pid, lived_s, how),
            )
            return
        why = "; ".join(child.faults) or how
        logger.error("worker %d (process %d) did not start: %s", child.row, pid, why)
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS and not self.serving:
            faults = child.faults or (f"the workers do not start: {how}",)
            self.fail(ConfigError(faults))

    def _tell_peers(self) -> None:
        """Tell all who is there, and who takes the connections of those who are not."""
        serving = sorted(self.serving, key=lambda child: child.row)
        accept = {child.row: [child.row] for child in serving}
        for row in range(self._count):
            if row not in accept and serving:
                accept[serving[row % len(serving)].row].append(row)
        pids = {child.row: child.process.pid for child in serving}
        for child in serving:
            child.channel.tell(Peers(pids=pids, accept=tuple(accept[child.row])))

    async def _kill_late(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for child in self._children.values():
            logger.warning("worker %d does not end and is killed", child.row)
            child.process.kill()


def _told(code: int) -> str:
    """Return what an exit code means, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
