"""Ports that misbehave on purpose: refusing ones, and one that swallows connection attempts."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Below those that systems give to connections, which could take a port before it is listened on.
FREE_PORTS = range(20_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on at this moment, and that no connection will be given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(100):
        # Unseeded: test runs side by side must not go through the same ports.
        port = random.SystemRandom().choice(FREE_PORTS)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"{host} has no free port among {FREE_PORTS}")


@contextmanager
def refusing_port() -> Iterator[int]:
    """Hold a port that refuses connections and that nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextmanager
def black_hole() -> Iterator[int]:
    """Hold a port whose connection attempts get no answer: its queue is full for good."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port
