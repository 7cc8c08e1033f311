"""How a cut answer goes on: one pure decision of request, answer so far, and engine.

The first row that fits decides. "Repeatable" is an explicit `temperature: 0`, or a seed.

| the choice was cut | goes on by |
|---|---|
| at its limit of tokens | nothing: it is complete, finish reason `length` |
| in beam search | give up |
| before any output was delivered | AGAIN: the same request |
| in a tool call or a begun grammar, nothing delivered (not streamed) | AGAIN |
| in a tool call, ids and markup known, no grammar, no stop string | CALL: ids, read on here |
| in a tool call or a begun grammar, repeatable | REPLAY: the same, known output is skipped |
| in JSON of a known schema, ids known, no tools or media | JSON: ids, no grammar, checked here |
| in a tool call or a begun grammar, else | give up |
| completions, token ids known | IDS: prompt ids + output ids |
| completions, an engine was lost with text, repeatable (or not delivered) | REPLAY (or AGAIN) |
| completions, an engine was lost with text, else | give up |
| completions, a text prompt | TEXT: prompt + output |
| completions, nothing delivered | AGAIN |
| completions, repeatable | REPLAY |
| completions, else | give up |
| chat, nothing delivered, a whole reply may have the text in the wrong field | AGAIN |
| chat, in reasoning, ids and the end token of reasoning known | THINK: ids, up to that token |
| chat, in reasoning, nothing delivered | AGAIN |
| chat, in reasoning, repeatable | REPLAY |
| chat, in reasoning, else | give up |
| chat, in content, ids known, nothing but text can follow | IDS |
| chat, in content, an engine was lost with text | as with completions |
| chat, in content, reasoned without ids, repeatable (or not delivered) | REPLAY (or AGAIN) |
| chat, in content, the last message can be gone on with | TURN: messages + open assistant turn |
| chat, in content, nothing delivered | AGAIN |
| chat, in content, repeatable | REPLAY |
| chat, in content, else | give up |

Why: a grammar starts at its root and a tool call is parsed from its start, so no engine enters
either in the middle; the rest of a call can be asked for as text, and read here, and that of JSON,
and checked here. A template that is
given reasoning closes it; only ids are exact. An engine that holds back text for the sake of stop
strings may be lost with it: the text that came then ends anywhere, and ids tell of text that never
came, unless `recount` found out what they say. Without ids nothing tells how many tokens reasoning
took, and so how many are left.
Source: vLLM 0.32, measured cut by cut on engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.core.answer import Answer, ChoiceAnswer, Phase
from pdproxy.core.api import Api, GenerateRequest
from pdproxy.core.call_markup import read_on
from pdproxy.core.json_rest import JsonRest
from pdproxy.core.plain import as_objects, as_text, plain
from pdproxy.core.prompts import prompt_ids, prompt_text
from pdproxy.core.resume import (
    Resume,
    Way,
    again,
    by_call,
    by_ids,
    by_json,
    by_text,
    by_thought,
    by_turn,
    output_limit,
    with_own_seed,
)
from pdproxy.core.stops import holds_back
from pdproxy.core.traits import (
    asked_schema,
    has_grammar,
    has_media,
    is_repeatable,
    may_call_tools,
)
from pdproxy.core.withheld import lags_behind

__all__ = [
    "Abilities",
    "Complete",
    "GiveUp",
    "Plan",
    "Resume",
    "Way",
    "note_echo",
    "plan",
]


_IN_A_TOKEN = "text that a lost decoder held back for a stop string is not known"


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is left to generate."""

    finish_reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It cannot be continued; `why` completes "the answer cannot be continued: ..."."""

    why: str


Plan = Resume | Complete | GiveUp


@dataclass(frozen=True, slots=True)
class Abilities:
    """What is known of a model's engines.

    Attributes:
        reasoning_end_id: the token that ends reasoning; None if unknown or there is none.
        max_model_len: tokens of prompt and output together that the model takes, if known.
    """

    reasoning_end_id: int | None = None
    max_model_len: int | None = None


def plan(
    request: GenerateRequest,
    answer: Answer,
    index: int,
    abilities: Abilities,
    *,
    is_delivered: bool,
) -> Plan:
    """Return how choice `index` goes on.

    `is_delivered` tells whether the client has seen the answer so far; one that does not stream
    has not, so its parts may be made again.
    """
    found = _plan(_Cut(request, answer, index, abilities, is_delivered))
    return with_own_seed(found, request, index) if isinstance(found, Resume) else found


def _plan(cut: _Cut) -> Plan:  # noqa: PLR0911 - one return per group of rows
    request = cut.request
    phase = cut.choice.phase(cut.abilities.reasoning_end_id)
    if phase is not Phase.NOTHING and cut.is_at_limit:
        return Complete("length")
    if plain(request.fields.get("use_beam_search")) is True:
        return GiveUp("beams cannot be taken up again")
    if phase is Phase.NOTHING:
        return again(request, Way.AGAIN)
    if phase is Phase.TOOL_CALL:
        return cut.tool_call()
    if phase is Phase.CONTENT and cut.choice.text and has_grammar(request):
        return cut.under_grammar()
    if request.api is Api.COMPLETIONS:
        return cut.completion()
    return cut.reasoning() if phase is Phase.REASONING else cut.content()


def note_echo(request: GenerateRequest, answer: Answer) -> None:
    """Mark the text that repeats the prompt, so that it is not taken for output."""
    if plain(request.fields.get("echo")) is not True:
        return
    prompt = prompt_text(request)
    if request.api is Api.CHAT:
        messages = as_objects(plain(request.fields.get("messages")))
        prompt = as_text(messages[-1].get("content")) if messages else ""
    for choice in answer.choices.values():
        if prompt and str(choice.content).startswith(prompt):
            choice.echoed = len(prompt)
            choice.entries = max(0, choice.entries - answer.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Cut:
    """One cut choice, and all that the decision depends on."""

    request: GenerateRequest
    answer: Answer
    index: int
    abilities: Abilities
    is_delivered: bool

    @property
    def choice(self) -> ChoiceAnswer:
        return self.answer.choice(self.index)

    @property
    def is_at_limit(self) -> bool:
        """Whether no token is left of the client's limit, or of what the model takes."""
        limit, room = output_limit(self.request), self.abilities.max_model_len
        choice = self.choice
        tokens = choice.tokens
        if choice.has_all_ids and choice.is_flushed:
            tokens = max(tokens, len(choice.token_ids))
        elif choice.has_all_ids:
            ids = choice.resumable_ids(self.abilities.reasoning_end_id)
            tokens = max(tokens, len(ids), choice.spelled_ids)
        is_full = room is not None and self.answer.prompt_tokens + tokens >= room
        return is_full or (limit is not None and tokens >= limit)

    @property
    def lags(self) -> bool:
        """Whether text that was generated is lost, and the text that came may end in a token."""
        return lags_behind(self.request, self.choice)

    @property
    def is_uncounted(self) -> bool:
        """Whether nothing tells how many tokens the text has; what opens reasoning counts, too."""
        choice = self.choice
        outputs = choice.outputs - holds_back(self.request)
        is_counted = choice.has_all_ids or 0 < choice.counted <= outputs
        return bool(choice.thoughts) and not is_counted

    @property
    def has_ids(self) -> bool:
        """Whether the ids of prompt and output are known, and say no more than the text."""
        choice = self.choice
        is_known = choice.has_all_ids and not self.lags and not choice.is_outrun
        return is_known and prompt_ids(self.request, self.answer) is not None

    def from_start(self, why: str) -> Plan:
        """Make the answer again, if the client has seen none of it or will see the same."""
        if not self.is_delivered:
            return again(self.request, Way.AGAIN)
        if is_repeatable(self.request):
            return again(self.request, Way.REPLAY)
        return GiveUp(why)

    def tool_call(self) -> Plan:
        request, choice = self.request, self.choice
        is_free = not (has_grammar(request) or has_media(request) or request.stops)
        is_open = is_free and self.is_delivered and self.has_ids
        if is_open and read_on(choice.spelled, choice.tool_calls) is not None:
            end_id, room = self.abilities.reasoning_end_id, self.abilities.max_model_len
            return by_call(request, self.answer, self.index, end_id=end_id, room=room)
        return self.from_start("it was cut inside a sampled tool call, which cannot be entered")

    def under_grammar(self) -> Plan:
        request, schema = self.request, asked_schema(self.request)
        is_free = not (may_call_tools(request) or has_media(request) or is_repeatable(request))
        is_open = is_free and self.is_delivered and self.has_ids
        if is_open and JsonRest.behind(self.choice.text, schema) is not None:
            end_id, room = self.abilities.reasoning_end_id, self.abilities.max_model_len
            return by_json(request, self.answer, self.index, end_id=end_id, room=room)
        return self.from_start("it was cut inside sampled output under a grammar")

    def completion(self) -> Plan:
        if self.has_ids:
            return self._by_ids()
        if self.lags:
            return self.from_start(_IN_A_TOKEN)
        prompt = prompt_text(self.request)
        if prompt is not None:
            return by_text(self.request, self.choice, prompt)
        return self.from_start("the prompt is no text, and not all ids of the output are known")

    def reasoning(self) -> Plan:
        end_id, room = self.abilities.reasoning_end_id, self.abilities.max_model_len
        if self._is_in_doubt:
            return again(self.request, Way.AGAIN)
        if end_id is not None and self.has_ids and not has_media(self.request):
            return by_thought(self.request, self.answer, self.index, end_id=end_id, room=room)
        return self.from_start(
            "it was cut inside sampled reasoning, and not all of its token ids are known"
            if not self.has_ids
            else "it was cut inside sampled reasoning, and ids alone cannot go on with it"
        )

    def content(self) -> Plan:
        request, end_id = self.request, self.abilities.reasoning_end_id
        if self._is_in_doubt:
            return again(request, Way.AGAIN)
        is_plain = not (may_call_tools(request) or has_grammar(request) or has_media(request))
        # Without a limit of its own a completion would end where chat has no end.
        has_end = output_limit(request) is not None or self.abilities.max_model_len is not None
        if is_plain and has_end and self.has_ids:
            return self._by_ids()
        if self.lags:
            return self.from_start(_IN_A_TOKEN)
        if self.is_uncounted and (not self.is_delivered or is_repeatable(request)):
            return self.from_start("")
        turn = by_turn(request, self.choice, end_id=end_id)
        return turn or self.from_start("the last message is an open turn that is not plain text")

    @property
    def _is_in_doubt(self) -> bool:
        """Whether a whole reply may hold a tool call, or output under a grammar, as other text."""
        choice, end_id = self.choice, self.abilities.reasoning_end_id
        if self.is_delivered or not choice.is_from_whole:
            return False
        ids = choice.token_ids
        is_misread = not choice.text and end_id in ids and ids[-1] != end_id
        return is_misread or may_call_tools(self.request) or has_grammar(self.request)

    def _by_ids(self) -> Resume:
        end_id, room = self.abilities.reasoning_end_id, self.abilities.max_model_len
        kept = self.choice.resumable_ids(end_id)
        return by_ids(self.request, self.answer, kept, end_id=end_id, room=room)
