"""Pull: the prefiller answers with a handle, by which the decoder pulls the KV cache.

Source: vLLM 0.32 NixlConnector and the Mooncake connectors of vllm-ascend, which share it.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pdproxy.core.api import GenerateRequest
from pdproxy.core.jsonfields import JsonFields, Raw, join_object, raw

# Only do_remote_decode counts for current engines; older ones read the nulls too.
_ASK = raw(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
_ONE = Raw(b"1")
_FALSE = Raw(b"false")
# A decode that no engine accepts, since no model has so long a context; the prompt is not looked
# at before. An engine that cuts the limit down instead is left at its first event.
_REFUSED: JsonFields = {
    "prompt": Raw(b"[0]"),
    "max_tokens": Raw(b"2147483647"),
    "stream": Raw(b"true"),
}
# Anything but an object with something in it would be no handle to a decoder, and may end it.
_HANDLE = re.compile(rb"\{\s*[^\s}]")

# What only shapes the output and would end the one-token prefill early (no handle comes back with
# some connectors), make it fail, or make its reply longer. All else stays, since a chat template
# may render any field (tools, documents, response_format, template arguments) into the prompt.
_OUTPUT_FIELDS = frozenset(
    {
        "best_of",
        "echo",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "include_stop_str_in_output",
        "logprobs",
        "n",
        "return_token_ids",
        "stop",
        "stop_token_ids",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "top_logprobs",
    }
)


class PullConnector:
    """Prefill first, then decode with the whole handle that the prefiller returned."""

    name: ClassVar[str] = "pull"

    def prefill_body(self, request: GenerateRequest) -> bytes:
        """Return the client's body with one output token, not streamed, asking for a handle."""
        body = {k: v for k, v in request.fields.items() if k not in _OUTPUT_FIELDS}
        body["stream"] = _FALSE
        body["max_tokens"] = _ONE
        # A first token that is the end of the answer must not end the prefill as "stop".
        body["min_tokens"] = _ONE
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = _ONE
        body["kv_transfer_params"] = _ASK
        return join_object(body)

    def handle_of(self, reply: JsonFields) -> Raw | None:
        """Return `kv_transfer_params` whole, every key as it came."""
        handle = reply.get("kv_transfer_params")
        if handle is None or _HANDLE.match(memoryview(handle)) is None:
            return None
        return handle

    def decode_body(self, request: GenerateRequest, handle: Raw | None) -> bytes:
        """Return the client's body plus `kv_transfer_params`."""
        if handle is None:
            return join_object(request.fields)
        return join_object({**request.fields, "kv_transfer_params": handle})

    def release_body(self, model: Raw | None, handle: Raw) -> bytes:
        """Return a decode with the handle that is refused once it was read."""
        named = {} if model is None else {"model": model}
        return join_object({**named, **_REFUSED, "kv_transfer_params": handle})
