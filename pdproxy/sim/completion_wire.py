"""/v1/completions on the wire: whole answers and streams."""

import orjson

from pdproxy.sim import tokenizer, wire
from pdproxy.sim.config import SimConfig
from pdproxy.sim.jobs import Job
from pdproxy.sim.model import Step
from pdproxy.sim.requests import GenerateRequest

Steps = list[list[Step]]
Pairs = list[tuple[int, int | None]]


def whole(job: Job, steps: Steps, config: SimConfig) -> bytes:
    """The body of an answer that is not streamed; `steps` are those of each choice."""
    request = job.request
    tokens = sum(len(step.tokens) for choice in steps for step in choice)
    return orjson.dumps(
        {
            "id": request.request_id,
            "object": "text_completion",
            "created": wire.created_now(),
            "model": request.model,
            "choices": [_choice(request, index, choice) for index, choice in enumerate(steps)],
            "service_tier": None,
            "system_fingerprint": wire.FINGERPRINT,
            "usage": wire.whole_usage(request, config, tokens, job.cached_tokens),
            "kv_transfer_params": job.kv_params,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _choice(request: GenerateRequest, index: int, steps: list[Step]) -> dict[str, object]:
    prompt = request.prompts[index // request.n]
    text = "".join(step.text for step in steps)
    pairs = [pair for step in steps for pair in _pairs(step)]
    asked = request.prompt_logprobs
    if request.echo:
        text = tokenizer.decode(prompt, skip_special=True) + text
        pairs = wire.prompt_pairs(prompt) + pairs
        # Echo with logprobs makes vLLM report the prompt's as well.
        asked = request.logprobs if asked is None else asked
    logprobs = None
    if request.logprobs is not None:
        logprobs, _ = wire.completion_logprobs(pairs, request.logprobs, 0)
    last = steps[-1]
    token_ids = [token for step in steps for token in step.tokens]
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": token_ids if request.return_token_ids else None,
        "prompt_logprobs": None if asked is None else wire.prompt_logprobs(prompt, asked),
        "prompt_token_ids": prompt if request.return_token_ids else None,
        "routed_experts": None,
    }


def _pairs(step: Step) -> Pairs:
    return list(zip(step.tokens, step.states, strict=True))


class CompletionStream:
    """Writes a completions stream, event by event; see `ChatStream` for the short way."""

    def __init__(self, job: Job, config: SimConfig) -> None:
        request = job.request
        choices = request.n * len(request.prompts)
        self._job = job
        self._config = config
        self._request = request
        self._head = {
            "id": request.request_id,
            "object": "text_completion",
            "created": wire.created_now(),
            "model": request.model,
        }
        self._tokens = [0] * choices
        self._open = choices
        self._offsets = [0] * choices
        self._has_begun = [False] * choices
        self._is_plain = not (
            request.return_token_ids
            or request.logprobs is not None
            or request.continuous_usage
            or request.echo
        )
        opened = orjson.dumps(self._head)[:-1]
        self._before = [
            b'data: %b,"choices":[{"index":%d,"text":' % (opened, index) for index in range(choices)
        ]

    def opening(self) -> bytes:
        """Completions begin with the first text."""
        return b""

    def step(self, index: int, step: Step) -> bytes:
        """The event of one step; half a character is an event with empty text."""
        self._tokens[index] += len(step.tokens)
        if self._is_plain and step.finish_reason is None:
            return (
                self._before[index]
                + orjson.dumps(step.text)
                + b',"logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
            )
        return wire.event(self._chunk(index, step))

    def closing(self) -> bytes:
        """The usage chunk, if wanted, and the end mark."""
        request, total = self._request, sum(self._tokens)
        if not request.include_usage:
            return wire.DONE
        usage = wire.final_usage(request, self._config, total, self._job.cached_tokens)
        tail = {"choices": [], "usage": usage, "system_fingerprint": wire.FINGERPRINT}
        return wire.event(self._head | tail) + wire.DONE

    def _chunk(self, index: int, step: Step) -> dict[str, object]:
        request = self._request
        prompt = request.prompts[index // request.n]
        is_first, self._has_begun[index] = not self._has_begun[index], True
        text, pairs = step.text, _pairs(step)
        if request.echo and is_first:
            text = tokenizer.decode(prompt, skip_special=True) + text
            pairs = wire.prompt_pairs(prompt) + pairs
        logprobs = None
        if request.logprobs is not None:
            logprobs, self._offsets[index] = wire.completion_logprobs(
                pairs, request.logprobs, self._offsets[index]
            )
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
            "prompt_token_ids": prompt if request.return_token_ids and is_first else None,
            "token_ids": list(step.tokens) if request.return_token_ids else None,
        }
        chunk = self._head | {"choices": [choice]}
        if request.continuous_usage:
            chunk["usage"] = wire.continuous_usage(request, self._tokens[index])
        return chunk | self._mark(step)

    def _mark(self, step: Step) -> dict[str, object]:
        """The fingerprint stands on the usage chunk, or else on the last choice's last chunk."""
        self._open -= step.finish_reason is not None
        if self._open or self._request.include_usage:
            return {}
        return {"system_fingerprint": wire.FINGERPRINT}
