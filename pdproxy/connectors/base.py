"""What a KV transfer protocol is to the proxy: two request bodies and the handle between them."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pdproxy.core.api import GenerateRequest
from pdproxy.core.jsonfields import JsonFields, Raw


class Connector(Protocol):
    """One KV transfer protocol; pure, without state."""

    name: ClassVar[str]

    def prefill_body(self, request: GenerateRequest) -> bytes:
        """Return the body that makes a prefiller compute the prompt and keep its KV cache."""
        ...

    def handle_of(self, reply: JsonFields) -> Raw | None:
        """Return the KV handle of a prefiller's reply, None if it gave none."""
        ...

    def decode_body(self, request: GenerateRequest, handle: Raw | None) -> bytes:
        """Return the client's own body plus the handle, and nothing else."""
        ...

    def release_body(self, model: Raw | None, handle: Raw) -> bytes:
        """Return a body for /v1/completions by which a decoder frees the handle's blocks."""
        ...
