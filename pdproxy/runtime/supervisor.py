"""The parent of several workers: it listens, owns the instances and probes, and serves nobody.

Rule: no request waits for this process. Workers accept by themselves, from sockets that are open
here too; loads are in shared memory; states travel as snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import msgspec
import uvloop
from prometheus_client.multiprocess import mark_process_dead

from pdproxy.core.history import Recent, merge
from pdproxy.core.instance import Endpoint
from pdproxy.core.snapshot import Snapshot, take
from pdproxy.core.wording import counted
from pdproxy.errors import SupervisorSilent
from pdproxy.runtime.board import RUNNING_SLOT, BoardMemory, SharedInFlight, SharedLoadBoard
from pdproxy.runtime.control import (
    Act,
    Begin,
    HistoryCall,
    LegFailed,
    LegSucceeded,
    Message,
    Ping,
    Question,
    RanOut,
    RosterCall,
    RunningCall,
    connect,
)
from pdproxy.runtime.crew import Child, Crew
from pdproxy.runtime.listener import bind_for_each
from pdproxy.runtime.logs import setup_logging
from pdproxy.runtime.metrics_site import bind_metrics
from pdproxy.runtime.roster import FleetRoster
from pdproxy.runtime.rules import engine_ssl, listener_ssl
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.site import make_fleet, own_roster, report_anomaly
from pdproxy.runtime.start import report_start
from pdproxy.server.context import RunningRequest
from pdproxy.tasks import keep_calling, spawn

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
# Between two looks for changes that no report has told of, such as those by probes.
LOOK_S = 0.02
# For one worker to say what it counted; one that does not is left out.
WORKER_ANSWER_S = 1.0
_RECENT = msgspec.msgpack.Decoder(Recent)
_REQUESTS = msgspec.msgpack.Decoder(list[RunningRequest])
# Files there stay in memory: metrics are written with each request.
_MEMORY_DIRECTORY = "/dev/shm"  # a directory of its own is made in it


def run(settings: Settings) -> int:
    """Serve with several workers until a signal; return the exit code.

    Raises:
        ConfigError: the address cannot be listened on, or a file cannot be used.
    """
    setup_logging(settings.log_level, settings.log_format)
    # Faults of files are found here, once, and not by each worker.
    engine_ssl(settings)
    listener_ssl(settings)
    workers = settings.worker_count
    sockets = bind_for_each(workers, settings.host, settings.port, settings.listen_backlog)
    metrics_sockets = bind_metrics(settings)
    memory = BoardMemory(workers)
    with (
        _metrics_directory() as metrics_dir,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        supervisor = Supervisor(settings, sockets, metrics_sockets, memory, metrics_dir)
        return 0 if runner.run(supervisor.run()) else EXIT_FAILED


class Supervisor:
    """Wires the workers to the instances; one per proxy."""

    def __init__(
        self,
        settings: Settings,
        sockets: list[list[socket.socket]],
        metrics_sockets: list[socket.socket],
        memory: BoardMemory,
        metrics_dir: str,
    ) -> None:
        """Make a supervisor of as many workers as there are lists of sockets."""
        self._settings = settings
        self._sockets = sockets
        self._metrics_sockets = metrics_sockets
        self._memory = memory
        self._metrics_dir = metrics_dir
        board = SharedLoadBoard(memory, None, on_anomaly=report_anomaly)
        self._fleet = make_fleet(settings, board)
        self._running = SharedInFlight(memory, None, RUNNING_SLOT)
        self._snapshot = Snapshot(0, ())
        self._roster: FleetRoster | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._crew = Crew(
            len(sockets), self._launch, self._receive, self._respond, self._died, time.monotonic
        )

    async def run(self) -> bool:
        """Serve until a signal; return whether all requests ended by themselves.

        Raises:
            PDProxyError: the workers cannot be brought to serve.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        async with own_roster(self._settings, self._fleet, _ignore) as self._roster:
            self._publish()
            keeping = keep_calling(self._settle, LOOK_S, "telling workers of instances")
            publishing = spawn(keeping, name="snapshots")
            self._announcing = spawn(self._announce(), name="announce")
            try:
                is_clean = await self._crew.run()
            finally:
                publishing.cancel()
                self._announcing.cancel()
        logger.info("stopped")
        return is_clean

    def _stop(self) -> None:
        logger.info("stopping; %s in flight", counted(self._running.count(), "request"))
        if self._announcing is not None:
            self._announcing.cancel()
        # Workers have these sockets open themselves, as long as they still accept.
        for listening in chain(*self._sockets, self._metrics_sockets):
            listening.close()
        self._crew.stop(self._settings.shutdown_delay + self._settings.shutdown_grace)

    async def _announce(self) -> None:
        await self._crew.all_serve.wait()
        port = self._sockets[0][0].getsockname()[1]
        report_start(self._settings, self._fleet, port, len(self._sockets))

    # --- workers

    async def _launch(self, row: int) -> Child:
        ours, theirs = socket.socketpair()
        numbers = tuple(map(_numbers, self._sockets))
        metrics_numbers = _numbers(self._metrics_sockets)
        passed = (self._memory.descriptor, *chain(*numbers), *metrics_numbers)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdproxy.runtime.worker_process"),
                *(str(row), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *passed),
            )
        child = Child(row, process, await connect(ours))
        child.version = self._snapshot.version
        begin = Begin(
            row=row,
            workers=len(self._sockets),
            settings=pickle.dumps(self._settings.model_dump()),
            board=self._memory.descriptor,
            sockets=numbers,
            metrics_sockets=metrics_numbers,
            metrics_dir=self._metrics_dir,
            snapshot=self._snapshot,
        )
        child.channel.tell(begin)
        return child

    def _died(self, row: int) -> None:
        self._memory.clear(row)
        mark_process_dead(row, self._metrics_dir)  # type: ignore[no-untyped-call] # as it comes

    def _receive(self, message: Message) -> None:
        """Apply what a request has learnt in a worker."""
        if not isinstance(message, LegSucceeded | LegFailed | RanOut):
            return
        members = self._fleet.members.all()
        member = next((m for m in members if m.instance.serial == message.serial), None)
        if member is None:
            return
        judge = self._fleet.judge
        match message:
            case LegSucceeded():
                judge.leg_succeeded(member.instance)
            case LegFailed():
                judge.leg_failed(member.instance, certain=message.certain, why=message.why)
            case RanOut():
                judge.ran_out(member.instance, message.held_tokens)
        self._publish()

    async def _respond(self, question: Question) -> bytes:
        if isinstance(question, HistoryCall):
            bodies = await self._ask_all(question)
            return msgspec.msgpack.encode(merge([_RECENT.decode(body) for body in bodies]))
        if isinstance(question, RunningCall):
            lists = [_REQUESTS.decode(body) for body in await self._ask_all(question)]
            return msgspec.msgpack.encode(list(chain.from_iterable(lists)))
        if isinstance(question, Ping):
            return b""
        try:
            return msgspec.msgpack.encode(await self._call(question))
        finally:
            self._publish()

    async def _call(self, call: RosterCall) -> object:
        roster = self._roster
        assert roster is not None, "workers start within its block"
        if call.act is Act.DESCRIBE:
            return await roster.describe()
        role, endpoint = call.role, Endpoint(call.host, call.port, call.tls)
        match call.act:
            case Act.ADD:
                return await roster.add(role, endpoint)
            case Act.REMOVE:
                return await roster.remove(role, endpoint)
            case Act.DRAIN:
                return await roster.drain(role, endpoint, call.deadline_s)
            case Act.UNDRAIN:
                return await roster.undrain(role, endpoint)

    async def _ask_all(self, question: Question) -> list[bytes]:
        asked = (c.channel.ask(question, WORKER_ANSWER_S) for c in self._crew.answering)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        bodies = [answer for answer in answers if isinstance(answer, bytes)]
        if not bodies:
            raise SupervisorSilent("no worker answers; try again")
        return bodies

    # --- instances

    def _publish(self) -> None:
        """Send the workers what has changed, if anything has."""
        instances = take(self._fleet.members)
        if instances != self._snapshot.instances:
            self._snapshot = Snapshot(self._snapshot.version + 1, instances)
        self._crew.publish(self._snapshot)

    def _settle(self) -> None:
        """Let those leave that no worker uses any more, and tell what has changed."""
        self._fleet.members.settle()
        self._publish()


@contextmanager
def _metrics_directory() -> Iterator[str]:
    """Make a directory for the workers' metrics; in memory if the system has a place for that."""
    place = _MEMORY_DIRECTORY if os.access(_MEMORY_DIRECTORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pdproxy-", dir=place, ignore_cleanup_errors=True) as d:
        yield d


def _numbers(sockets: Iterable[socket.socket]) -> tuple[int, ...]:
    return tuple(each.fileno() for each in sockets)


def _ignore(_endpoint: Endpoint) -> None:
    """Do nothing: there are no connections to engines here that could be closed."""
