"""Simulated engines that speak vLLM's wire format; they know nothing of the proxy.

The map, from the outside in:

    cli, cluster   one engine as a command; several engines for tests, benchmarks and the demo
    server         routes; generate.py, other_apis.py and operations.py answer them
    parsing        bodies -> checked requests, or vLLM's error bodies (problems.py)
    wire           vLLM's JSON bodies and SSE chunks, field by field as real engines send them
    scheduler      queue, engine steps, prefill and decode time, recompute on KV exhaustion
    transfer       the KV pull between two engines, and what goes wrong with it
    books, handles PURE: KV blocks, prefix cache; handles that are valid once
    model, grammar PURE: next token = hash of the whole effective prefix; JSON documents
    template, tokenizer  PURE: messages -> text -> token ids and back
"""
