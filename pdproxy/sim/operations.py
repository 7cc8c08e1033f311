"""Everything that is not generation: models, health, metrics, tokenizer, the prefiller's side."""

import secrets

import orjson
from aiohttp import web

from pdproxy.sim import fields, template, tokenizer, wire
from pdproxy.sim.grammar import mixed
from pdproxy.sim.metrics import exposition
from pdproxy.sim.model import prefix_state
from pdproxy.sim.node import NODE, json_response, read_body
from pdproxy.sim.parsing import chat_turn, check_common

VERSION = "0.32.0"
_EMBEDDING_SIZE = 16
_UNAVAILABLE, _CONFLICT = 503, 409


async def health(request: web.Request) -> web.Response:
    """GET /health: an empty 200, or 503 once the engine is dead."""
    return web.Response(status=_UNAVAILABLE if request.app[NODE].engine.is_dead else 200)


async def version(_request: web.Request) -> web.Response:
    """GET /version."""
    return json_response(orjson.dumps({"version": VERSION}))


async def load(request: web.Request) -> web.Response:
    """GET /load: generation requests in flight."""
    return json_response(orjson.dumps({"server_load": request.app[NODE].in_flight}))


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    config, created = request.app[NODE].config, wire.created_now()
    permission = {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": config.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": config.root,
        "parent": None,
        "max_model_len": config.max_model_len,
        "permission": [permission],
    }
    return json_response(orjson.dumps({"object": "list", "data": [model]}))


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: a prompt or messages."""
    config = request.app[NODE].config
    body = await read_body(request)
    check_common(body, config)
    if "messages" in body:
        text = template.render(chat_turn(body, config))
    else:
        text = str(fields.required(body, "prompt"))
    ids = tokenizer.encode(text)
    strings = [tokenizer.token_text(i) for i in ids] if body.get("return_token_strs") else None
    reply = {
        "count": len(ids),
        "max_model_len": config.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return json_response(orjson.dumps(reply))


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    body = await read_body(request)
    check_common(body, request.app[NODE].config)
    fields.required(body, "tokens")
    ids = [i for i in fields.wholes(body, "tokens") if 0 <= i < tokenizer.VOCAB_SIZE]
    return json_response(orjson.dumps({"prompt": tokenizer.decode(ids)}))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: forget cached blocks; does nothing while any are held."""
    request.app[NODE].engine.books.reset_prefix_cache()
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, with vLLM's names."""
    body = exposition(request.app[NODE].engine).encode()
    headers = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
    return web.Response(body=body, headers=headers)


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings: small vectors that depend on the text."""
    config = request.app[NODE].config
    body = await read_body(request)
    check_common(body, config)
    fields.required(body, "input")
    texts = fields.texts(body, "input")
    entries: list[dict[str, object]] = []
    tokens = 0
    for index, text in enumerate(texts):
        ids = tokenizer.encode(text)
        tokens += len(ids)
        state = prefix_state(ids)
        vector = [mixed(state, i) % 2001 / 1000 - 1 for i in range(_EMBEDDING_SIZE)]
        entries.append({"index": index, "object": "embedding", "embedding": vector})
    reply = {
        "id": f"embd-{secrets.token_hex(8)}",
        "object": "list",
        "created": wire.created_now(),
        "model": config.model,
        "data": entries,
        "usage": wire.counted(tokens, 0) | {"prompt_tokens_details": None},
    }
    return json_response(orjson.dumps(reply))


async def pull(request: web.Request) -> web.Response:
    """POST /sim/pull: another engine fetches, frees or keeps a pinned prompt."""
    pulled = request.app[NODE].engine.answer_pull(await read_body(request))
    if pulled is None:
        return json_response(b"{}", status=_CONFLICT)
    reply = {"state": pulled.state, "is_valid": pulled.is_valid, "tokens": pulled.tokens}
    return json_response(orjson.dumps(reply))


async def set_faults(request: web.Request) -> web.Response:
    """POST /sim/faults: failures that the next requests suffer, by the names of `Faults`."""
    faults, body = request.app[NODE].faults, await read_body(request)
    for name in faults.__slots__:
        if name in body:
            setattr(faults, name, body[name])
    return json_response(b"{}")
