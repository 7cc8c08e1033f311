"""One of several workers, a process of its own; started by the supervisor only."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
from collections.abc import Iterable

import uvloop

from pdproxy.core.fleet import Fleet
from pdproxy.errors import ConfigError
from pdproxy.runtime.aggregate import SharedPage, share_metrics
from pdproxy.runtime.board import (
    ADMITTED_SLOT,
    QUEUED_SLOT,
    RUNNING_SLOT,
    BoardMemory,
    SharedInFlight,
    SharedLoadBoard,
)
from pdproxy.runtime.control import Begin, Channel, Leaving, NotStarted, Started, connect
from pdproxy.runtime.logs import setup_logging
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.replica import Desk
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.site import Site, report_anomaly
from pdproxy.runtime.worker import Worker, serving
from pdproxy.tasks import spawn

logger = logging.getLogger(__name__)

# How old a worker's figures may be on another one's metrics page.
FLUSH_S = 0.2
EXIT_CUT = 1
EXIT_ORPHANED = 1
EXIT_USAGE = 2


def main() -> int:
    """Serve as the supervisor says; return the exit code.

    The command line is this worker's number and the descriptor of its end of the channel; all
    else comes over the channel, as command lines are for all to read.
    """
    end = socket.socket(fileno=int(sys.argv[2]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(end))


async def _work(end: socket.socket) -> int:
    # A terminal or a service manager sends these to all processes; the supervisor says what is
    # to be done.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = await connect(end)
    begin = await channel.receive()
    if not isinstance(begin, Begin):
        return EXIT_ORPHANED
    settings = Settings(**pickle.loads(begin.settings))
    setup_logging(settings.log_level, settings.log_format, worker=begin.row)
    share_metrics(begin.metrics_dir, begin.row)
    desk = Desk(channel, begin.row, begin.snapshot)
    in_use = _hold(begin.metrics_dir)
    try:
        async with serving(
            settings, _opened(begin.sockets[begin.row]), _site(begin, desk)
        ) as worker:
            await _serve(worker, begin, channel, desk)
    except ConfigError as error:
        channel.tell(NotStarted(error.faults))
        return EXIT_USAGE
    finally:
        await channel.close()
    return _end(begin, desk, in_use)


async def _serve(worker: Worker, begin: Begin, channel: Channel, desk: Desk) -> None:
    """Serve until the supervisor, its end, or a signal to this process alone says no more."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, desk.end)
    accepting = spawn(_accept_for_others(worker, begin, desk), name="sockets of others")
    channel.tell(Started())
    try:
        await worker.shutdown.begun()
    finally:
        accepting.cancel()
        # As long as anyone has them open, the kernel lets clients wait there for an answer.
        for row, numbers in enumerate(begin.sockets):
            if row != begin.row:
                for number in numbers:
                    os.close(number)
        channel.tell(Leaving())
    if desk.is_orphaned:
        logger.error("the supervisor is gone: this worker accepts nothing more and ends")


async def _accept_for_others(worker: Worker, begin: Begin, desk: Desk) -> None:
    """Accept from the sockets of workers that are not there, as long as they are not."""
    servers: dict[int, list[asyncio.Server]] = {}
    try:
        while True:
            await desk.has_changed.wait()
            desk.has_changed.clear()
            wanted = set(desk.peers.accept) - {begin.row}
            for row in servers.keys() - wanted:
                _close(servers.pop(row))
            for row in wanted - servers.keys():
                copies = _opened(map(os.dup, begin.sockets[row]))
                servers[row] = [await worker.listen(each) for each in copies]
    finally:
        for row in tuple(servers):
            _close(servers.pop(row))


def _site(begin: Begin, desk: Desk) -> Site:
    memory = BoardMemory(begin.workers, begin.board)
    board = SharedLoadBoard(memory, begin.row, on_anomaly=report_anomaly)

    def page(metrics: Metrics, fleet: Fleet) -> SharedPage:
        return SharedPage(begin.metrics_dir, metrics, fleet, desk.pids)

    return Site(
        board=board,
        running=SharedInFlight(memory, begin.row, RUNNING_SLOT),
        admitted=SharedInFlight(memory, begin.row, ADMITTED_SLOT),
        queued=SharedInFlight(memory, begin.row, QUEUED_SLOT),
        reports=desk,
        roster=lambda fleet, on_gone: desk.roster(fleet, on_gone, board),
        history=desk.history,
        requests=desk.requests,
        page=page,
        metrics_sockets=lambda: _opened(begin.metrics_sockets),
        flush_s=FLUSH_S,
        row=begin.row,
        shutdown=desk.shutdown,
    )


def _hold(directory: str) -> int:
    """Hold a directory that the last of all its users removes; return what to let go."""
    held = os.open(directory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _end(begin: Begin, desk: Desk, in_use: int) -> int:
    if not desk.is_orphaned:
        return EXIT_CUT if desk.shutdown.cut else 0
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return EXIT_ORPHANED  # another worker still counts there
    # The supervisor would do it.
    shutil.rmtree(begin.metrics_dir, ignore_errors=True)
    return EXIT_ORPHANED


def _opened(numbers: Iterable[int]) -> list[socket.socket]:
    return [socket.socket(fileno=number) for number in numbers]


def _close(servers: Iterable[asyncio.Server]) -> None:
    for server in servers:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
