"""The channel between the supervisor and a worker: typed messages over a pair of sockets.

Rule: telling never waits. What the other side does not read in time piles up to a bound, and
beyond it is dropped; every question has a time within which it is answered or fails. So neither
side stands still because the other does.

A message is four bytes of length, big-endian, and a MessagePack map of one of the types below.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from pdproxy.core.instance import Role
from pdproxy.core.snapshot import Snapshot
from pdproxy.errors import PDProxyError, SupervisorSilent
from pdproxy.tasks import spawn

logger = logging.getLogger(__name__)

# Unread by the other side; a stall of minutes at some reports a second stays below.
MAX_WAITING_BYTES = 4 * 1024 * 1024
# Unread by a side that has merely not come to it.
ROOM_BYTES = 64 * 1024
# Of one message: a snapshot of thousands of instances stays far below.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_LENGTH_BYTES = 4


class Act(StrEnum):
    """What a worker asks the supervisor to do with the roster."""

    ADD = "add"
    REMOVE = "remove"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    DESCRIBE = "describe"


# --- from the supervisor


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message: all that a worker needs.

    Attributes:
        row: its number, from 0: its row on the board, and its name in logs and metrics.
        workers: how many there are.
        settings: `Settings`, pickled.
        board: descriptor of the board's memory.
        sockets: descriptors of the listening sockets, those of each worker.
        metrics_sockets: the same of --metrics-port, one set for all.
        metrics_dir: where the workers' metrics lie.
        snapshot: the instances now.
    """

    row: int
    workers: int
    settings: bytes
    board: int
    sockets: tuple[tuple[int, ...], ...]
    metrics_sockets: tuple[int, ...]
    metrics_dir: str
    snapshot: Snapshot


class Follow(msgspec.Struct, frozen=True, tag=True):
    """The instances have changed."""

    snapshot: Snapshot


class Peers(msgspec.Struct, frozen=True, tag=True):
    """Who is at work now.

    Attributes:
        pids: the processes of the workers that serve.
        accept: take connections from the sockets of these, itself and some that are not there.
    """

    pids: dict[int, int]
    accept: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stop; `is_hasty` takes the rest of the time that requests have."""

    is_hasty: bool = False


# --- from a worker


class Started(msgspec.Struct, frozen=True, tag=True):
    """It listens."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """It accepts nothing more and ends when its requests have."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """It cannot start, and says why in lines for the operator."""

    faults: tuple[str, ...]


class LegSucceeded(msgspec.Struct, frozen=True, tag=True):
    """A leg went well on an instance that had failed before."""

    serial: int


class LegFailed(msgspec.Struct, frozen=True, tag=True):
    """A leg failed by an instance's fault."""

    serial: int
    certain: bool
    why: str


class RanOut(msgspec.Struct, frozen=True, tag=True):
    """A decoder ran out of KV cache while it held so many tokens."""

    serial: int
    held_tokens: int


# --- questions, either way


class RosterCall(msgspec.Struct, frozen=True, tag=True):
    """A call of the administration, or a look at all instances."""

    act: Act
    role: Role = Role.PREFILL
    host: str = ""
    port: int = 0
    tls: bool = False
    deadline_s: float | None = None


class HistoryCall(msgspec.Struct, frozen=True, tag=True):
    """What did you count lately? Of the supervisor: what did all workers?"""


class RunningCall(msgspec.Struct, frozen=True, tag=True):
    """Which requests are in flight? Of the supervisor: in all workers?"""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there? Of a worker; the answer is empty."""


Question: TypeAlias = RosterCall | HistoryCall | RunningCall | Ping


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question; `number` is the asking side's own."""

    number: int
    question: Question


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to the question of that number: a body, or a fault."""

    number: int
    body: bytes = b""
    fault: str = ""


Message: TypeAlias = (
    Begin
    | Follow
    | Peers
    | Stop
    | Started
    | Leaving
    | NotStarted
    | LegSucceeded
    | LegFailed
    | RanOut
    | Ask
    | Answer
)
OnMessage = Callable[[Message], None]
OnQuestion = Callable[[Question], Awaitable[bytes]]


class Channel:
    """One end of a channel; made by `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._number = 0
        self._asked: dict[int, asyncio.Future[bytes]] = {}

    @property
    def has_room(self) -> bool:
        """Whether the other side reads what it is told."""
        transport = self._writer.transport
        return not transport.is_closing() and transport.get_write_buffer_size() < ROOM_BYTES

    def tell(self, message: Message) -> bool:
        """Send a message without waiting; return whether it was not dropped."""
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            return False
        data = msgspec.msgpack.encode(message)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        return True

    async def ask(self, question: Question, timeout_s: float) -> bytes:
        """Ask, and return the body of the answer.

        Raises:
            SupervisorSilent: there is none in time, or it is that the question failed.
        """
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.tell(Ask(number, question)):
                raise SupervisorSilent("the supervisor takes no call now; try again")
            async with asyncio.timeout(timeout_s):
                body: bytes = await answer
                return body
        except TimeoutError:
            text = f"the supervisor did not answer within {timeout_s:g} s; it may still do so"
            raise SupervisorSilent(text) from None
        finally:
            del self._asked[number]

    async def receive(self) -> Message | None:
        """Return the next message; None at the end."""
        try:
            head = await self._reader.readexactly(_LENGTH_BYTES)
            length = int.from_bytes(head, "big")
            assert length <= MAX_MESSAGE_BYTES, "the two sides are of one version"
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def listen(self, on_message: OnMessage, on_question: OnQuestion) -> None:
        """Pass on what comes until the other side is gone."""
        while (message := await self.receive()) is not None:
            if isinstance(message, Answer):
                self._settle(message)
            elif isinstance(message, Ask):
                # A slow answer holds up nothing else that is told.
                _ = spawn(self._respond(message, on_question), name="answer on the channel")
            else:
                on_message(message)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(SupervisorSilent("the supervisor is gone"))

    async def close(self) -> None:
        """Close this end; what was told before is still sent."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the other side is gone

    def _settle(self, message: Answer) -> None:
        answer = self._asked.get(message.number)
        if answer is None or answer.done():
            return
        if message.fault:
            answer.set_exception(SupervisorSilent(message.fault))
        else:
            answer.set_result(message.body)

    async def _respond(self, ask: Ask, on_question: OnQuestion) -> None:
        try:
            self.tell(Answer(ask.number, body=await on_question(ask.question)))
        except PDProxyError as error:
            self.tell(Answer(ask.number, fault=error.message))
        except Exception:
            self.tell(Answer(ask.number, fault="the supervisor failed by a bug"))
            raise


async def connect(end: socket.socket) -> Channel:
    """Return the channel over one end of a pair of sockets, which it owns from now on."""
    end.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=end)
    return Channel(reader, writer)
