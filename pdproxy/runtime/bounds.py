"""The settings that bound time and memory: every wait and every buffer has one.

Rule: no limit is left to a library's default; a new wait or buffer gets its setting here.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic_settings import BaseSettings

from pdproxy.runtime import setting_types as types
from pdproxy.runtime.options import Group, Option, setting

T = TypeVar("T")


def _timeout(default: T, text: str) -> T:
    return setting(default, Option(Group.TIMEOUTS, "SECONDS", text))


def _limit(default: T, metavar: str, text: str) -> T:
    return setting(default, Option(Group.LIMITS, metavar, text))


class Bounds(BaseSettings):
    """Timeouts in seconds, limits in bytes or things; part of `Settings`.

    Zero stands for "no limit" only where the help says so.
    """

    # --- Timeouts
    connect_timeout: types.PositiveDuration = _timeout(
        5.0, "to open a connection to an engine, TLS included; a host that is down must cost little"
    )
    prefill_timeout: types.Duration = _timeout(
        600.0,
        "from the prefill request to its answer, 0: no limit; long enough for a million tokens "
        "in a queue",
    )
    first_token_timeout: types.Duration = _timeout(
        600.0,
        "from the decode request to its first event, 0: no limit; covers the KV transfer and the "
        "decoder's queue",
    )
    answer_timeout: types.Duration = _timeout(
        3600.0,
        "from the decode request to an answer that is not streamed, 0: no limit; an engine says "
        "nothing before it is complete",
    )
    idle_timeout: types.Duration = _timeout(
        300.0, "between two reads of an answer, 0: no limit; there is no limit on its total time"
    )
    write_stall_timeout: types.Duration = _timeout(
        300.0,
        "a client may leave a full buffer unread, 0: no limit; its decoder holds KV cache all the "
        "while",
    )
    header_timeout: types.Duration = _timeout(
        30.0,
        "for a client to send the head of a request once it has begun, 0: no limit; ends clients "
        "that trickle",
    )
    body_timeout: types.Duration = _timeout(
        60.0, "for a client to send its body, 0: no limit; ends clients that trickle"
    )
    keepalive_timeout: types.Duration = _timeout(
        75.0,
        "a client's idle connection stays open, 0: none does; above a load balancer's usual 60 s",
    )
    engine_keepalive_timeout: types.Duration = _timeout(
        4.0,
        "an idle connection to an engine is kept for reuse, 0: none is; below the 5 s after which "
        "uvicorn closes it",
    )
    kv_release_timeout: types.PositiveDuration = _timeout(
        10.0,
        "for a KV handle that is not used to be released at its prefiller; engines give it up by "
        "themselves after 30 s and more",
    )
    queue_timeout: types.Duration = _timeout(
        30.0,
        "a request may wait for its turn, 0: no limit; it has not been begun, so a client can try "
        "again elsewhere",
    )
    models_timeout: types.PositiveDuration = _timeout(3.0, "for one engine to answer /v1/models")
    shutdown_delay: types.Duration = _timeout(
        0.0,
        "requests are still accepted after SIGTERM while /ready says 503; what a load balancer "
        "needs to see that",
    )
    shutdown_grace: types.Duration = _timeout(
        25.0,
        "for requests to end after SIGTERM and --shutdown-delay before they are cut, 0: at once; "
        "below the 30 s after which Kubernetes kills",
    )

    # --- Limits
    max_body_bytes: types.Size = _limit(
        256 << 20,
        "BYTES",
        "largest request body, after decompression; images travel in it as base64",
    )
    max_header_bytes: types.Size = _limit(
        64 << 10,
        "BYTES",
        "largest request line, and largest single header, of a client; cookies and traces add up",
    )
    max_event_bytes: types.Size = _limit(
        64 << 20,
        "BYTES",
        "largest single event of a stream; logprobs and prompt token ids make long ones",
    )
    max_answer_bytes: types.Size = _limit(
        1 << 30,
        "BYTES",
        "largest answer that is held as a whole, for a client that does not stream",
    )
    stream_buffer_bytes: types.Size = _limit(
        256 << 10,
        "BYTES",
        "unsent bytes per stream above which its decoder is not read; the memory of a slow reader",
    )
    max_parallel_prompts: types.Count = _limit(
        16,
        "N",
        "prompts of one list request in flight at once, so that one client cannot fill the "
        "engines' queues",
    )
    max_in_flight: types.Amount = _limit(
        0, "N", "client requests that are worked on at once, 0: no limit; others wait"
    )
    max_queue: types.Amount = _limit(
        1024,
        "N",
        "requests that wait for their turn; beyond them 429 with Retry-After. 0: none waits",
    )
    max_per_prefiller: types.Amount = _limit(
        0, "N", "prompts in flight on one prefiller, 0: no limit; others wait"
    )
    max_per_decoder: types.Amount = _limit(
        0, "N", "answers in flight on one decoder, 0: no limit; others wait"
    )
    kv_queue: types.Switch = _limit(
        True,
        "on|off",
        "let requests wait while no decoder has room for their KV cache, as far as the decoders' "
        "capacity is known; at the end of --queue-timeout the least full one gets them",
    )
    kv_release_concurrency: types.Amount = _limit(
        32,
        "N",
        "KV handles that are released at once; 0: none is, and the prefillers hold them until "
        "their leases end",
    )
    kv_release_queue: types.Amount = _limit(
        4096, "N", "KV handles that wait to be released; more are left to the prefillers' leases"
    )
