"""/v1/responses, as small as it can be: text in, one message out, whole or streamed.

Source: recorded answers of vLLM 0.32.
"""

import secrets
from collections.abc import Mapping

import orjson

from pdproxy.sim import fields, parsing, template, tokenizer, wire
from pdproxy.sim.config import SimConfig
from pdproxy.sim.jobs import Job
from pdproxy.sim.model import Step
from pdproxy.sim.requests import GenerateRequest

JsonObject = Mapping[str, object]


def parse(body: JsonObject, _given_id: str | None, config: SimConfig) -> GenerateRequest:
    """A responses request; only `max_output_tokens` limits it, and the id header is ignored."""
    given = fields.required(body, "input")
    model = parsing.check_common(body, config)
    messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
    if isinstance(instructions := body.get("instructions"), str):
        messages = [{"role": "system", "content": instructions}, *messages]
    turn = template.Turn(messages=fields.objects({"input": messages}, "input"))
    prompt = tokenizer.encode(template.render(turn))
    own_id = body.get("request_id")
    limit = fields.whole(body, "max_output_tokens")
    return GenerateRequest(
        api="responses",
        request_id=own_id if isinstance(own_id, str) else f"resp_{secrets.token_hex(8)}",
        model=model,
        prompts=(prompt,),
        sampling=parsing.sampling(body, config, prompt, limit),
        stream=fields.flag(body, "stream"),
        kv_params=fields.mapping(body, "kv_transfer_params"),
    )


def whole(job: Job, steps: list[list[Step]], _config: SimConfig) -> bytes:
    """The body of an answer that is not streamed."""
    message_id = f"msg_{secrets.token_hex(8)}"
    return orjson.dumps(_response(job, wire.created_now(), message_id, steps[0]))


def _response(
    job: Job, created: int, message_id: str, steps: list[Step] | None
) -> dict[str, object]:
    """The response object; without steps it is one in progress."""
    request = job.request
    is_cut = bool(steps) and steps is not None and steps[-1].finish_reason == "length"
    status = "in_progress" if steps is None else "incomplete" if is_cut else "completed"
    output = [] if steps is None else [_item(message_id, "completed", [_part(_text(steps))])]
    return {
        "id": request.request_id,
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": None,
        "model": request.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": request.sampling.max_tokens,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": status,
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": None if steps is None else _usage(job, steps),
        "user": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": job.kv_params,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _usage(job: Job, steps: list[Step]) -> dict[str, object]:
    written = sum(len(step.tokens) for step in steps)
    return {
        "input_tokens": job.request.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": job.cached_tokens,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": written,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": job.request.prompt_tokens + written,
    }


def _text(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def _part(text: str, logprobs: list[object] | None = None) -> dict[str, object]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _item(message_id: str, status: str, content: list[dict[str, object]]) -> dict[str, object]:
    return {
        "id": message_id,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


class ResponsesStream:
    """Writes a responses stream: numbered events with names, and no end mark."""

    def __init__(self, job: Job, _config: SimConfig) -> None:
        self._job = job
        self._created = wire.created_now()
        self._message_id = f"msg_{secrets.token_hex(8)}"
        self._steps: list[Step] = []
        self._number = 0

    def opening(self) -> bytes:
        """The events before the first text."""
        response = _response(self._job, self._created, self._message_id, None)
        return b"".join(
            (
                self._event("response.created", {"response": response}),
                self._event("response.in_progress", {"response": response}),
                self._event(
                    "response.output_item.added",
                    {"item": _item(self._message_id, "in_progress", []), "output_index": 0},
                ),
                self._event("response.content_part.added", self._place(part=_part("", []))),
            )
        )

    def step(self, _index: int, step: Step) -> bytes:
        """The delta of one step."""
        self._steps.append(step)
        if not step.text:
            return b""
        return self._event("response.output_text.delta", self._place(delta=step.text, logprobs=[]))

    def closing(self) -> bytes:
        """The events that repeat the whole text."""
        text = _text(self._steps)
        item = _item(self._message_id, "completed", [_part(text)])
        response = _response(self._job, self._created, self._message_id, self._steps)
        return b"".join(
            (
                self._event("response.output_text.done", self._place(logprobs=[], text=text)),
                self._event("response.content_part.done", self._place(part=_part(text))),
                self._event("response.output_item.done", {"item": item, "output_index": 0}),
                self._event("response.completed", {"response": response}),
            )
        )

    def _place(self, **values: object) -> dict[str, object]:
        return {
            "content_index": 0,
            "item_id": self._message_id,
            "output_index": 0,
        } | values

    def _event(self, name: str, values: dict[str, object]) -> bytes:
        """One event; as in real streams the keys stand in alphabetical order, the type last."""
        number, self._number = self._number, self._number + 1
        numbered = dict(sorted([*values.items(), ("sequence_number", number)]))
        data = orjson.dumps(numbered | {"type": name})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
