"""The limits of the engine client: what a caller sets per request, what is set once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long an engine may take for each step of one request; None means no limit.

    Attributes:
        connect_s: name resolution, TCP and TLS together.
        head_s: from the request's hand-over to the response head; also how long it may refuse
            to take more of the request.
        idle_s: between two reads of the body; does not run while the caller has paused.
    """

    connect_s: float
    head_s: float | None
    idle_s: float | None


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The limits of an engine client; connections in use are never limited.

    Attributes:
        idle_keepalive_s: an older idle connection is not used again; below the 5 s after which
            uvicorn, the server of most engines, closes one.
        max_idle_per_endpoint: idle connections kept for one endpoint.
        max_head_bytes: of a response head, 1xx heads and trailers included.
        unclaimed_body_bytes: of a body that nobody reads yet, then the engine has to wait.
    """

    idle_keepalive_s: float = 4.0
    max_idle_per_endpoint: int = 1024
    max_head_bytes: int = 256 * 1024
    unclaimed_body_bytes: int = 256 * 1024
