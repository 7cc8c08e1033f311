"""Where one exchange stands with the admission: what it waits for before each of its legs."""

from __future__ import annotations

import math
from collections.abc import Collection

from pdproxy.core.admission import Need, Place
from pdproxy.core.api import GenerateRequest
from pdproxy.core.instance import Instance, Role
from pdproxy.core.load import Cost
from pdproxy.dispatch.legs import Call, Handoff, Tools, decode_cost, prefill_cost


class Standing:
    """The places that one prompt takes, from the first wait to the decoder's charge."""

    def __init__(self, tools: Tools, request: GenerateRequest, call: Call) -> None:
        self._tools = tools
        self._request = request
        self._call = call
        self._place: Place | None = None

    async def take_place(self) -> None:
        """Wait until prefillers and decoders can take the prompt.

        Raises:
            Overloaded: too many wait, or it waited too long.
        """
        tools, request, visit = self._tools, self._request, self._call.visit
        if visit is None or not tools.admission.minds_instances:
            return
        account = self._call.account
        cost = decode_cost(tools, request, prefill_cost(tools, request).compute_tokens)
        has_begun = bool(account.prefill_attempts or account.decode_attempts)
        need = Need(not request.is_decode_only, cost.kv_tokens)
        self._place = await tools.admission.place(visit, need, has_begun=has_begun)

    async def await_room(self, handoff: Handoff, cost: Cost) -> None:
        """Wait for a decoder with room, now that the size is known.

        Half of the handle's life is left for what comes after.
        """
        tools, visit = self._tools, self._call.visit
        if visit is None or self._place is None:
            return
        self.leave()
        limit_s = math.inf
        if handoff.handle is not None:
            age_s = tools.clock() - handoff.made_at
            limit_s = max(0.0, tools.rules.kv_handle_ttl_s - age_s) / 2
        need = Need(prefill=False, kv_tokens=cost.kv_tokens, is_due=True)
        self._place = await tools.admission.place(visit, need, has_begun=True, limit_s=limit_s)

    def prefill_leased(self) -> None:
        """A prefiller is charged, or none will be."""
        if self._place is not None:
            self._place.prefill_leased()

    def leave(self) -> None:
        """A decoder is charged, or none will be."""
        if self._place is not None:
            self._place.decode_leased()

    def avoided(self, role: Role, kv_tokens: int = 0) -> Collection[Instance]:
        """Return who is not to be asked now: paused, or full, as long as there are others."""
        tools = self._tools
        paused = tools.pauses.current(tools.clock())
        full = tools.admission.avoided(role, kv_tokens)
        return [*paused, *full] if full else paused
