"""KV handles that will not be decoded: each is released at its prefiller, soon and at low cost.

Rules: nobody waits for a release, least of all a client; releases are bounded in number, in queue
and in time; each ends under one action, which is counted.

No HTTP call frees the blocks that a prefiller holds for a decoder. A decoder does: when it refuses
a request after it has read it, it tells the prefiller; when it begins to generate, it has pulled.
So a decode request that cannot be accepted is sent, and closed at its first event if it is.
Source: vLLM 0.32, `_with_kv_transfer_rejection_cleanup`; freed within 2 s, seen on engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pdproxy.connectors.base import Connector
from pdproxy.core.api import Api
from pdproxy.core.fleet import Fleet, Lease
from pdproxy.core.headers import HeaderList
from pdproxy.core.instance import Instance, Role
from pdproxy.core.jsonfields import Raw
from pdproxy.core.load import Cost
from pdproxy.dispatch.ports import Observer
from pdproxy.errors import PDProxyError, UpstreamError
from pdproxy.tasks import spawn
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.limits import Timeouts
from pdproxy.upstream.response import Response

logger = logging.getLogger(__name__)

# Decoders that are asked to release one handle: one may be down, two at once are rare.
MAX_ASKED = 2
# In the end, for those that wait: a release takes a decoder some milliseconds.
CLOSING_S = 2.0
MAX_REFUSAL_BYTES = 1 << 20  # a refusal is a sentence; what is longer is no answer of an engine
MAX_PAIRS = 10_000  # that have met: far more than a fleet has; then they meet again
OK, MULTIPLE_CHOICES, BAD_REQUEST = 200, 300, 400
# Nearly nothing is computed and nothing is held, so a release is no load.
_COST = Cost(requests=0)


class Action(StrEnum):
    """What became of a handle that was not decoded; a closed set, since it is a label."""

    RELEASED = "released"
    FAILED = "failed"  # no decoder took the release: the prefiller's own lease has to end
    EXPIRED = "expired"  # there was no time for it, likewise
    DROPPED = "dropped"  # too many were waiting, likewise


_MEANINGS = {
    Action.RELEASED: "a KV handle of {} was not used and has been released",
    Action.FAILED: "a KV handle of {} could not be released: it is held until its lease ends",
    Action.EXPIRED: "a KV handle of {} was not released in time: it is held until its lease ends",
    Action.DROPPED: "a KV handle of {} is not released: too many wait, or releases are off",
}


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """The operator's choices.

    Attributes:
        max_running: releases at once; 0 switches them off.
        max_waiting: releases that wait for their turn.
        limit_s: from the end of the request to the end of the release.
        meeting_s: before a release is sent again to a decoder that has not met the prefiller yet.
    """

    max_running: int = 32
    max_waiting: int = 4096
    limit_s: float = 10.0
    meeting_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Orphan:
    """A handle without a decode.

    Attributes:
        owner: the prefiller that holds the blocks.
        headers: of the request it was made for, for its key and its trace.
        model: raw, as the request named it; None if it did not.
    """

    handle: Raw
    owner: Instance
    headers: HeaderList
    request_id: str
    model: Raw | None


class Orphans:
    """Releases handles in tasks of its own, which no client's leaving ends."""

    def __init__(
        self,
        rules: ReleaseRules,
        client: EngineClient,
        fleet: Fleet,
        connector: Connector,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._client = client
        self._fleet = fleet
        self._connector = connector
        self._observer = observer
        self._clock = clock
        self._waiting: deque[tuple[Orphan, float]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._told: set[Action] = set()
        self._met: set[tuple[Instance, Instance]] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being released."""
        return not self._running

    def adopt(self, orphan: Orphan) -> None:
        """Release a handle soon; never waits, never raises."""
        if self._is_closed:
            self._end(orphan, Action.DROPPED)
            return
        until = self._clock() + self._rules.limit_s
        if len(self._running) < self._rules.max_running:
            task = spawn(self._work(orphan, until), name="release of KV handles")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        elif self._running and len(self._waiting) < self._rules.max_waiting:
            self._waiting.append((orphan, until))
        else:
            self._end(orphan, Action.DROPPED)

    async def close(self) -> None:
        """Release what waits, for at most CLOSING_S seconds, and end all tasks."""
        self._is_closed = True
        running = set(self._running)
        if running:
            await asyncio.wait(running, timeout=CLOSING_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        while self._waiting:
            self._end(self._waiting.popleft()[0], Action.EXPIRED)

    async def _work(self, orphan: Orphan, until: float) -> None:
        """Release one, then those that wait."""
        await self._release(orphan, until)
        while self._waiting:
            await self._release(*self._waiting.popleft())

    async def _release(self, orphan: Orphan, until: float) -> None:
        action = Action.EXPIRED
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                action = await self._ask_around(orphan)
        except TimeoutError:
            pass
        finally:
            self._end(orphan, action)

    async def _ask_around(self, orphan: Orphan) -> Action:
        """Ask one decoder, and another one if the first does not take it."""
        asked: list[Instance] = []
        while len(asked) < MAX_ASKED:
            others = self._fleet.available(Role.DECODE, asked)
            if not any(instance not in asked for instance in others):
                break
            with self._fleet.lease(Role.DECODE, _COST, avoid=asked) as lease:
                asked.append(lease.instance)
                try:
                    if await self._ask(orphan, lease):
                        return Action.RELEASED
                except PDProxyError as error:
                    logger.debug("%s did not release a handle: %s", lease.instance.label, error)
        return Action.FAILED

    async def _ask(self, orphan: Orphan, lease: Lease) -> bool:
        """Tell whether one decoder has released the handle.

        The first refusal of a decoder that has not met the prefiller only makes it shake hands; it
        tells of the handle with the next one, if nothing else keeps it busy (vLLM 0.32 with NIXL,
        seen on engines). Freeing twice does no harm.
        """
        status = await self._send(orphan, lease)
        pair = (orphan.owner, lease.instance)
        if status == BAD_REQUEST and pair not in self._met:
            await asyncio.sleep(self._rules.meeting_s)
            status = await self._send(orphan, lease)
            if len(self._met) >= MAX_PAIRS:
                self._met.clear()
            self._met.add(pair)
        return status == BAD_REQUEST or OK <= status < MULTIPLE_CHOICES

    async def _send(self, orphan: Orphan, lease: Lease) -> int:
        """Return the status of the answer; 0 for a stream that begins with an error."""
        limit_s = self._rules.limit_s
        response = await self._client.send(
            lease.instance.endpoint,
            "POST",
            Api.COMPLETIONS.value,
            [*orphan.headers, ("x-request-id", orphan.request_id)],
            self._connector.release_body(orphan.model, orphan.handle),
            timeouts=Timeouts(connect_s=limit_s, head_s=limit_s, idle_s=limit_s),
        )
        with response:
            if response.status == BAD_REQUEST:
                await response.read(MAX_REFUSAL_BYTES)  # keeps the connection
            elif OK <= response.status < MULTIPLE_CHOICES:
                return 0 if b'"error"' in await _first_bytes(response) else response.status
            return response.status

    def _end(self, orphan: Orphan, action: Action) -> None:
        """Count what became of a handle; log the first of each kind."""
        self._observer.handle_abandoned(orphan.owner, action)
        if action in self._told:
            return
        self._told.add(action)
        level = logging.INFO if action is Action.RELEASED else logging.WARNING
        text = _MEANINGS[action]
        logger.log(level, "%s (from now on only counted)", text.format(orphan.owner.label))


async def _first_bytes(response: Response) -> bytes:
    """Wait for the first event of a stream.

    Raises:
        UpstreamError: there was none.
    """
    sink = _FirstBytes()
    response.pipe(sink)
    return await sink.came


class _FirstBytes:
    """A body sink that waits for the first bytes."""

    def __init__(self) -> None:
        self.came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def body_received(self, data: bytes) -> None:
        """Take bytes."""
        if not self.came.done():
            self.came.set_result(data)

    def body_ended(self) -> None:
        """Take the end: a decoder that generates has sent something."""
        self.body_received(b'"error"')

    def body_failed(self, error: UpstreamError) -> None:
        """Take a failure."""
        if not self.came.done():
            self.came.set_exception(error)
            self.came.exception()  # a waiter that was cancelled does not look
