"""The scale-out endpoints that a proxy can use to continue from exact token ids.

`/inference/v1/generate` (token ids in and out, not streamed) and the two `render` paths (a request
-> its token ids). They answer 403 unless the engine is configured with `scale_out`.

Source: recorded answers of vLLM 0.32.
"""

from collections.abc import Mapping

import orjson
from aiohttp import web

from pdproxy.sim import fields, parsing, wire
from pdproxy.sim.config import SimConfig
from pdproxy.sim.jobs import Job
from pdproxy.sim.model import Step
from pdproxy.sim.node import NODE, json_response, read_body
from pdproxy.sim.problems import bad_request
from pdproxy.sim.requests import GenerateRequest

JsonObject = Mapping[str, object]


def parse(body: JsonObject, given_id: str | None, config: SimConfig) -> GenerateRequest:
    """A generate request: `token_ids` and `sampling_params`."""
    fields.required(body, "token_ids")
    model = parsing.check_common(body, config)
    if fields.flag(body, "stream"):
        raise bad_request("The simulated engine does not stream token ids.", "stream")
    prompt = parsing.token_ids(body.get("token_ids"))
    rules = fields.mapping(body, "sampling_params") or {}
    limit = fields.whole(rules, "max_tokens")
    return GenerateRequest(
        api="generate",
        request_id=parsing.request_id("generate-tokens", body, given_id),
        model=model,
        prompts=(prompt,),
        sampling=parsing.sampling(rules, config, prompt, limit),
        n=fields.whole(rules, "n") or 1,
        kv_params=fields.mapping(body, "kv_transfer_params"),
    )


def whole(job: Job, steps: list[list[Step]], config: SimConfig) -> bytes:
    """The body of an answer."""
    request = job.request
    written = sum(len(step.tokens) for choice in steps for step in choice)
    return orjson.dumps(
        {
            "request_id": request.request_id,
            "model": request.model,
            "created": wire.created_now(),
            "usage": wire.whole_usage(request, config, written, job.cached_tokens),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": job.kv_params,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [_choice(index, choice) for index, choice in enumerate(steps)],
        }
    )


def _choice(index: int, steps: list[Step]) -> dict[str, object]:
    ids = [token for step in steps for token in step.tokens]
    return {
        "index": index,
        "finish_reason": steps[-1].finish_reason,
        "stop_reason": steps[-1].stop_reason,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        "logprobs": None,
    }


async def render_chat(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/render."""
    body, given_id = await read_body(request), request.headers.get("X-Request-Id")
    parsed = parsing.parse_chat(body, given_id, request.app[NODE].config)
    return json_response(orjson.dumps(_rendered(body, parsed)[0]))


async def render_completion(request: web.Request) -> web.Response:
    """POST /v1/completions/render: a list, one entry per prompt."""
    body, given_id = await read_body(request), request.headers.get("X-Request-Id")
    parsed = parsing.parse_completion(body, given_id, request.app[NODE].config)
    return json_response(orjson.dumps(_rendered(body, parsed)))


async def abort_requests(_request: web.Request) -> web.Response:
    """POST /inference/v1/abort_requests: 200, and as with vLLM no pinned block is freed."""
    return web.Response()


def _rendered(body: JsonObject, parsed: GenerateRequest) -> list[dict[str, object]]:
    return [
        {
            "request_id": parsed.request_id,
            "token_ids": prompt,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": _sampling_params(body, parsed),
            "model": parsed.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": parsed.stream,
            "stream_options": body.get("stream_options"),
            "cache_salt": parsed.cache_salt or None,
            "priority": body.get("priority", 0),
            "kv_transfer_params": parsed.kv_params,
            "ec_transfer_params": None,
        }
        for prompt in parsed.prompts
    ]


def _sampling_params(body: JsonObject, parsed: GenerateRequest) -> dict[str, object]:
    """The sampling rules in full; a greedy request has no top_p and min_p."""
    temperature = body.get("temperature")
    values: dict[str, object] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": float(temperature) if isinstance(temperature, int | float) else 1.0,
    }
    if temperature != 0:
        values |= {"top_p": 1.0, "min_p": 0.0}
    return values | {
        "stop": list(parsed.sampling.stop),
        "stop_token_ids": sorted(parsed.sampling.stop_token_ids),
        "max_tokens": parsed.sampling.max_tokens,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
