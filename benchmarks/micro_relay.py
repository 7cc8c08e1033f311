"""What the relay costs per streamed token, in microseconds of CPU: seen, kept, and with ids hidden.

    python -m benchmarks.micro_relay

Compares, in one run: looking at an event only (`--recompute off`), keeping the answer, and keeping
it while the token ids that pdproxy asked for are hidden (`--token-ids always`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pdproxy.core.answer import Answer
from pdproxy.core.chunks import is_plain
from pdproxy.core.keeper import Keeper
from pdproxy.core.sse import EventSplitter

ROUNDS, EVENTS = 15, 20_000
EVENT = (
    b'data: {"id":"chatcmpl-3f2a9c","object":"chat.completion.chunk","created":1796068683,'
    b'"model":"kimi","choices":[{"index":0,"delta":{"content":" symbol"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":%b}]}\n\n'
)
PLAIN, WITH_IDS = EVENT % b"null", EVENT % b"[34231]"


def cost_us(make: Callable[[], Callable[[bytes], object]], event: bytes) -> float:
    """Return the least CPU time per event over the rounds, the splitter included."""
    best = float("inf")
    for _ in range(ROUNDS):
        feed, take = EventSplitter().feed, make()
        started = time.process_time()
        for _ in range(EVENTS):
            take(feed(event))
        best = min(best, time.process_time() - started)
    return 1e6 * best / EVENTS


def keep() -> Callable[[bytes], object]:
    """Return what keeps an answer and hides its ids."""
    return Keeper(Answer(), shows_ids=False).take


def main() -> None:
    """Print the three figures."""
    looked = cost_us(lambda: is_plain, PLAIN)
    kept = cost_us(keep, PLAIN)
    hidden = cost_us(keep, WITH_IDS)
    print(f"looked at only            {looked:5.2f} us per event")
    print(f"kept                      {kept:5.2f} us per event  ({kept - looked:+.2f})")
    print(f"kept, token ids hidden    {hidden:5.2f} us per event  ({hidden - looked:+.2f})")


if __name__ == "__main__":
    main()
