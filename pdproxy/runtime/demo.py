"""The demo: simulated engines as child processes, the real proxy in front of them."""

from __future__ import annotations

import asyncio
import socket
import sys

import uvloop

from pdproxy.runtime.listener import bind
from pdproxy.runtime.logs import setup_logging
from pdproxy.runtime.settings import Settings
from pdproxy.runtime.worker import Worker, serve_until_signal
from pdproxy.sim.cluster import Cluster, ClusterError, processes
from pdproxy.sim.config import SimConfig

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as shells report a program that Ctrl-C ended
# Slow enough that an answer is seen to stream, quick enough that nobody waits for it.
ENGINES = SimConfig(
    model="demo",
    prefill_base_s=0.02,
    prefill_per_token_s=0.0002,
    decode_base_s=0.03,
    decode_per_request_s=0.001,
)

HINT = """
pdproxy answers on http://{address} with 2 simulated prefillers and 2 decoders behind it. Try, in
another terminal:

  curl -N http://{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'

The simulated model writes nonsense; what is real is its way here. Then look at
  the access line below     which prefiller and which decoder served it, and how long each step took
  http://{address}/ready     whether requests can be served now
  http://{address}/metrics   requests, loads and states for Prometheus
Ctrl-C ends everything.

"""
BODY = (
    '{"model": "demo", "stream": true, "max_tokens": 40, '
    '"messages": [{"role": "user", "content": "Hello"}]}'
)


def run(settings: Settings) -> int:
    """Run the demo until Ctrl-C; return the exit code.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    setup_logging(settings.log_level, settings.log_format)
    sockets = bind(settings.host, settings.port, settings.listen_backlog)
    sys.stdout.write("starting 2 prefillers and 2 decoders ...\n")
    sys.stdout.flush()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, sockets))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ClusterError as error:
        sys.stderr.write(f"pdproxy: the demo's engines did not start: {error}\n")
        return EXIT_FAILED


async def _serve(settings: Settings, sockets: list[socket.socket]) -> int:
    async with processes(ENGINES) as cluster:
        return await serve_until_signal(_with_engines(settings, cluster), sockets, _announce)


def _with_engines(settings: Settings, cluster: Cluster) -> Settings:
    """Return the settings with the demo's engines in place of any others."""
    values = settings.model_dump() | {
        "prefiller_hosts": (),
        "prefiller_ports": (),
        "decoder_hosts": (),
        "decoder_ports": (),
        "prefillers": tuple(f"{child.host}:{child.port}" for child in cluster.prefillers),
        "decoders": tuple(f"{child.host}:{child.port}" for child in cluster.decoders),
    }
    return Settings(**values)


def _announce(worker: Worker) -> None:
    address = f"localhost:{worker.port}"
    sys.stdout.write(HINT.format(address=address, body=BODY))
    sys.stdout.flush()
