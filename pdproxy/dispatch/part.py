"""The way back of a further round: what it brings is stitched to the answer so far."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.core.pulse import Pulse
from pdproxy.core.seam import Seam
from pdproxy.dispatch.ports import Downstream, Headers
from pdproxy.errors import RecomputeUnsupported


class Part:
    """A Downstream whose client is the answer so far."""

    def __init__(
        self, downstream: Downstream, seam: Seam, deliver: Callable[[bytes], None], pulse: Pulse
    ) -> None:
        self._downstream = downstream
        self._seam = seam
        self._deliver = deliver
        self._pulse = pulse
        self._has_begun = False

    @property
    def is_committed(self) -> bool:
        """Whether this round has brought anything; until then it may be tried elsewhere."""
        return self._has_begun

    @property
    def is_congested(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._downstream.is_congested

    async def start(self, _headers: Headers) -> None:
        """The head was sent in the first round."""
        self._has_begun = True

    def write(self, block: bytes) -> None:
        """Write what the seam makes of a block."""
        stitched = self._seam.rewrite(block)
        if stitched:
            self._deliver(stitched)
        else:
            self._pulse.is_hidden = True

    async def drain(self) -> None:
        """Wait for the client."""
        await self._downstream.drain()

    async def respond(self, _status: int, _headers: Headers, _body: bytes) -> None:
        """Refuse: rounds are always streamed."""
        raise RecomputeUnsupported("the decoder does not stream, so its answer cannot be joined")
