"""The prefiller's end of a request: its prompt is pinned, and a decoder fetches it."""

import secrets
from collections.abc import Mapping

from pdproxy.sim.handles import Handles, Pulled
from pdproxy.sim.jobs import Sequence
from pdproxy.sim.model import prefix_state
from pdproxy.sim.transfer import RemoteHandle, handle_params

# What the engine puts behind an answer's id to name one of its prompts.
_SUFFIXES = {"completions": "-{}", "responses": "_{}"}
_NOTHING = Pulled(0, is_valid=True, tokens=0)


class Handover:
    """Makes handles and answers those who come with one.

    Args:
        engine_id: This engine; handles of another one are refused.
        address: Where decoders reach it.
        handles: The pins.
    """

    def __init__(self, engine_id: str, address: tuple[str, int], handles: Handles) -> None:
        self.engine_id = engine_id
        self._address = address
        self._handles = handles

    def pin(self, sequence: Sequence, now_s: float) -> None:
        """Keep a finished choice's prompt; its table goes over to the pin.

        Every choice of every prompt stays pinned, but the answer carries one handle: that of the
        first prompt's last choice, as in vLLM.
        """
        job, table, ids = sequence.job, sequence.table, sequence.prompt.ids
        assert table is not None, "a running sequence holds blocks"
        request = job.request
        number = sequence.index // request.n
        name = request.request_id + _SUFFIXES.get(request.api, "").format(number)
        child = f"{sequence.child}_" if request.n > 1 else ""
        handle_id = f"{child}{name}-{secrets.token_hex(4)}"
        self._handles.pin(handle_id, table, prefix_state(ids), len(ids), now_s)
        sequence.table = None
        if number == 0 and sequence.child == request.n - 1:
            handle = RemoteHandle(self.engine_id, handle_id, tuple(table.blocks), *self._address)
            job.kv_params = handle_params(handle, len(ids), table.cached_tokens)
            if request.api == "responses":
                # vLLM leaves it out there.
                del job.kv_params["remote_prefill_cached_tokens"]

    def answer(self, body: Mapping[str, object], now_s: float) -> Pulled | None:
        """What a decoder's `pull`, `release` or `extend` gets; None for another engine's handle."""
        if body.get("engine_id") != self.engine_id:
            return None
        handle_id, blocks = str(body.get("request_id")), body.get("block_ids")
        if body.get("action") == "release":
            self._handles.release(handle_id)
            return _NOTHING
        if body.get("action") == "extend":
            self._handles.extend(handle_id, now_s)
            return _NOTHING
        return self._handles.pull(handle_id, blocks if isinstance(blocks, list) else [], now_s)
