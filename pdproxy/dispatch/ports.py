"""What dispatch needs from the outside: somewhere to write the answer, someone to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdproxy.core.instance import Instance, Role
from pdproxy.core.policy import Reason
from pdproxy.core.retry import Phase
from pdproxy.dispatch.account import Account

Headers = Sequence[tuple[str, str]]


class Downstream(Protocol):
    """The way back to one client.

    Nothing is sent before `start` or `respond`; after `start` only whole SSE events are written.
    """

    @property
    def is_committed(self) -> bool:
        """Whether the client was sent anything."""
        ...

    @property
    def is_congested(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        ...

    async def start(self, headers: Headers) -> None:
        """Send status 200 and the head of an event stream. `headers` are the engine's."""
        ...

    def write(self, block: bytes) -> None:
        """Send whole events at once, never blocking; watch `is_congested`."""
        ...

    async def drain(self) -> None:
        """Wait until the client caught up.

        Raises:
            ClientStalled: it did not within the write stall timeout.
        """
        ...

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer that is no stream."""
        ...


class Observer(Protocol):
    """Who is told what happens; calls are synchronous and cheap."""

    def attempt_finished(
        self, instance: Instance, outcome: str, seconds: float, reason: str = ""
    ) -> None:
        """One attempt of a leg ended; `outcome` is "success", "error" or "abandoned"."""
        ...

    def routed(self, role: Role, reason: Reason) -> None:
        """An instance was chosen for a leg."""
        ...

    def failed_over(self, role: Role, phase: Phase, result: str) -> None:
        """A leg that failed elsewhere ended: "recovered", "failed" or "abandoned"."""
        ...

    def prefill_skipped(self, reason: str) -> None:
        """A request is computed by a decoder alone."""
        ...

    def pulse_full(self, account: Account) -> None:
        """The counts of a stream's pulse are due to be taken."""
        ...

    def retried(self, role: Role, reason: str) -> None:
        """A leg is tried again."""
        ...

    def ran_out(self, instance: Instance) -> None:
        """A decoder gave an answer back for lack of KV cache."""
        ...

    def recompute_ended(self, decoder: str, result: str) -> None:
        """A further round of an answer ended: "resumed", "cut", "failed" or "limit"."""
        ...

    def recomputed_tokens(self, model: str, tokens: int) -> None:
        """A further round computed so many prompt tokens again."""
        ...

    def handle_missing(self, instance: Instance) -> None:
        """A prefiller answered without a KV handle, so the decoder computes the prompt."""
        ...

    def handle_abandoned(self, instance: Instance, action: str) -> None:
        """A KV handle was not used; `action` is one of `orphans.Action`."""
        ...

    def prefill_reply_lost(self, instance: Instance) -> None:
        """A prefill may have been computed whose reply did not come: its blocks stay held."""
        ...
