"""Log-probabilities of a later round, as the client's answer has them."""

from __future__ import annotations

from pdproxy.core.api import GenerateRequest
from pdproxy.core.plain import Object, as_list, as_object, as_text, as_whole, plain


def shifted(logprobs: object, offset: int) -> object:
    """Let the text offsets of log-probabilities count from the start of the whole text."""
    if not isinstance(logprobs, dict) or not offset:
        return logprobs
    places = as_list(logprobs.get("text_offset"))
    return {**logprobs, "text_offset": [offset + (as_whole(each) or 0) for each in places]}


def as_chat(logprobs: object, request: GenerateRequest) -> object:
    """Return a completion's log-probabilities in the shape of chat."""
    if not isinstance(logprobs, dict):
        return None
    count = as_whole(plain(request.fields.get("top_logprobs"))) or 0
    names = ("tokens", "token_logprobs", "top_logprobs")
    columns = [as_list(logprobs.get(name)) for name in names]
    entries = []
    for token, value, others in zip(*columns, strict=False):
        top = [_entry(name, each) for name, each in as_object(others).items()]
        entries.append({**_entry(as_text(token), value), "top_logprobs": top[:count]})
    return {"content": entries}


def _entry(token: str, value: object) -> Object:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace"))}
