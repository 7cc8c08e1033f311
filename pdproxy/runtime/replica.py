"""A worker's side of the channel: it follows the supervisor's states, and asks and tells it.

Rule: what a request learns is told without waiting; only administrative calls wait for an answer,
and only for so long.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from pdproxy.core.fleet import Fleet
from pdproxy.core.history import Recent
from pdproxy.core.instance import Endpoint, Instance, Role
from pdproxy.core.record import Change, InstanceRecord
from pdproxy.core.snapshot import Replica, Snapshot
from pdproxy.runtime.board import SharedLoadBoard
from pdproxy.runtime.control import (
    Act,
    Channel,
    Follow,
    HistoryCall,
    LegFailed,
    LegSucceeded,
    Message,
    Peers,
    Ping,
    Question,
    RanOut,
    RosterCall,
    RunningCall,
    Stop,
)
from pdproxy.runtime.site import OnGone, OwnRequests
from pdproxy.server.context import HistorySource, RequestsSource, RunningRequest
from pdproxy.server.shutdown import Shutdown
from pdproxy.tasks import spawn

# The supervisor answers within milliseconds; a caller may try again.
ANSWER_S = 5.0


class Desk:
    """Where a worker's dealings with its supervisor come together.

    Attributes:
        peers: the processes of all workers, and whose sockets this one serves.
        has_changed: set when `peers` has changed.
        shutdown: the end of the worker.
        is_orphaned: the supervisor is gone.
    """

    def __init__(self, channel: Channel, row: int, snapshot: Snapshot) -> None:
        """Make the desk of a worker that begins with a snapshot."""
        self._channel = channel
        self._snapshot = snapshot
        self._replica: Replica | None = None
        self._on_gone: OnGone | None = None
        self._history: HistorySource | None = None
        self._requests: OwnRequests | None = None
        self._told: set[int] = set()
        self.peers = Peers(pids={row: os.getpid()}, accept=(row,))
        self.has_changed = asyncio.Event()
        self.shutdown = Shutdown()
        self.is_orphaned = False

    @asynccontextmanager
    async def roster(
        self, fleet: Fleet, on_gone: OnGone, board: SharedLoadBoard
    ) -> AsyncIterator[RemoteRoster]:
        """Keep a fleet as the supervisor says until the block ends."""
        self._replica = Replica(fleet.members, board.open_at)
        self._on_gone = on_gone
        self._follow(self._snapshot)
        listening = spawn(self._listen(), name="control channel")
        try:
            yield RemoteRoster(self._channel)
        finally:
            listening.cancel()

    def history(self, own: HistorySource) -> RemoteHistory:
        """Give what this worker counts to whoever asks, and ask for that of all."""
        self._history = own
        return RemoteHistory(self._channel)

    def requests(self, own: OwnRequests) -> RequestsSource:
        """Give this worker's requests in flight to whoever asks, and ask for those of all."""
        self._requests = own

        async def requests() -> list[RunningRequest]:
            body = await self._channel.ask(RunningCall(), ANSWER_S)
            return msgspec.msgpack.decode(body, type=list[RunningRequest])

        return requests

    def pids(self) -> list[int]:
        """Return the processes of the proxy: all workers that serve, and the supervisor."""
        return [*self.peers.pids.values(), os.getppid()]

    def end(self) -> None:
        """Let the worker end; requests keep their time, however many say so.

        A service manager signals all processes, and then the supervisor tells its workers, too.
        """
        if not self.shutdown.has_begun:
            self.shutdown.begin()

    # --- Reports

    def leg_succeeded(self, instance: Instance) -> None:
        """Tell of a success that changes something."""
        if self._replica is None or not (
            self._replica.is_blemished(instance) or instance.serial in self._told
        ):
            return
        self._told.discard(instance.serial)
        self._channel.tell(LegSucceeded(instance.serial))

    def leg_failed(self, instance: Instance, *, certain: bool, why: str) -> bool:
        """Tell of a failure; whether it ejects is the supervisor's to say."""
        self._told.add(instance.serial)
        self._channel.tell(LegFailed(instance.serial, certain, why))
        return False

    def ran_out(self, instance: Instance, held_tokens: int) -> None:
        """Tell what a decoder held when it ran out."""
        self._channel.tell(RanOut(instance.serial, held_tokens))

    # --- inside

    async def _listen(self) -> None:
        await self._channel.listen(self._receive, self._respond)
        self.is_orphaned = True
        self.end()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Follow):
            self._follow(message.snapshot)
        elif isinstance(message, Peers):
            self.peers = message
            self.has_changed.set()
        elif isinstance(message, Stop):
            self.end()
            if message.is_hasty:
                self.shutdown.begin()

    def _follow(self, snapshot: Snapshot) -> None:
        assert self._replica is not None, "set before the first message is read"
        assert self._on_gone is not None, "set before the first message is read"
        for instance in self._replica.apply(snapshot):
            self._told.discard(instance.serial)
            self._on_gone(instance.endpoint)

    async def _respond(self, question: Question) -> bytes:
        if isinstance(question, Ping):
            return b""
        if isinstance(question, RunningCall):
            assert self._requests is not None, "a worker is asked once it has started"
            return msgspec.msgpack.encode(self._requests())
        assert self._history is not None, "a worker is asked once it has started"
        return msgspec.msgpack.encode(await self._history.recent())


class RemoteRoster:
    """The supervisor's roster, as the administrative calls of a worker see it."""

    def __init__(self, channel: Channel) -> None:
        """Ask over a channel."""
        self._channel = channel

    async def add(self, role: Role, endpoint: Endpoint) -> Change:
        """Let an engine join once it answers; one that is draining takes requests again."""
        return await self._change(Act.ADD, role, endpoint)

    async def remove(self, role: Role, endpoint: Endpoint) -> Change:
        """Take an instance out of service; its running requests end as usual."""
        return await self._change(Act.REMOVE, role, endpoint)

    async def drain(self, role: Role, endpoint: Endpoint, deadline_s: float | None) -> Change:
        """Do as `remove` does; what still runs after `deadline_s` is cut."""
        return await self._change(Act.DRAIN, role, endpoint, deadline_s)

    async def undrain(self, role: Role, endpoint: Endpoint) -> Change:
        """Let a draining instance take requests again."""
        return await self._change(Act.UNDRAIN, role, endpoint)

    async def describe(self) -> list[InstanceRecord]:
        """Return all instances, prefillers first, in order of registration."""
        body = await self._channel.ask(RosterCall(Act.DESCRIBE), ANSWER_S)
        return msgspec.msgpack.decode(body, type=list[InstanceRecord])

    async def _change(
        self, act: Act, role: Role, endpoint: Endpoint, deadline_s: float | None = None
    ) -> Change:
        call = RosterCall(act, role, endpoint.host, endpoint.port, endpoint.tls, deadline_s)
        return msgspec.msgpack.decode(await self._channel.ask(call, ANSWER_S), type=Change)


class RemoteHistory:
    """The recent past of all workers, put together by the supervisor."""

    def __init__(self, channel: Channel) -> None:
        """Ask over a channel."""
        self._channel = channel

    async def recent(self) -> Recent:
        """Return what all workers counted lately."""
        body = await self._channel.ask(HistoryCall(), ANSWER_S)
        return msgspec.msgpack.decode(body, type=Recent)
