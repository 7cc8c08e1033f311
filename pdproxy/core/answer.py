"""The answer so far: what a client was given, kept so that a cut answer can be continued.

Rules: text that was delivered is never taken back; a token id counts once its text was delivered.
Ids behind that belong to half a character or to a token that shows nothing, and the next round
makes them again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from pdproxy.core.jsonfields import Raw

# So many pieces of text are joined into a longer one: a token costs an append, and a long answer
# is not kept as a small string for each.
_JOIN_AT = 256


class Phase(Enum):
    """Where a choice was cut."""

    NOTHING = auto()  # no output was delivered
    REASONING = auto()
    CONTENT = auto()
    TOOL_CALL = auto()


class Text:
    """Text that grows by pieces."""

    __slots__ = ("_joined", "_pieces")

    def __init__(self, start: str = "") -> None:
        self._joined: list[str] = []
        self._pieces = [start] if start else []

    def add(self, piece: str) -> None:
        """Append a piece that is not empty."""
        self._pieces.append(piece)
        if len(self._pieces) > _JOIN_AT:
            self._joined.append("".join(self._pieces))
            self._pieces.clear()

    def __str__(self) -> str:  # type: ignore[explicit-override] # typing.override is new in 3.12
        return "".join((*self._joined, *self._pieces))

    def __bool__(self) -> bool:
        return bool(self._joined or self._pieces)


@dataclass(slots=True)
class ToolCall:
    """One tool call as far as it was delivered."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Held:
    """Text that was generated but not delivered, since it may be the start of a stop string."""

    text: str = ""
    is_reasoning: bool = False


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice as far as it was delivered.

    Attributes:
        content: the text; of a chat message its `content`.
        reasoning: the reasoning text, under the name `reasoning_field`.
        held: text behind that which waits for what follows.
        token_ids: of all output up to the last delivered text, and the ids behind it.
        shown: how many of `token_ids` end with delivered text, and so with a whole character.
        started: how many of `token_ids` the round started behind.
        packed: how many ids there were when several came with one text: half a character may be
            among the last of them.
        told: how many ids were in delivered events, where that is more than `shown`.
        flushed: how many ids there were when text came without ids, as an engine sends what it
            held back when it gives a choice back. Half a character may be among the last of them.
        is_flushed: no text is held back by an engine: it gave the choice back, or was lost and
            what it held back is known by its ids.
        lags: the engine was asked so that it holds back text.
        is_outrun: the ids may tell of text that was not delivered, since an engine was lost with
            what it held back; a replay that is cut again does not tell how far it came.
        is_from_whole: it was read from a reply that was not streamed. Of such a reply the parsers
            look at the new text only, so its text may stand in the wrong field (vLLM 0.32).
        outputs: events with output: the least tokens there can be where an engine gives no ids.
        counted: tokens as such an engine counted them, those of half a character too; 0 if it
            did not say.
        has_all_ids: every output came with its ids.
        echoed: characters at the start that repeat the prompt (`echo`).
        next_offset: where the text of the next token stands, by the log-probabilities so far.
        entries: log-probabilities of output tokens so far, in delivered or waiting events.
        spelled: what all ids behind the reasoning say, markers included, so far as they end with a
            whole character; asked for where a tool call was cut, "" if it was not, or no engine
            told.
        spelled_ids: how many of `token_ids` that is.
        waiting: events that show nothing but tell of tokens, each with the number of ids up to it;
            they are delivered with the next text.
        finish_reason: None until it has ended.
    """

    content: Text = field(default_factory=Text)
    reasoning: Text = field(default_factory=Text)
    reasoning_field: str = "reasoning"
    held: Held = field(default_factory=Held)
    tool_calls: dict[int, ToolCall] = field(default_factory=dict)
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    shown: int = 0
    started: int = 0
    packed: int = 0
    told: int = 0
    flushed: int = 0
    is_flushed: bool = False
    lags: bool = False
    is_outrun: bool = False
    is_from_whole: bool = False
    outputs: int = 0
    counted: int = 0
    has_all_ids: bool = True
    echoed: int = 0
    next_offset: int = 0
    entries: int = 0
    spelled: str = ""
    spelled_ids: int = 0
    waiting: list[tuple[int, bytes]] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The generated content, delivered or held."""
        held = "" if self.held.is_reasoning else self.held.text
        return str(self.content)[self.echoed :] + held

    @property
    def thoughts(self) -> str:
        """The generated reasoning, delivered or held."""
        held = self.held.text if self.held.is_reasoning else ""
        return str(self.reasoning) + held

    @property
    def tokens(self) -> int:
        """Output tokens that count: those with text, at the end all of them."""
        if not self.has_all_ids:
            return self.counted or self.outputs
        if self.finish_reason is not None:
            return len(self.token_ids)
        return max(self.shown, self.flushed)

    @property
    def whole(self) -> int:
        """How many ids end with a whole, delivered character.

        Where all text of a round came without ids, only its last character is in doubt.
        """
        return self.shown if self.shown > self.started else max(self.shown, self.flushed)

    @property
    def has_open_end(self) -> bool:
        """Whether half a character may be among the last ids that count."""
        is_packed = self.packed >= self.shown > 0
        return is_packed or (self.shown == self.started and self.flushed > self.shown)

    def wait(self, event: bytes) -> None:
        """Let an event wait for the next text; its ids were noted."""
        self.waiting.append((len(self.token_ids), event))

    def released(self) -> list[bytes]:
        """Return the events that wait no longer: the text of their ids has come, or the end."""
        if not self.waiting:
            return []
        count = self.whole if self.finish_reason is None else len(self.token_ids)
        events = [event for ids, event in self.waiting if ids <= count]
        del self.waiting[: len(events)]
        return events

    def phase(self, reasoning_end_id: int | None) -> Phase:
        """Return where the choice stands.

        `reasoning_end_id` is the token that ends the model's reasoning, None if unknown.
        """
        if self.tool_calls:
            return Phase.TOOL_CALL
        if self.text:
            return Phase.CONTENT
        if not self.thoughts:
            return Phase.NOTHING
        return Phase.CONTENT if self.has_reasoned(reasoning_end_id) else Phase.REASONING

    def has_reasoned(self, reasoning_end_id: int | None) -> bool:
        """Tell whether the token that ends the reasoning is out, text behind it or not."""
        return reasoning_end_id is not None and reasoning_end_id in self.token_ids

    def resumable_ids(self, reasoning_end_id: int | None) -> list[int]:
        """Return the ids to continue from: those that end with a whole, delivered character.

        The token that ends the reasoning shows nothing, but what follows depends on it, so it
        is kept.
        """
        kept = self.whole
        marker = 0  # ids up to the end of the reasoning
        if reasoning_end_id is not None and reasoning_end_id in self.token_ids:
            marker = self.token_ids.index(reasoning_end_id) + 1
        if marker >= kept:
            # Behind it text has come without ids only, if at all.
            kept = max(marker, self.flushed) if self.text else marker
        return self.token_ids[:kept].tolist()


@dataclass(slots=True)
class Answer:
    """All choices of one answer, and what its events have in common.

    Attributes:
        identity: raw `id`, `created` and `model` of the first event.
        prompt_ids: raw list of the prompt's token ids, None if the engine gave none.
        prompt_tokens, cached_tokens: as the first prefill counted.
    """

    choices: dict[int, ChoiceAnswer] = field(default_factory=dict)
    identity: dict[str, Raw] = field(default_factory=dict)
    prompt_ids: Raw | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    def choice(self, index: int) -> ChoiceAnswer:
        """Return the choice of that index; a new one is empty."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = ChoiceAnswer()
        return found

    def give_back(self, indexes: Iterable[int]) -> None:
        """Note that the engine gave choices back, having sent what it held back of their text."""
        for index in self.choices.keys() & set(indexes):
            self.choices[index].is_flushed = True

    @property
    def tokens_by_ids(self) -> int | None:
        """All tokens that were generated, by their ids; None unless all output came with ids."""
        choices = self.choices.values()
        if not all(choice.has_all_ids for choice in choices):
            return None
        return sum(len(choice.token_ids) for choice in choices) or None

    def usage(self) -> dict[str, object]:
        """Return the usage of all rounds: the prompt once, every token once."""
        completion = sum(choice.tokens for choice in self.choices.values())
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage
