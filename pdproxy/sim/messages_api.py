"""/v1/messages (Anthropic's form), as small as it can be: text in, one text block out.

Source: recorded answers of vLLM 0.32.
"""

from collections.abc import Mapping

import orjson

from pdproxy.sim import fields, parsing, template, tokenizer
from pdproxy.sim.config import SimConfig
from pdproxy.sim.jobs import Job
from pdproxy.sim.model import Step
from pdproxy.sim.requests import GenerateRequest

JsonObject = Mapping[str, object]


def parse(body: JsonObject, given_id: str | None, config: SimConfig) -> GenerateRequest:
    """A messages request; `max_tokens` must be there."""
    fields.required(body, "messages")
    fields.required(body, "max_tokens")
    model = parsing.check_common(body, config)
    messages = fields.objects(body, "messages")
    if body.get("system"):
        messages = [{"role": "system", "content": body["system"]}, *messages]
    prompt = tokenizer.encode(template.render(template.Turn(messages=messages)))
    limit = fields.whole(body, "max_tokens")
    stop = list(fields.texts(body, "stop_sequences"))
    return GenerateRequest(
        api="messages",
        request_id=parsing.request_id("chatcmpl", body, given_id),
        model=model,
        prompts=(prompt,),
        sampling=parsing.sampling({**body, "stop": stop}, config, prompt, limit),
        stream=fields.flag(body, "stream"),
        kv_params=fields.mapping(body, "kv_transfer_params"),
    )


def whole(job: Job, steps: list[list[Step]], _config: SimConfig) -> bytes:
    """The body of an answer that is not streamed; keys without a value are left out."""
    request = job.request
    text = "".join(step.text for step in steps[0])
    written = sum(len(step.tokens) for step in steps[0])
    reply: dict[str, object] = {
        "id": request.request_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": request.model,
        **_stop(steps[0][-1]),
        "usage": {"input_tokens": request.prompt_tokens, "output_tokens": written},
    }
    if reply["stop_sequence"] is None:
        del reply["stop_sequence"]
    if job.kv_params is not None:
        reply["kv_transfer_params"] = job.kv_params
    return orjson.dumps(reply)


def _stop(step: Step) -> dict[str, object]:
    if step.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if step.stop_reason in (None, "recomputed"):
        return {"stop_reason": step.stop_reason or "end_turn", "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": step.stop_reason}


class MessagesStream:
    """Writes a messages stream: named events and no end mark."""

    def __init__(self, job: Job, _config: SimConfig) -> None:
        self._request = job.request
        self._steps: list[Step] = []

    def opening(self) -> bytes:
        """The message without content, and its one block."""
        message: dict[str, object] = {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._request.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._request.prompt_tokens, "output_tokens": 0},
        }
        block = {"content_block": {"type": "text", "text": ""}, "index": 0}
        return _event("message_start", message=message) + _event("content_block_start", **block)

    def step(self, _index: int, step: Step) -> bytes:
        """The delta of one step."""
        self._steps.append(step)
        if not step.text:
            return b""
        delta = {"type": "text_delta", "text": step.text}
        return _event("content_block_delta", delta=delta, index=0)

    def closing(self) -> bytes:
        """Why it stopped, and how much it was."""
        written = sum(len(step.tokens) for step in self._steps)
        usage = {"input_tokens": self._request.prompt_tokens, "output_tokens": written}
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=_stop(self._steps[-1]), usage=usage),
                _event("message_stop"),
            )
        )


def _event(name: str, **values: object) -> bytes:
    data = orjson.dumps({"type": name} | values)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
