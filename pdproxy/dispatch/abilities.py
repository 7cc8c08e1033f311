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
        """Return the abilities of a model's engines; what no engine tells now is asked again."""
        found = self._known.get(model)
        if found is not None:
            return found
        found = await self._ask(client, fleet, model, headers)
        if found is None:
            return Abilities(reasoning_end_id=self._given)
        if len(self._known) < MAX_MODELS:
            self._known[model] = found
        return found

    async def _ask(
        self, client: EngineClient, fleet: Fleet, model: str, headers: HeaderList
    ) -> Abilities | None:
        """Ask for each known end of reasoning, until one is a single token."""
        end_id, length = self._given, None
        for text in REASONING_ENDS:
            answer = await _tokenize(client, fleet, encode(_question(model, text)), headers)
            if answer is None:
                return None
            ids, length = answer.get("tokens"), answer.get("max_model_len")
            if end_id is None and isinstance(ids, list) and len(ids) == 1:
                end_id = ids[0]
            if end_id is not None:
                break
        return Abilities(
            reasoning_end_id=end_id, max_model_len=length if isinstance(length, int) else None
        )


def _question(model: str, text: str) -> dict[str, object]:
    question: dict[str, object] = {"prompt": text, "add_special_tokens": False}
    # A request that names no model gets the only one there is, and so does the question.
    return {"model": model, **question} if model else question


async def _tokenize(
    client: EngineClient, fleet: Fleet, body: bytes, headers: HeaderList
) -> dict[str, object] | None:
    """Return what /tokenize says of a text; None if no engine tells."""
    for instance in fleet.available(Role.DECODE):
        try:
            response = await client.send(
                instance.endpoint, "POST", "/tokenize", headers, body, timeouts=_TIMEOUTS
            )
            with response:
                answer = await response.read(_MAX_BYTES)
            plain = decode(answer) if response.status == _OK else None
        except (UpstreamError, ValueError):
            continue
        if isinstance(plain, dict):
            return plain
    return None
