"""Ready-made answers of fake engines: healthy ones, broken ones, and ones that end in "recomputed".

A behaviour is an async function of (request, answer); it returns when its answer has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal

from tests.fakes import toy
from tests.fakes.answer import Answer, EngineRequest, HeaderList, event_bytes

Behaviour = Callable[[EngineRequest, Answer], Awaitable[None]]
Role = Literal["prefill", "decode"]

GENERATE_PATHS = ("/v1/chat/completions", "/v1/completions")
SERVICE_PATHS = ("/health", "/ping", "/v1/models", "/metrics", "/version", "/load")
DONE = b"data: [DONE]\n\n"


def default_for(role: Role) -> Behaviour:
    return prefill if role == "prefill" else decode


# --- healthy engines


async def prefill(request: EngineRequest, answer: Answer) -> None:
    """Answer one token, usage and a fresh handle."""
    if (fault := fault_of(request)) is not None:
        await answer.json(error_body(fault), 400)
        return
    await answer.json(prefill_body(request, request.engine.new_handle()))


def prefill_body(request: EngineRequest, handle: object) -> dict[str, Any]:
    """Return what a prefiller says: one token of text and `handle` as kv_transfer_params."""
    body = whole_body(request, 1, finish_reason="length")
    body["kv_transfer_params"] = handle
    return body


async def decode(request: EngineRequest, answer: Answer) -> None:
    """Answer as many toy tokens as the request's limits allow, streaming if asked to."""
    if (fault := fault_of(request)) is not None:
        await answer.json(error_body(fault), 400)
        return
    limit = toy.token_limit(request.json)
    count = request.engine.natural_tokens if limit is None else limit
    reason = "stop" if limit is None else "length"
    await speak(request, answer, count, finish_reason=reason)


def recompute(count: int) -> Behaviour:
    """Return a decoder that says `count` tokens and then drops the request for want of KV."""

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        await speak(request, answer, count, finish_reason="stop", stop_reason="recomputed")

    return behaviour


async def speak(
    request: EngineRequest,
    answer: Answer,
    count: int,
    *,
    finish_reason: str,
    stop_reason: str | None = None,
) -> None:
    """Answer `count` tokens, one event each, or one document."""
    if not request.is_stream:
        body = whole_body(request, count, finish_reason=finish_reason, stop_reason=stop_reason)
        await answer.json(body)
        return
    await answer.start_stream()
    for event in stream_events(request, count, finish_reason, stop_reason):
        if request.engine.token_delay_s:
            await asyncio.sleep(request.engine.token_delay_s)
        await answer.event(event)
    await answer.chunk(DONE)
    await answer.end()


# --- broken engines


def error(
    status: int, message: str = "no", headers: HeaderList = (), *, body: object = None
) -> Behaviour:
    """Return an engine that answers an error status with an OpenAI-shaped body."""
    fields = list(headers)

    async def behaviour(_: EngineRequest, answer: Answer) -> None:
        await answer.json(body or error_body(message, status), status, fields)

    return behaviour


def json_answer(value: object, status: int = 200, headers: HeaderList = ()) -> Behaviour:
    fields = list(headers)

    async def behaviour(_: EngineRequest, answer: Answer) -> None:
        await answer.json(value, status, fields)

    return behaviour


def raw(pieces: Iterable[bytes | float], *, then: Literal["keep", "close", "reset"]) -> Behaviour:
    """Return an engine that sends these bytes, head included; a number is a pause in seconds."""
    parts = list(pieces)

    async def behaviour(_: EngineRequest, answer: Answer) -> None:
        for part in parts:
            if isinstance(part, bytes):
                await answer.send(part)
            else:
                await asyncio.sleep(part)
        leave(answer, then)

    return behaviour


def stream(
    pieces: Iterable[bytes | float], *, then: Literal["end", "hang", "close", "reset"] = "end"
) -> Behaviour:
    """Return an engine that streams these pieces, each a chunk; a number is a pause in seconds."""
    parts = list(pieces)

    async def behaviour(_: EngineRequest, answer: Answer) -> None:
        await answer.start_stream()
        for part in parts:
            if isinstance(part, bytes):
                await answer.chunk(part)
            else:
                await asyncio.sleep(part)
        if then == "end":
            await answer.end()
        elif then == "hang":
            await answer.hang()
        else:
            leave(answer, then)

    return behaviour


def leave(answer: Answer, how: Literal["keep", "close", "reset"]) -> None:
    if how == "close":
        answer.close()
    elif how == "reset":
        answer.reset()


async def hang(_: EngineRequest, answer: Answer) -> None:
    """Take the request and say nothing."""
    await answer.hang()


async def close(_: EngineRequest, answer: Answer) -> None:
    """Take the request and leave with a FIN."""
    answer.close()


async def reset(_: EngineRequest, answer: Answer) -> None:
    """Take the request and leave with an RST."""
    answer.reset()


def late(delay_s: float, behaviour: Behaviour) -> Behaviour:
    """Return `behaviour` after a pause."""

    async def late_behaviour(request: EngineRequest, answer: Answer) -> None:
        await asyncio.sleep(delay_s)
        await behaviour(request, answer)

    return late_behaviour


def one_after_another(*behaviours: Behaviour) -> Behaviour:
    """Return an engine that behaves differently each time; the last behaviour stays."""
    left = list(behaviours)

    async def behaviour(request: EngineRequest, answer: Answer) -> None:
        current = left.pop(0) if len(left) > 1 else left[0]
        await current(request, answer)

    return behaviour


# --- what engines say


def fault_of(request: EngineRequest) -> str | None:
    """Return what a real engine finds wrong with a request, among the things tests try."""
    body = request.json
    messages = body.get("messages")
    wants_messages = request.path.endswith("/chat/completions")
    if wants_messages and not (isinstance(messages, list) and messages):
        return "messages must be a non-empty list"
    if not wants_messages and body.get("prompt") is None:
        return "prompt is required"
    if body.get("stream_options") and not request.is_stream:
        return "stream_options needs stream=true"
    limit = toy.token_limit(body)
    if limit is not None and (body.get("min_tokens") or 0) > limit:
        return f"min_tokens must not be above the limit of {limit}"
    return None


def error_body(message: str, status: int = 400) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": "EngineError", "param": None, "code": status},
    }


def usage_of(request: EngineRequest, completion_tokens: int) -> dict[str, Any]:
    prompt_tokens = sum(len(ids) for ids in toy.prompts(request.json))
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    cached = request.engine.cached_tokens
    if cached is not ...:
        usage["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
    return usage


def whole_body(
    request: EngineRequest, count: int, *, finish_reason: str, stop_reason: str | None = None
) -> dict[str, Any]:
    """Return a whole answer of `count` tokens for each choice of each prompt."""
    is_chat = request.path.endswith("/chat/completions")
    choices: list[dict[str, Any]] = []
    for index, words in enumerate(_words(request, count)):
        text = "".join(text for text, _ in words)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        ends = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        ids = _ids_if_asked(request, token_ids=[token for _, token in words])
        choices.append({"index": index, **said, "logprobs": None, **ends, **ids})
    told = _prompt_ids_if_asked(request)
    if not is_chat:
        choices[0].update(told)
    return {
        **_envelope(request, "chat.completion" if is_chat else "text_completion"),
        "choices": choices,
        "usage": usage_of(request, count * len(choices)),
        "kv_transfer_params": None,
        **(told if is_chat else {}),
    }


def stream_events(
    request: EngineRequest, count: int, finish_reason: str, stop_reason: str | None = None
) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, without `[DONE]`."""
    is_chat = request.path.endswith("/chat/completions")
    envelope = _envelope(request, "chat.completion.chunk" if is_chat else "text_completion")
    texts = _words(request, count)

    def chunk(index: int, said: dict[str, Any], **ends: str | None) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": None, **ends}
        return {**envelope, "choices": [choice]}

    def says(text: str, token: int) -> dict[str, Any]:
        ids = _ids_if_asked(request, token_ids=[token])
        return {"delta": {"content": text}, **ids} if is_chat else {"text": text, **ids}

    role = {"delta": {"role": "assistant", "content": ""}}
    events = [chunk(index, role) for index in range(len(texts))] if is_chat else []
    for step in range(count):
        events += [chunk(index, says(*words[step])) for index, words in enumerate(texts)]
    empty: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    empty |= _ids_if_asked(request, token_ids=[])
    ends = {"finish_reason": finish_reason, "stop_reason": stop_reason}
    events += [chunk(index, empty, **ends) for index in range(len(texts))]
    told = _prompt_ids_if_asked(request)
    (events[0] if is_chat else events[0]["choices"][0]).update(told)
    if (request.json.get("stream_options") or {}).get("include_usage"):
        usage = usage_of(request, count * len(texts))
        events.append({**envelope, "choices": [], "usage": usage})
    return events


def stream_bytes(events: Sequence[object]) -> list[bytes]:
    """Return events and `[DONE]` as bytes, one item each."""
    return [event_bytes(event) for event in events] + [DONE]


def _words(request: EngineRequest, count: int) -> list[list[tuple[str, int]]]:
    """Return the text and the id of each word of each choice of each prompt."""
    if request.stale:
        return [[("STALE", 0)] * count]
    body = request.json
    choices = body.get("n") or 1
    return [
        [(toy.text_of(token), token) for token in toy.speak(ids, count, choice=choice)]
        for ids in toy.prompts(body)
        for choice in range(choices)
    ]


def _ids_if_asked(request: EngineRequest, *, token_ids: list[int]) -> dict[str, Any]:
    return {"token_ids": token_ids} if request.json.get("return_token_ids") else {}


def _prompt_ids_if_asked(request: EngineRequest) -> dict[str, Any]:
    asked = request.json.get("return_token_ids")
    return {"prompt_token_ids": toy.prompts(request.json)[0]} if asked else {}


def _envelope(request: EngineRequest, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    request_id = request.headers.get("x-request-id", "none")
    return {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": 1_700_000_000,
        "model": request.json.get("model", request.engine.model),
    }


async def service_answer(request: EngineRequest, answer: Answer) -> None:
    """Answer the health, model and metrics look-ups of a healthy engine."""
    engine = request.engine
    card = {
        "id": engine.model,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "vllm",
        "root": "/models/toy",
        "max_model_len": 4096,
    }
    if request.path == "/v1/models":
        await answer.json({"object": "list", "data": [card]})
    elif request.path == "/metrics":
        text = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n"
        await answer.whole(200, text, [("content-type", "text/plain")])
    elif request.path == "/version":
        await answer.json({"version": "0.0.0"})
    else:
        await answer.whole(200, b"")
