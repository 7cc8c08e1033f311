"""The command `pdproxy-sim`: one simulated engine in a process of its own."""

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import fields
from typing import get_args

import uvloop

from pdproxy.sim.config import LoadFailurePolicy, Role, SimConfig
from pdproxy.sim.server import serve

_CRASH_STATUS = 1
_STDIN = 0

# Name, type, and what it does; the defaults are those of SimConfig.
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("host", str, "address to listen on"),
    ("port", int, "port to listen on; 0 takes a free one"),
    ("model", str, "served model name"),
    ("root", str, "model path that /v1/models reports"),
    ("engine_id", str, "name of the engine in its KV handles; random if not given"),
    ("max_model_len", int, "most tokens of one request, prompt and output"),
    ("block_size", int, "tokens per KV block"),
    ("num_blocks", int, "KV capacity in blocks"),
    ("max_num_seqs", int, "running requests at once"),
    ("max_n_sequences", int, "choices of one request at most"),
    ("max_queued_requests", int, "waiting requests beyond which it answers 503"),
    ("kv_lease_s", float, "seconds a prefilled prompt waits for its decoder"),
    ("prefill_base_s", float, "seconds of each prefill step"),
    ("prefill_per_token_s", float, "seconds per uncached prompt token"),
    ("decode_base_s", float, "seconds of each decode step"),
    ("decode_per_request_s", float, "seconds per running request in a decode step"),
    ("transfer_base_s", float, "seconds of each KV transfer"),
    ("transfer_per_token_s", float, "seconds per transferred prompt token"),
    ("tokens_per_step", int, "tokens per step and event, as with speculative decoding"),
    ("eos_odds", int, "an answer ends by itself once in so many tokens"),
    ("model_seed", int, "the weights: engines that work together share it"),
    ("reasoning_tokens", int, "tokens of reasoning, with --reasoning"),
    ("load_failure_delay_s", float, "seconds until a dead prefiller is given up"),
    ("api_key", str, "bearer token wanted on /v1 and /inference"),
)
_METAVARS: dict[type, str] = {str: "NAME", int: "N", float: "SECONDS"}
_FLAGS = {
    "prompt_tokens_details": "report cached tokens in usage",
    "reasoning": "answers begin with reasoning",
    "crash_on_bad_handle": "a malformed KV handle ends the process, as it ends vLLM",
    "request_id_headers": "answer with an x-request-id header",
    "scale_out": "open the token-in, token-out endpoints",
}


def parser() -> argparse.ArgumentParser:
    """The command line of one engine."""
    arguments = argparse.ArgumentParser(
        prog="pdproxy-sim",
        description="A simulated inference engine with vLLM's HTTP interface. It keeps real books "
        "of KV blocks and handles; its toy model writes the same text for the same prefix.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = {field.name: field.default for field in fields(SimConfig)}
    arguments.add_argument(
        "--role", choices=get_args(Role), default=defaults["role"], help="what it says it is"
    )
    for name, kind, text in _OPTIONS:
        flag = "--" + name.replace("_", "-")
        arguments.add_argument(
            flag, type=kind, default=defaults[name], metavar=_METAVARS[kind], help=text
        )
    arguments.add_argument(
        "--load-failure-policy",
        choices=get_args(LoadFailurePolicy),
        default=defaults["load_failure_policy"],
        help="after a failed KV pull",
    )
    for name, text in _FLAGS.items():
        arguments.add_argument(
            "--" + name.replace("_", "-"),
            action=argparse.BooleanOptionalAction,
            default=defaults[name],
            help=text,
        )
    arguments.add_argument(
        "--exit-with-stdin", action="store_true", help="stop when standard input is closed"
    )
    return arguments


def main() -> None:
    """Run one engine until SIGINT or SIGTERM."""
    given = vars(parser().parse_args())
    exit_with_stdin = given.pop("exit_with_stdin")
    config = SimConfig(**given)
    try:
        uvloop.run(_run(config, exit_with_stdin=exit_with_stdin))
    except OSError as error:
        sys.exit(f"pdproxy-sim: {error}")


async def _run(config: SimConfig, *, exit_with_stdin: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopped.set)
    if exit_with_stdin:
        loop.add_reader(_STDIN, _watch_stdin, loop, stopped)
    async with serve(config, on_crash=_crash) as sim:
        line = f"pdproxy-sim ready: {config.role} at {sim.url} model={config.model}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        await stopped.wait()


def _watch_stdin(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """The end of standard input is the end of the parent, however it came about."""
    if not os.read(_STDIN, 4096):
        loop.remove_reader(_STDIN)
        stopped.set()


def _crash() -> None:
    """End like an engine whose core has died: soon, but after the error answers went out."""
    asyncio.get_running_loop().call_later(0.2, os._exit, _CRASH_STATUS)


if __name__ == "__main__":
    main()
