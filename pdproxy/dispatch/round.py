"""What one round of an answer is told, and what it tells the rounds around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdproxy.core.chunks import ChunkFacts
from pdproxy.core.instance import Instance
from pdproxy.core.jsonfields import JsonFields
from pdproxy.core.keeper import Keeper
from pdproxy.dispatch.account import Counts
from pdproxy.dispatch.legs import Handoff
from pdproxy.dispatch.ports import Headers
from pdproxy.dispatch.relay import StreamFacts


@dataclass(frozen=True, slots=True)
class CutReply:
    """A whole reply in which the choices of `indexes` were given back."""

    headers: Headers
    fields: JsonFields
    indexes: frozenset[int]


@dataclass(slots=True)
class Round:
    """What an exchange is told by the rounds around it, and what it tells them.

    Attributes:
        new_keeper: makes what notes the answer of one attempt as it passes; None if it is not to
            be continued.
        avoid: decoders to leave out while there are others.
        is_stuck: the last rounds brought little, so its prefill waits for its turn.
        prompt_tokens, cached_tokens: as the prefiller of this round counted.
        decoder: the decoder that was asked last, None if none was.
        cut: the whole reply that it gave back.
        facts: what the answer has said, None if there was none.
        counts: what the account has got from this round, None if nothing.
        is_enough: asked as the answer comes: once it says so, the rest is not wanted.
    """

    new_keeper: Callable[[], Keeper] | None = None
    avoid: Sequence[Instance] = ()
    is_stuck: bool = False
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    decoder: Instance | None = None
    cut: CutReply | None = None
    facts: StreamFacts | ChunkFacts | None = None
    counts: Counts | None = None
    is_enough: Callable[[], bool] | None = None

    def note(self, handoff: Handoff) -> None:
        """Keep what the prefill counted."""
        self.prompt_tokens = handoff.prompt_tokens
        self.cached_tokens = handoff.cached_tokens
