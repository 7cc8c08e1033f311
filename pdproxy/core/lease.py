"""A lease: the right to use one instance, and the charge for it.

Rule: a lease is released exactly once, on whatever way its request ends.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from pdproxy.core.load import Board, Cost
from pdproxy.core.member import Member
from pdproxy.core.members import Members
from pdproxy.core.policy import Reason


class Cuttable(Protocol):
    """An exchange with an engine, which may have ended already."""

    def cut(self) -> None:
        """End it early, as a failure."""
        ...


class Lease:
    """Made by `Fleet.lease` only; use it as a context manager, or close it on every way out.

    Attributes:
        instance: the one that may be used.
        reason: why it was chosen.
    """

    __slots__ = ("_board", "_cost", "_held", "_member", "_members", "instance", "reason")

    def __init__(
        self, members: Members, board: Board, member: Member, cost: Cost, reason: Reason
    ) -> None:
        self.instance = member.instance
        self.reason = reason
        self._members = members
        self._board = board
        self._member = member
        self._cost: Cost | None = cost
        self._held: Cuttable | None = None
        board.charge(member.slot, cost)
        member.leases += 1
        member.live.add(self)

    @property
    def cost(self) -> Cost | None:
        """What is charged now; None once closed."""
        return self._cost

    def recharge(self, cost: Cost) -> None:
        """Charge `cost` in place of what is charged; a closed lease stays closed."""
        charged = self._cost
        if charged is None:
            return
        # In this order no reader of the board sees less than what is held.
        self._board.charge(self._member.slot, cost)
        self._board.release(self._member.slot, charged)
        self._cost = cost

    def hold(self, exchange: Cuttable) -> None:
        """Let `exchange` be cut with the lease; the latest one is."""
        self._held = exchange
        if self._member.is_cut:
            exchange.cut()

    def cut(self) -> None:
        """Cut the exchange that runs by it, if any; whoever holds the lease closes it then."""
        if self._held is not None:
            self._held.cut()

    def close(self) -> None:
        """Release what is charged; closing again has no effect."""
        charged = self._cost
        if charged is None:
            return
        self._cost = None
        self._board.release(self._member.slot, charged)
        self._held = None
        self._member.live.discard(self)
        self._member.leases -= 1
        if not self._member.leases:
            self._members.last_lease_closed(self._member)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
