"""What a model's engines can do, found out once per model, when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdproxy.core.jsonfields import encode
from pdproxy.core.plain import as_list, as_whole
from pdproxy.core.planner import Abilities
from pdproxy.core.recount import TOKENIZE
from pdproxy.dispatch.tokenizer import Ask

# What ends the reasoning of the models in use; an engine's tokenizer has one of them as a token.
REASONING_ENDS = ("</think>", "◁/think▷", "[/THINK]", "</seed:think>", "<|END_THINKING|>")
MAX_MODELS = 64


@dataclass(slots=True)
class _Entry:
    """What is known of one model's engines; None is "not seen yet"."""

    asked: Abilities | None = None
    gives_back: bool = False
    gives_ids: bool | None = None


class AbilityBook:
    """Remembers the abilities of models; asks an engine's /tokenize for what it does not know."""

    def __init__(self, reasoning_end_id: int | None = None) -> None:
        """Make a book; an id given here is that of every model."""
        self._given = reasoning_end_id
        self._entries: dict[str, _Entry] = {}

    def describe(self) -> dict[str, dict[str, bool | int | None]]:
        """Return what has been found out, by model, as plain values; None is "not known".

        Example: `{"llama": {"gives_back": True, "gives_token_ids": True, "reasoning_end_id": None,
        "max_model_len": 8192}}`.
        """
        return {model: self._described(entry) for model, entry in sorted(self._entries.items())}

    def note_recompute(self, model: str) -> None:
        """Learn that engines of a model give answers back."""
        entry = self._entry(model)
        if entry is not None:
            entry.gives_back = True

    def note_ids(self, model: str, *, are_given: bool) -> None:
        """Learn whether engines of a model give the token ids that they are asked for."""
        entry = self._entry(model)
        if entry is not None:
            entry.gives_ids = are_given

    def gives_back(self, model: str) -> bool:
        """Tell whether an engine of a model has given an answer back."""
        entry = self._entries.get(model)
        return entry is not None and entry.gives_back

    async def find(self, model: str, ask: Ask) -> Abilities:
        """Return the abilities of a model's engines; what no engine tells now is asked again.

        `ask` is `Tokenizer.ask`.
        """
        entry = self._entry(model)
        if entry is not None and entry.asked is not None:
            return entry.asked
        found = await self._ask(model, ask)
        if found is None:
            return Abilities(reasoning_end_id=self._given)
        if entry is not None:
            entry.asked = found
        return found

    def _entry(self, model: str) -> _Entry | None:
        """Return what is known of a model; None if there is no room for another."""
        entry = self._entries.get(model)
        if entry is None and len(self._entries) < MAX_MODELS:
            entry = self._entries[model] = _Entry()
        return entry

    def _described(self, entry: _Entry) -> dict[str, bool | int | None]:
        asked = entry.asked or Abilities(reasoning_end_id=self._given)
        return {
            "gives_back": entry.gives_back,
            "gives_token_ids": entry.gives_ids,
            "reasoning_end_id": asked.reasoning_end_id,
            "max_model_len": asked.max_model_len,
        }

    async def _ask(self, model: str, ask: Ask) -> Abilities | None:
        """Ask for each known end of reasoning, until one is a single token."""
        end_id, length = self._given, None
        for text in REASONING_ENDS:
            answer = await ask(TOKENIZE, encode(_question(model, text)))
            if answer is None:
                return None
            ids, length = as_list(answer.get("tokens")), as_whole(answer.get("max_model_len"))
            if end_id is None and len(ids) == 1:
                end_id = as_whole(ids[0])
            if end_id is not None:
                break
        return Abilities(reasoning_end_id=end_id, max_model_len=length or None)


def _question(model: str, text: str) -> Mapping[str, object]:
    question: dict[str, object] = {"prompt": text, "add_special_tokens": False}
    # A request that names no model gets the only one there is, and so does the question.
    return {"model": model, **question} if model else question
