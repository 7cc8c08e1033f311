"""pdproxy: an OpenAI-compatible proxy for engines with disaggregated prefill and decode.

The map, from the outside in; an arrow of import points only downwards in this list:

    cli         the command: parse, check, run
    runtime     settings, logs, metrics, and worker.py, which wires everything
    server      HTTP in: routes, generate, admin, operations, failures as OpenAI errors
    dispatch    one request from start to end: legs, retries, relay; no web framework
    upstream    HTTP out: connections to engines, pools, the prober
    connectors  PURE: a KV transfer protocol as two request bodies and an order
    core        PURE: requests, SSE, chunks, load, fleet, policies
    errors      every deliberate error
    sim         simulated engines; knows nothing of the rest
"""

__version__ = "0.1.0"
