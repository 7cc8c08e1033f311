"""How the rounds of one answer ended before it did: by whom, why, and how little they brought."""

from __future__ import annotations

import logging

from pdproxy.core.instance import Instance, Role
from pdproxy.core.retry import Verdict, judge
from pdproxy.dispatch.account import Account
from pdproxy.dispatch.attempt import failure_reason
from pdproxy.dispatch.generate import describe
from pdproxy.errors import (
    EngineAnswered,
    NoInstance,
    PDProxyError,
    RecomputeUnsupported,
    UpstreamError,
    untraced,
)

logger = logging.getLogger(__name__)

# New tokens up to which a round counts as one without progress: what a KV block holds by default.
LITTLE_PROGRESS = 16


class Cuts:
    """The cuts of one answer.

    Attributes:
        decoders: who did not end it; other ones are to go on with it.
        count: how many cuts there were.
        idle: how many of the last rounds in a row brought nothing, or little.
        last: what the last one was.
        is_pending: no round has followed the last one yet.
        is_lost: the last one was no giving back but a decoder that was lost, and it is not told yet
            what became of that.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.decoders: list[Instance] = []
        self.count = 0
        self.idle = 0
        self.last: PDProxyError | None = None
        self.is_pending = False
        self.is_lost = False

    def note(self, error: PDProxyError, decoder: Instance | None, *, made: int, kept: int) -> None:
        """Keep a cut in mind, and tell of it.

        Args:
            error: what cut the answer.
            decoder: whom.
            made: tokens that the round brought.
            kept: tokens of the answer so far.
        """
        assert decoder is not None, "an answer that is cut has a decoder"
        self.last = untraced(error)
        self.is_pending = True
        self.is_lost = isinstance(error, UpstreamError)
        self.count += 1
        self.idle = 0 if made > LITTLE_PROGRESS else self.idle + 1
        if decoder not in self.decoders:
            self.decoders.append(decoder)
        account = self._account
        account.cuts.append(f"{decoder.label}/{failure_reason(error)}")
        logger.log(
            logging.WARNING if self.is_lost else logging.INFO,
            "request %s: round %d, decoder %s did not end the answer, %d tokens are kept: %s",
            account.request_id,
            account.rounds,
            decoder.label,
            kept,
            describe(error),
        )

    def cause(self, error: PDProxyError) -> PDProxyError:
        """Return why the answer ends, if a round that was to go on with it failed by `error`.

        That no instance is left is why it cannot go on, not why it ends; and what an engine refuses
        here is not what the client sent.
        """
        if isinstance(error, NoInstance) and isinstance(self.last, UpstreamError):
            self.last.detail = f"{self.last.detail}; {error.message}"
            return self.last
        is_refused = judge(Role.DECODE, error) is Verdict.GIVE_UP
        if isinstance(error, NoInstance) or (isinstance(error, EngineAnswered) and is_refused):
            why = f"the answer cannot be continued: {error.message}"
            return RecomputeUnsupported(why, quote=error.quote)
        return error
