"""The toy model: the next token is a hash of the whole effective prefix.

The effective prefix is what the KV cache holds, not what the request says: after a KV transfer the
prefiller's state goes in. So a wrong prompt, a wrong or used handle and a wrong
continuation each change every later token, and a test that compares texts sees it.

Pure: `Generation` is one choice of one prompt, advanced by the scheduler.
"""

import codecs
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pdproxy.sim import tokenizer
from pdproxy.sim.grammar import mixed
from pdproxy.sim.scripts import Grammar, document_in_prefix, script_in_prefix, script_of

_EOS_SHIFT = 24


def prefix_state(ids: Sequence[int], state: int = 0) -> int:
    """The state after more tokens; states of a prefix compose, whatever the pieces."""
    return zlib.crc32(array("I", ids).tobytes(), state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What of a request decides where an answer ends and what it may hold."""

    max_tokens: int
    min_tokens: int = 0
    seed: int = 0
    own_seed: int | None = None  # the request's; choice i of several is sampled with it + i
    eos_odds: int = 2048
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special: bool = True
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step added to one choice.

    Attributes:
        tokens: New token ids, the end token included.
        text: New text, whole characters only; may be empty.
        states: The prefix state before each token, from which logprobs are made up.
        finish_reason: Set on the last step only.
        stop_reason: A stop string, a stop token id, "recomputed", or None.
    """

    tokens: tuple[int, ...]
    text: str
    states: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Generation:
    """One choice being written.

    Args:
        prompt: The prompt's token ids.
        state: The prefix state that the KV cache holds after the prompt.
        sampling: Limits and stop rules.
        index: Which choice of several; it changes the first token only, so that each choice,
            continued alone, goes on as it would have.
        grammar: What the answer must follow, if anything.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        state: int,
        sampling: Sampling,
        *,
        index: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self._state = state
        # Zero if the KV cache holds what the prompt says; else scripts go wrong as well.
        self._fault = state ^ prefix_state(prompt)
        self._sampling = sampling
        self._index = index
        self._grammar = grammar
        self._script: list[int] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        hidden = () if sampling.include_stop else sampling.stop
        self._holdback = max(map(len, hidden), default=1) - 1
        self._reach = max(map(len, sampling.stop), default=1) - 1
        self._said = ""  # the end of the text that was handed out
        self._last = prompt[-1] if prompt else 0
        # The text of the whole prompt comes with the character that its last tokens begin.
        self._unsaid = ""
        if tokenizer.ends_inside_character(prompt):
            self._unsaid = self._decoder.decode(b"".join(tokenizer.TOKEN_BYTES[i] for i in prompt))
        self._thinking_left = self._open_thinking()
        if self._thinking_left is None:
            self._begin_answer()

    def advance(self, count: int = 1) -> Step:
        """Write up to `count` more tokens."""
        tokens: list[int] = []
        states: list[int] = []
        finish: tuple[str, str | int | None] | None = None
        while len(tokens) < count and finish is None:
            states.append(self._state)
            token = self._next()
            tokens.append(token)
            finish = self._accept(token)
        text = self._take_text(finish)
        reason, stop_reason = finish or (None, None)
        return Step(tuple(tokens), text, tuple(states), reason, stop_reason)

    def cut(self) -> Step:
        """End the choice without a new token, as an engine out of KV blocks does."""
        text, self._held = self._held, ""
        return Step((), text, (), "stop", "recomputed")

    def _open_thinking(self) -> int | None:
        """Reasoning tokens still to come, or None if no thinking block is open."""
        limit = self._sampling.thinking_tokens
        if not limit:
            return None
        for position in range(len(self.prompt) - 1, -1, -1):
            if self.prompt[position] == tokenizer.THINK_BEGIN:
                return max(0, limit - (len(self.prompt) - 1 - position))
            if self.prompt[position] in (tokenizer.THINK_END, tokenizer.TURN_END):
                return None
        return None

    def _begin_answer(self) -> None:
        """Reasoning is over, or there is none: a grammar or an open tool call sets what comes."""
        if self._grammar is not None:
            self._script = script_of(self._grammar, self._state)
            return
        if tokenizer.TOOLS in self.prompt:
            self._script = script_in_prefix([*self.prompt, *self.output], self._fault)
        elif tokenizer.ASSISTANT in self.prompt:
            self._script = document_in_prefix([*self.prompt, *self.output], self._fault)

    def _next(self) -> int:
        """The next token; a grammar, half a character and the end of thinking leave no choice."""
        if self._thinking_left == 0 and self._last not in tokenizer.TAIL_OF:
            return tokenizer.THINK_END
        if self._script is not None:
            return self._script.pop(0) if self._script else tokenizer.EOS
        if self._last in tokenizer.TAIL_OF:
            return tokenizer.TAIL_OF[self._last]
        salt, own_seed = self._sampling.seed, self._sampling.own_seed
        if own_seed is not None:
            salt ^= (own_seed + self._index) << 8
        elif not self.output and self._index:
            salt ^= self._index << 32
        value = mixed(self._state, salt)
        if (value >> _EOS_SHIFT) % self._sampling.eos_odds == 0 and self._may_end():
            return tokenizer.EOS
        return tokenizer.WRITABLE[value % len(tokenizer.WRITABLE)]

    def _may_end(self) -> bool:
        sampling = self._sampling
        if sampling.ignore_eos or self._thinking_left is not None:
            return False
        return len(self.output) >= sampling.min_tokens

    def _accept(self, token: int) -> tuple[str, str | int | None] | None:
        """Take a token into the prefix; the reasons if it ends the choice."""
        sampling = self._sampling
        self.output.append(token)
        self._last = token
        self._state = zlib.crc32(token.to_bytes(4, "little"), self._state)
        if token == tokenizer.EOS and (self._script is not None or not sampling.ignore_eos):
            return ("stop", None)
        enough = len(self.output) >= sampling.min_tokens
        stops = token in sampling.stop_token_ids and enough
        text = ""
        if not stops or sampling.include_stop:
            piece = tokenizer.token_bytes(token, skip_special=sampling.skip_special)
            text = self._decoder.decode(piece)
            if text:
                self._held += self._unsaid + text
                self._unsaid = ""
        if stops:
            return ("stop", token)
        self._track_thinking(token)
        is_late = len(self.output) > sampling.min_tokens
        if sampling.stop and is_late and (found := self._cut_at_stop(len(text))) is not None:
            return ("stop", found)
        return ("length", None) if len(self.output) >= sampling.max_tokens else None

    def _track_thinking(self, token: int) -> None:
        if self._thinking_left is None:
            return
        if token == tokenizer.THINK_END:
            self._thinking_left = None
            self._begin_answer()
        elif self._thinking_left:
            self._thinking_left -= 1

    def _cut_at_stop(self, size: int) -> str | None:
        """Cut the text at the first stop string that its last `size` characters complete."""
        text, said = self._said + self._held, len(self._said)
        found = [
            (at, stop)
            for stop in self._sampling.stop
            if (at := text.find(stop, max(0, len(text) - size - len(stop) + 1))) >= 0
        ]
        if not found or not size:
            return None
        at, stop = min(found)
        self._held = text[said : at + (len(stop) if self._sampling.include_stop else 0)]
        return stop

    def _take_text(self, finish: object) -> str:
        """Text that may be shown: the part that could become a stop string is held back."""
        keep = 0 if finish else self._holdback
        size = max(0, len(self._held) - keep)
        text, self._held = self._held[:size], self._held[size:]
        if self._reach:
            self._said = (self._said + text)[-self._reach :]
        return text


def logprob(state: int, token: int) -> float:
    """A made-up log probability, the same wherever this token follows this prefix."""
    return -(mixed(state, token + 1) % 3000 + 1) / 1000


def alternatives(state: int, token: int, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens: the chosen one first, then made-up ones below it."""
    base = logprob(state, token)
    ranked = [(token, base)]
    for rank in range(1, count):
        other = tokenizer.WRITABLE[mixed(state, -rank) % len(tokenizer.WRITABLE)]
        ranked.append((other, base - rank / 2))
    return ranked[: max(count, 0)]
