"""What a model's engines can do, found out once per model, when it is first needed."""

from __future__ import annotations

from pdproxy.core.fleet import Fleet
from pdproxy.core.headers import HeaderList
from pdproxy.core.instance import Role
from pdproxy.core.jsonfields import decode, encode
from pdproxy.core.planner import Abilities
from pdproxy.errors import UpstreamError
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.limits import Timeouts

# What ends the reasoning of the models in use; an engine's tokenizer has one of them as a token.
REASONING_ENDS = ("</think>", "◁/think▷", "[/THINK]", "</seed:think>", "<|END_THINKING|>")
MAX_MODELS = 64
_TIMEOUTS = Timeouts(connect_s=5, head_s=5, idle_s=5)
_MAX_BYTES = 64 * 1024
_OK = 200


class AbilityBook:
    """Remembers the abilities of models; asks an engine's /tokenize for what it does not know."""

    def __init__(self, reasoning_end_id: int | None = None) -> None:
        """Make a book; an id given here is that of every model, and nothing is asked."""
        self._given = reasoning_end_id
        self._known: dict[str, Abilities] = {}
        self._giving_back: set[str] = set()

    def known(self) -> dict[str, Abilities]:
        """Return what has been found out, by model."""
        return dict(self._known)

    def note_recompute(self, model: str) -> None:
        """Learn that engines of a model give answers back."""
        if len(self._giving_back) < MAX_MODELS:
            self._giving_back.add(model)

    def gives_back(self, model: str) -> bool:
        """Tell whether an engine of a model has given an answer back."""
        return model in self._giving_back

    async def find(
        self, client: EngineClient, fleet: Fleet, model: str, headers: HeaderList
    ) -> Abilities:
        """Return the abilities of a model's engines."""
        if self._given is not None:
            return Abilities(reasoning_end_id=self._given)
        found = self._known.get(model)
        if found is None:
            found = Abilities(reasoning_end_id=await _reasoning_end(client, fleet, model, headers))
            if len(self._known) < MAX_MODELS:
                self._known[model] = found
        return found


async def _reasoning_end(
    client: EngineClient, fleet: Fleet, model: str, headers: HeaderList
) -> int | None:
    for text in REASONING_ENDS:
        ids = await _tokenize(client, fleet, encode(_question(model, text)), headers)
        if ids is None:
            return None
        if len(ids) == 1:
            return ids[0]
    return None


def _question(model: str, text: str) -> dict[str, object]:
    return {"model": model, "prompt": text, "add_special_tokens": False}


async def _tokenize(
    client: EngineClient, fleet: Fleet, body: bytes, headers: HeaderList
) -> list[int] | None:
    """Return the ids of a text; None if no engine tells."""
    for instance in fleet.available(Role.DECODE):
        try:
            response = await client.send(
                instance.endpoint, "POST", "/tokenize", headers, body, timeouts=_TIMEOUTS
            )
            with response:
                answer = await response.read(_MAX_BYTES)
        except UpstreamError:
            continue
        if response.status == _OK:
            plain = decode(answer)
            ids = plain.get("tokens") if isinstance(plain, dict) else None
            return ids if isinstance(ids, list) else None
    return None
