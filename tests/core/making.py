"""Short ways to requests and answers for the tests of continuations."""

import json

from pdproxy.core import sse
from pdproxy.core.answer import Answer
from pdproxy.core.api import Api, parse_generate
from pdproxy.core.jsonfields import join_object, raw

END_ID = 11  # the token that ends reasoning
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_generate(Api.CHAT, json.dumps({"messages": MESSAGES, **fields}).encode())


def completions(**fields):
    return parse_generate(Api.COMPLETIONS, json.dumps({"prompt": "once", **fields}).encode())


def body_of(request):
    """Return a request's body as a dict."""
    return json.loads(join_object(request.fields))


def answer_of(content="", *, reasoning="", ids=None, prompt_ids=(1, 2), **facts):
    """Return an answer with one choice, given back by its engine; all its ids have their text."""
    answer = Answer(prompt_tokens=2)
    if prompt_ids is not None:
        answer.prompt_ids = raw(list(prompt_ids))
    choice = answer.choice(0)
    for text, piece in ((choice.content, content), (choice.reasoning, reasoning)):
        if piece:
            text.add(piece)
    choice.has_all_ids = ids is not None
    choice.token_ids.extend(ids or ())
    choice.shown = choice.outputs = len(choice.token_ids)
    choice.is_flushed = True
    for name, value in facts.items():
        setattr(choice, name, value)
    return answer


def event(**chunk):
    """Return an SSE event of one chunk."""
    return sse.encode_data(json.dumps(chunk, separators=(",", ":")).encode())


def chat_event(delta, **fields):
    """Return an event of one chat choice; `usage` and `prompt_token_ids` go to the chunk."""
    top = {name: fields.pop(name) for name in ("usage", "prompt_token_ids", "id") if name in fields}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
    head: dict[str, object] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
    }
    return event(**(head | {"choices": [choice]} | top))


def text_event(text, **fields):
    """Return an event of one completions choice."""
    top = {name: fields.pop(name) for name in ("usage", "id") if name in fields}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **fields}
    head: dict[str, object] = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
    }
    return event(**(head | {"choices": [choice]} | top))


def chunks_of(block):
    """Return the chunks of a block of events."""
    return [json.loads(sse.data_of(each)) for each in sse.split_block(block)]
