"""Simulated engines that speak vLLM's wire format; they know nothing of the proxy.

The map, from the outside in:

    cli, cluster    one engine as a command; several for tests, benchmarks and the demo
    server, node    routes, errors, start and stop; what the handlers share
    generate        answers a generation request, whole or as a stream; faults.py spoils it
    operations      models, health, metrics, tokenizer, the prefiller's side of a pull
    parsing         bodies -> checked requests; with fields.py, constraints.py, problems.py
    chat_wire, completion_wire, responses_api, messages_api, scaleout_api
                    each API's bodies and events; with wire.py and deltas.py
    scheduler       queue, engine steps, delays, recompute when KV runs out; with jobs.py
    fetching, transfer, handover
                    the KV pull: the decoder's end, the wire between, the prefiller's end
    books, handles  PURE: KV blocks and prefix cache; handles that are valid once
    model, scripts, grammar
                    PURE: next token = hash of the whole effective prefix; forced tokens; JSON
    template, tokenizer
                    PURE: messages -> text -> token ids and back
"""
