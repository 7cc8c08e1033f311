"""The request of a further round: the client's own, with the answer so far as part of its prompt.

Rules: what the client asked for stays (sampling, stops, tools, unknown fields); only the form that
carries the answer so far and the limits change. A round is a stream of one choice that tells its
token ids and its usage. The client's messages are sent again byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from pdproxy.core.answer import Answer, ChoiceAnswer
from pdproxy.core.api import Api, GenerateRequest
from pdproxy.core.jsonfields import JsonFields, Raw, raw
from pdproxy.core.plain import as_list, as_object, as_whole, plain
from pdproxy.core.prompts import joined_ids, prompt_ids, with_open_turn
from pdproxy.core.traits import GRAMMARS

_TRUE = Raw(b"true")
_FALSE = Raw(b"false")

# The completions API's own limit where none is given, or null (vLLM 0.32).
_COMPLETIONS_LIMIT = 16
# A round whose end of context is not known ends after so many tokens and is followed by another.
_UNTOLD_LIMIT = 1024
# Tokens of the shortest round: it must bring more than a part of a character.
_LEAST_PROGRESS = 4

# A further round has one choice and does not repeat the prompt; the prompt's log-probabilities
# came in the first round, and a stream may not ask for them.
_FIRST_ROUND_ONLY = frozenset({"n", "best_of", "echo", "prompt_logprobs"})

# Fields of a chat request that a completions request does not know or reads otherwise.
_CHAT_ONLY = frozenset(
    {
        *GRAMMARS,
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "function_call",
        "functions",
        "include_reasoning",
        "logprobs",
        "max_completion_tokens",
        "media_io_kwargs",
        "messages",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncate_prompt_tokens",
    }
)


class Way(Enum):
    """How the next round is asked for; `planner` says when."""

    AGAIN = auto()
    REPLAY = auto()
    IDS = auto()
    TEXT = auto()
    THINK = auto()
    CALL = auto()
    JSON = auto()
    TURN = auto()


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with `request`, a stream of one choice.

    Attributes:
        kept_ids: how many ids of the answer the next round starts behind; the rest is made again.
        stop_id: the token at which this round ends without ending the answer (THINK).
        has_own_limit: the limit of tokens is not the client's: at it the answer goes on.
    """

    way: Way
    request: GenerateRequest
    kept_ids: int = 0
    stop_id: int | None = None
    has_own_limit: bool = False


def asks_ids(request: GenerateRequest) -> bool:
    """Tell whether the client asks for token ids itself."""
    return request.fields.get("return_token_ids") == _TRUE


def with_ids(request: GenerateRequest) -> GenerateRequest:
    """Return the request of a first round, with token ids asked for if that changes nothing else.

    An engine that is asked for ids does not repeat the prompt's text (vLLM 0.32, `echo`).
    """
    is_echo = request.api is Api.COMPLETIONS and plain(request.fields.get("echo")) is True
    if asks_ids(request) or is_echo:
        return request
    return replace(request, fields={**request.fields, "return_token_ids": _TRUE})


def output_limit(request: GenerateRequest) -> int | None:
    """Return the client's limit of output tokens for one choice, None if there is none."""
    if request.api is Api.CHAT:
        limit = as_whole(plain(request.fields.get("max_completion_tokens")))
        return as_whole(plain(request.fields.get("max_tokens"))) if limit is None else limit
    limit = as_whole(plain(request.fields.get("max_tokens")))
    return _COMPLETIONS_LIMIT if limit is None else limit


def again(request: GenerateRequest, way: Way) -> Resume:
    """Ask for the same answer from its start."""
    return Resume(way, _next(request, request.fields, {}))


def with_own_seed(resume: Resume, request: GenerateRequest, index: int) -> Resume:
    """Return the round with the seed of its choice: i of several has the seed + i (vLLM 0.32)."""
    seed = as_whole(plain(request.fields.get("seed")))
    child = index % request.choices
    if seed is None or not child:
        return resume
    fields = {**resume.request.fields, "seed": raw(seed + child)}
    return replace(resume, request=replace(resume.request, fields=fields))


def by_ids(
    request: GenerateRequest,
    answer: Answer,
    kept: list[int],
    *,
    end_id: int | None,
    room: int | None,
) -> Resume:
    """Go on behind exact ids, on the completions API.

    `kept` are the ids of the output so far, `end_id` is the token that ends reasoning, `room` how
    many tokens of prompt and output the model takes; None if unknown.
    """
    ids = prompt_ids(request, answer)
    assert ids is not None, "checked by the planner"
    prompt, count = joined_ids(ids, kept)
    changes = {"prompt": prompt} | _limits(request, len(kept))
    own_limit: int | None = None
    fields: JsonFields = request.fields
    if request.api is Api.CHAT:
        changes |= _logprobs(fields)
        fields = {name: value for name, value in fields.items() if name not in _CHAT_ONLY}
        changes.pop("max_completion_tokens", None)
        limit = output_limit(request)
        if limit is None:
            own_limit = _UNTOLD_LIMIT if room is None else max(1, room - count)
        changes["max_tokens"] = raw(own_limit if limit is None else max(1, limit - len(kept)))
    if end_id is not None and end_id in kept:
        fields = _without(fields, "thinking_token_budget")
    # The ids are those of the prompt as it was truncated.
    fields = _without(fields, "truncate_prompt_tokens")
    asked = _next(request, fields, changes)
    asked = replace(asked, api=Api.COMPLETIONS, prompt_tokens=count, text_bytes=0)
    has_own_limit = own_limit is not None and room is None
    return Resume(Way.IDS, asked, kept_ids=len(kept), has_own_limit=has_own_limit)


def by_thought(
    request: GenerateRequest, answer: Answer, index: int, *, end_id: int, room: int | None
) -> Resume:
    """Go on behind exact ids up to the token that ends the reasoning.

    The thinking budget is the engine's to keep: it counts from the token that opened the thinking.
    """
    kept = answer.choice(index).resumable_ids(end_id)
    resume = by_ids(request, answer, kept, end_id=end_id, room=room)
    fields = resume.request.fields
    given = as_list(plain(fields.get("stop_token_ids")))
    least = as_whole(plain(fields.get("min_tokens"))) or 0
    limit = as_whole(plain(fields["max_tokens"])) or 1
    fields = _without(fields, "min_tokens", "include_stop_str_in_output")
    has_own_limit = resume.has_own_limit
    if least and (request.stops or given):
        # Until `min_tokens` nothing stops an engine, but no end of reasoning comes either. So the
        # round is asked for without both, and ends where the client's stops begin to count.
        given = []
        least = max(least, _LEAST_PROGRESS)
        has_own_limit |= least < limit
        fields = {**_without(fields, "stop"), "max_tokens": raw(min(least, limit))}
    asked = replace(resume.request, fields={**fields, "stop_token_ids": raw([*given, end_id])})
    # A client that stops there itself has its end there.
    stop_id = None if end_id in given else end_id
    return Resume(Way.THINK, asked, resume.kept_ids, stop_id, has_own_limit)


def by_call(
    request: GenerateRequest, answer: Answer, index: int, *, end_id: int | None, room: int | None
) -> Resume:
    """Go on behind exact ids in a tool call, whose markup is to be shown."""
    choice = answer.choice(index)
    kept = choice.token_ids[: choice.spelled_ids].tolist()
    resume = by_ids(request, answer, kept, end_id=end_id, room=room)
    fields = {**resume.request.fields, "skip_special_tokens": _FALSE}
    return replace(resume, way=Way.CALL, request=replace(resume.request, fields=fields))


def by_json(
    request: GenerateRequest, answer: Answer, index: int, *, end_id: int | None, room: int | None
) -> Resume:
    """Go on behind exact ids in JSON, without the grammar, which would begin at its start."""
    kept = answer.choice(index).resumable_ids(end_id)
    resume = by_ids(request, answer, kept, end_id=end_id, room=room)
    fields = _without(resume.request.fields, "response_format", *GRAMMARS)
    return replace(resume, way=Way.JSON, request=replace(resume.request, fields=fields))


def by_text(request: GenerateRequest, choice: ChoiceAnswer, prompt: str) -> Resume:
    """Go on behind the text, on the completions API."""
    changes = {"prompt": raw(prompt + choice.text)} | _limits(request, choice.tokens)
    changes |= _truncation(request, choice.tokens)
    asked = _next(request, request.fields, changes)
    asked = replace(asked, text_bytes=len(bytes(changes["prompt"])), prompt_tokens=None)
    return Resume(Way.TEXT, asked, kept_ids=max(choice.shown, choice.flushed))


def by_turn(request: GenerateRequest, choice: ChoiceAnswer, *, end_id: int | None) -> Resume | None:
    """Go on in chat with an open assistant turn; None if the last message has no open end."""
    messages = with_open_turn(request, choice)
    if messages is None:
        return None
    kept = max(len(choice.resumable_ids(end_id)), choice.flushed)
    if not choice.text and end_id is not None and end_id in choice.token_ids:
        kept = choice.token_ids.index(end_id) + 1  # all that the turn says
    tokens = kept if choice.has_all_ids else choice.tokens
    fields = request.fields
    if choice.thoughts:
        fields = _without(fields, "thinking_token_budget")
    changes = {
        "messages": messages,
        "continue_final_message": _TRUE,
        "add_generation_prompt": _FALSE,
    }
    changes |= _limits(request, tokens) | _truncation(request, tokens)
    added = len(choice.text.encode("utf-8", "replace"))
    asked = _next(request, fields, changes)
    asked = replace(asked, text_bytes=request.text_bytes + added)
    return Resume(Way.TURN, asked, kept_ids=kept)


def _next(
    request: GenerateRequest, fields: JsonFields, changes: Mapping[str, Raw]
) -> GenerateRequest:
    """Return the request of a round: one choice, streamed, ids and usage asked for."""
    kept = {name: value for name, value in fields.items() if name not in _FIRST_ROUND_ONLY}
    kept["stream"] = _TRUE
    options = as_object(plain(fields.get("stream_options")))
    kept["stream_options"] = raw({**options, "include_usage": True})
    kept["return_token_ids"] = _TRUE
    asked = replace(request, fields={**kept, **changes})
    return replace(
        asked,
        max_output_tokens=output_limit(asked),
        choices=1,
        wants_stream=True,
        prompts=(),
        is_decode_only=False,
    )


def _limits(request: GenerateRequest, tokens: int) -> dict[str, Raw]:
    """Return the token limits that are left after `tokens`; what was not given stays so."""
    left: dict[str, Raw] = {}
    for name in ("max_tokens", "max_completion_tokens"):
        limit = as_whole(plain(request.fields.get(name)))
        if limit is not None:
            left[name] = raw(max(1, limit - tokens))
    if request.api is Api.COMPLETIONS and "max_tokens" not in left:
        left["max_tokens"] = raw(max(1, _COMPLETIONS_LIMIT - tokens))
    least = as_whole(plain(request.fields.get("min_tokens")))
    if least is not None:
        left["min_tokens"] = raw(max(0, least - tokens))
    return left


def _truncation(request: GenerateRequest, tokens: int) -> dict[str, Raw]:
    """Let a truncated prompt keep what it kept, and the answer so far behind it."""
    size = as_whole(plain(request.fields.get("truncate_prompt_tokens")))
    return {} if size is None or size < 1 else {"truncate_prompt_tokens": raw(size + tokens)}


def _logprobs(fields: JsonFields) -> dict[str, Raw]:
    """Return a chat request's wish for log-probabilities as a completions request has it."""
    if plain(fields.get("logprobs")) is not True:
        return {}
    return {"logprobs": raw(as_whole(plain(fields.get("top_logprobs"))) or 0)}


def _without(fields: JsonFields, *names: str) -> JsonFields:
    return {name: value for name, value in fields.items() if name not in names}
