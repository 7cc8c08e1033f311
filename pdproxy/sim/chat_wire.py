"""/v1/chat/completions on the wire: whole answers and streams."""

import orjson

from pdproxy.sim import wire
from pdproxy.sim.config import SimConfig
from pdproxy.sim.deltas import DeltaParser, begins_thinking, parse_whole
from pdproxy.sim.jobs import Job
from pdproxy.sim.model import Step
from pdproxy.sim.requests import GenerateRequest

Steps = list[list[Step]]


def whole(job: Job, steps: Steps, config: SimConfig) -> bytes:
    """The body of an answer that is not streamed; `steps` are those of each choice."""
    request = job.request
    tokens = sum(len(step.tokens) for choice in steps for step in choice)
    asked = request.prompt_logprobs
    prompt = request.prompts[0]
    return orjson.dumps(
        {
            "id": request.request_id,
            "object": "chat.completion",
            "created": wire.created_now(),
            "model": request.model,
            "choices": [_choice(request, index, choice) for index, choice in enumerate(steps)],
            "service_tier": None,
            "system_fingerprint": wire.FINGERPRINT,
            "usage": wire.whole_usage(request, config, tokens, job.cached_tokens),
            "prompt_logprobs": None if asked is None else wire.prompt_logprobs(prompt, asked),
            "prompt_token_ids": prompt if request.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": job.kv_params,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _choice(request: GenerateRequest, index: int, steps: list[Step]) -> dict[str, object]:
    text = "".join(step.text for step in steps)
    answer = parse_whole(
        text,
        splits_reasoning=request.parses_reasoning and request.thinks,
        parses_tools=request.parses_tools,
    )
    content = answer.content
    if request.echo and content is not None:
        content = request.opened_text + content
    message: dict[str, object] = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if answer.calls:
        message["tool_calls"] = answer.calls
    message["reasoning"] = answer.reasoning
    last = steps[-1]
    token_ids = [token for step in steps for token in step.tokens]
    return {
        "index": index,
        "message": message,
        "logprobs": wire.chat_logprobs(steps, request.logprobs),
        "finish_reason": _reason(last, bool(answer.calls)),
        "stop_reason": last.stop_reason,
        "token_ids": token_ids if request.return_token_ids else None,
        "routed_experts": None,
    }


def _reason(step: Step, has_calls: bool) -> str | None:
    """The finish reason; tool calls rename a natural end only."""
    if has_calls and step.finish_reason == "stop" and step.stop_reason is None:
        return "tool_calls"
    return step.finish_reason


class ChatStream:
    """Writes a chat stream, event by event.

    A plain stream (no tools, reasoning, logprobs, ids or usage in between) takes a short way: the
    bytes around the text are made once.
    """

    def __init__(self, job: Job, config: SimConfig) -> None:
        request = job.request
        self._job = job
        self._config = config
        self._request = request
        self._head = {
            "id": request.request_id,
            "object": "chat.completion.chunk",
            "created": wire.created_now(),
            "model": request.model,
        }
        is_thinking = request.parses_reasoning and begins_thinking(request.prompts[0])
        self._parsers = [
            DeltaParser(is_thinking=is_thinking, parses_tools=request.parses_tools)
            for _ in range(request.n)
        ]
        self._tokens = [0] * request.n
        self._open = request.n
        self._shows_all = request.return_token_ids or request.logprobs is not None
        is_parsed = is_thinking or request.parses_tools
        self._is_plain = not (is_parsed or self._shows_all or request.continuous_usage)
        opened = orjson.dumps(self._head)[:-1]
        self._before = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (opened, index)
            for index in range(request.n)
        ]

    def opening(self) -> bytes:
        """The role chunk of each choice."""
        return b"".join(self._role(index) for index in range(self._request.n))

    def step(self, index: int, step: Step) -> bytes:
        """The event of one step; empty if it shows nothing."""
        self._tokens[index] += len(step.tokens)
        if self._is_plain and step.finish_reason is None:
            if not step.text:
                return b""
            text = orjson.dumps(step.text)
            after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            return self._before[index] + text + after
        parser = self._parsers[index]
        delta = parser.feed(step.text, is_last=step.finish_reason is not None)
        if not delta and step.finish_reason is None and not self._shows_all:
            return b""
        return wire.event(self._chunk(index, step, delta, parser.calls > 0))

    def closing(self) -> bytes:
        """The usage chunk, if wanted, and the end mark."""
        request, total = self._request, sum(self._tokens)
        if not request.include_usage:
            return wire.DONE
        usage = wire.final_usage(request, self._config, total, self._job.cached_tokens)
        tail = {"choices": [], "usage": usage, "system_fingerprint": wire.FINGERPRINT}
        return wire.event(self._head | tail) + wire.DONE

    def _chunk(
        self, index: int, step: Step, delta: dict[str, object], has_calls: bool
    ) -> dict[str, object]:
        request = self._request
        choice: dict[str, object] = {
            "index": index,
            "delta": delta,
            "logprobs": wire.chat_logprobs([step], request.logprobs),
            "finish_reason": _reason(step, has_calls),
        }
        if step.finish_reason is not None:
            choice["stop_reason"] = step.stop_reason
        choice["token_ids"] = list(step.tokens) if request.return_token_ids else None
        chunk = self._head | {"choices": [choice]} | self._usage(self._tokens[index])
        return chunk | self._mark(step)

    def _mark(self, step: Step) -> dict[str, object]:
        """The fingerprint stands on the usage chunk, or else on the last choice's last chunk."""
        self._open -= step.finish_reason is not None
        if self._open or self._request.include_usage:
            return {}
        return {"system_fingerprint": wire.FINGERPRINT}

    def _role(self, index: int) -> bytes:
        request = self._request
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        tail = {
            "prompt_token_ids": request.prompts[0] if request.return_token_ids else None,
            "prompt_text": None,
        }
        return wire.event(self._head | {"choices": [choice]} | self._usage(0) | tail)

    def _usage(self, tokens: int) -> dict[str, object]:
        if not self._request.continuous_usage:
            return {}
        return {"usage": wire.continuous_usage(self._request, tokens)}
