"""What the events of a cut choice leave open, asked of an engine's tokenizer.

Rules: where the ids are known, those count whose text is known. An event of several tokens does not
tell whether it ends with half a character, and an engine that was lost has text that it held back;
what the ids say tells both. Where no ids are known, the tokens of the text count: an engine's own
count has those of half a character in it, and events have no count at all.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from pdproxy.core.answer import Answer, ChoiceAnswer
from pdproxy.core.api import Api, GenerateRequest
from pdproxy.core.jsonfields import JsonFields, Raw, raw
from pdproxy.core.plain import Object, as_text, as_whole
from pdproxy.core.prompts import prompt_text, with_open_turn
from pdproxy.core.resume import output_limit
from pdproxy.core.stops import holds_back
from pdproxy.core.traits import has_media, may_call_tools
from pdproxy.core.withheld import lags_behind

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

_HALF_CHARACTER = "\ufffd"
_MAX_HALF_TOKENS = 3  # a character has at most four bytes, and a token at least one
_MAX_TRIES = 12  # questions about one cut
# What of a chat request decides how its messages become a prompt.
_RENDERING = ("add_special_tokens", "chat_template", "chat_template_kwargs", "model", "tools")


@dataclass(frozen=True, slots=True)
class Question:
    """A request to an engine's tokenizer."""

    path: str
    fields: JsonFields


Asking = Generator[Question, Object | None, None]


def recount(request: GenerateRequest, answer: Answer, index: int, end_id: int | None) -> Asking:
    """Ask what is open about a cut choice, and note it there.

    A generator of questions; each is sent its answer, or None if no engine gives one.
    `end_id` is the token that ends reasoning, None if unknown.
    """
    choice = answer.choice(index)
    if choice.tool_calls:
        choice.spelled = ""
        if choice.has_all_ids:
            yield from _spell(request, choice, end_id)
        return
    if not (choice.text or choice.thoughts):
        return
    if choice.has_all_ids:
        yield from _Ids(request, choice, end_id).match()
        return
    limit = output_limit(request)
    is_at_limit = limit is not None and choice.counted >= limit
    # What an engine held back comes as an event without a token.
    outputs = choice.outputs - holds_back(request)
    if not is_at_limit and not 0 < choice.counted <= outputs:
        yield from _count(request, answer, choice, outputs)


class _Ids:
    """Finds out which ids the text has, and what ids say that the text does not."""

    def __init__(self, request: GenerateRequest, choice: ChoiceAnswer, end_id: int | None) -> None:
        self._request = request
        self._choice = choice
        self._is_behind = lags_behind(request, choice) or choice.is_outrun
        self._text = (choice.text or choice.thoughts).lstrip()
        # A parser holds back, too: what may begin a tool call, or end the reasoning.
        is_parsed = may_call_tools(request) or (bool(choice.thoughts) and end_id is None)
        self._may_say_more = self._is_behind and not is_parsed
        self._first, self._last = self._range(end_id)

    def match(self) -> Asking:
        choice, whole = self._choice, 0
        if not (self._is_behind or choice.has_open_end):
            return
        for end in range(self._last, max(self._first, self._last - _MAX_TRIES), -1):
            said = yield self._question(end)
            if said is None:
                return
            text = as_text(said.get("prompt")).lstrip()
            if text.endswith(_HALF_CHARACTER):
                continue
            whole = whole or end
            if text == self._text or (self._may_say_more and text.startswith(self._text)):
                self._note(end, text[len(self._text) :])
                return
            if not text.startswith(self._text):
                break
        if whole and not self._is_behind:
            # Something that is no text is among the ids; still they end with a whole character.
            self._note(whole, "")

    def _range(self, end_id: int | None) -> tuple[int, int]:
        """Return where the ids of the text begin, and where they end at the latest."""
        choice = self._choice
        ids = choice.token_ids
        last = len(ids) if self._is_behind else max(choice.shown, choice.flushed)
        if end_id is None or end_id not in ids:
            return 0, last
        marker = ids.index(end_id)
        return (marker + 1, last) if choice.text else (0, min(marker, last))

    def _question(self, end: int) -> Question:
        ids = self._choice.token_ids[self._first : end].tolist()
        return Question(DETOKENIZE, _model(self._request) | {"tokens": raw(ids)})

    def _note(self, end: int, more: str) -> None:
        """Keep the ids of the text; what an engine held back of it waits here."""
        choice = self._choice
        choice.told = max(choice.told, choice.shown)
        choice.shown = end
        choice.flushed = min(choice.flushed, end)
        choice.is_flushed, choice.is_outrun = True, False
        if more:
            choice.held.is_reasoning = not choice.text
            choice.held.text += more


def _spell(request: GenerateRequest, choice: ChoiceAnswer, end_id: int | None) -> Asking:
    """Ask what all ids say, from which a tool call that was cut is read on."""
    ids = choice.token_ids.tolist()
    first = ids.index(end_id) + 1 if end_id in ids else 0
    for end in range(len(ids), max(first, len(ids) - _MAX_HALF_TOKENS - 1), -1):
        said = yield Question(DETOKENIZE, _model(request) | {"tokens": raw(ids[first:end])})
        if said is None:
            return
        text = as_text(said.get("prompt"))
        if not text.endswith(_HALF_CHARACTER):
            choice.spelled, choice.spelled_ids = text, end
            return


def _count(request: GenerateRequest, answer: Answer, choice: ChoiceAnswer, least: int) -> Asking:
    """Count the tokens of the text as part of a prompt, which it is about to be."""
    question = _rendered(request, choice)
    if question is None or not answer.prompt_tokens:
        return
    said = yield question
    total = None if said is None else as_whole(said.get("count"))
    if total is None:
        return
    tokens = total - answer.prompt_tokens
    if not choice.counted:
        choice.outputs = tokens if tokens >= least else choice.outputs
    elif choice.counted - _MAX_HALF_TOKENS <= tokens <= choice.counted:
        choice.outputs = choice.counted = tokens


def _rendered(request: GenerateRequest, choice: ChoiceAnswer) -> Question | None:
    """Return the question for the prompt with the text behind it; None if there is no such form."""
    fields = request.fields
    if choice.thoughts or has_media(request) or fields.get("truncate_prompt_tokens") is not None:
        return None
    if request.api is Api.COMPLETIONS:
        prompt = prompt_text(request)
        special = fields.get("add_special_tokens")
        kept = _model(request) | ({} if special is None else {"add_special_tokens": special})
        text = None if prompt is None else raw(prompt + choice.text)
        return None if text is None else Question(TOKENIZE, kept | {"prompt": text})
    messages = with_open_turn(request, choice)
    if messages is None:
        return None
    turn = {"continue_final_message": Raw(b"true"), "add_generation_prompt": Raw(b"false")}
    kept = {name: fields[name] for name in _RENDERING if name in fields}
    return Question(TOKENIZE, {**kept, **turn, "messages": messages})


def _model(request: GenerateRequest) -> dict[str, Raw]:
    name = request.fields.get("model")
    return {} if name is None else {"model": name}
