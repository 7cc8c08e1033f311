"""Engines as processes: they come up together, work together, and never stay behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from pdproxy.sim import cli
from pdproxy.sim.cluster import ClusterError, arguments_of, in_process, processes
from pdproxy.sim.config import SimConfig
from tests.sim.clients import COMPLETIONS, until

BODY = {"prompt": "Across processes", "max_tokens": 12, "ignore_eos": True}


def is_running(pid):
    """Whether a process exists and is no zombie; a child's end is not always collected here."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] != b"Z"
    except FileNotFoundError:
        return False


async def post(session, url, body):
    async with session.post(url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        return await response.json()


@pytest.mark.e2e
async def test_prefillers_and_decoders_work_across_processes(session):
    async with processes(SimConfig(model="m")) as cluster:
        children = cluster.prefillers + cluster.decoders
        asked = BODY | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        handle = (await post(session, cluster.prefillers[1].url, asked))["kv_transfer_params"]
        split = await post(session, cluster.decoders[0].url, BODY | {"kv_transfer_params": handle})
        plain = await post(session, cluster.decoders[1].url, BODY)

    assert [child.role for child in children] == ["prefill", "prefill", "decode", "decode"]
    assert split["choices"] == plain["choices"]
    assert all(child.process.returncode == 0 for child in children)


@pytest.mark.e2e
async def test_an_engine_that_cannot_start_is_an_error():
    async with in_process(SimConfig()) as taken:
        with pytest.raises(ClusterError, match="ended with status"):
            async with processes(prefiller_ports=[taken.port], decoder_ports=[]):
                pytest.fail("the port is taken")


@pytest.mark.e2e
async def test_engines_end_when_their_parent_is_killed():
    code = """
        import asyncio
        from pdproxy.sim.cluster import processes

        async def main():
            async with processes(prefiller_ports=[0], decoder_ports=[0]) as cluster:
                children = cluster.prefillers + cluster.decoders
                print(*(child.process.pid for child in children), flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    children = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(children) == 2

    parent.kill()
    await parent.wait()

    await until(lambda: not any(map(is_running, children)))


@pytest.mark.e2e
async def test_sigterm_ends_the_command():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdproxy.sim.cli", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    line = await process.stdout.readline()

    os.kill(process.pid, signal.SIGTERM)

    assert line.startswith(b"pdproxy-sim ready: both at http://127.0.0.1:")
    assert await asyncio.wait_for(process.wait(), 5) == 0


@pytest.mark.e2e
async def test_a_crashing_engine_ends_its_process(session):
    config = SimConfig(crash_on_bad_handle=True)
    async with processes(config, prefiller_ports=[], decoder_ports=[0]) as cluster:
        decoder = cluster.decoders[0]
        body = BODY | {"kv_transfer_params": {"do_remote_prefill": True}}
        async with session.post(decoder.url + COMPLETIONS, json=body) as response:
            assert response.status == 500

        assert await asyncio.wait_for(decoder.process.wait(), 5) == 1


def test_the_command_line_says_all_of_a_config():
    config = SimConfig(
        role="decode", model="m", num_blocks=7, kv_lease_s=1.5, reasoning=True, scale_out=True,
        load_failure_policy="recompute", eos_odds=9, prompt_tokens_details=False, api_key="k",
    )  # fmt: skip

    given = vars(cli.parser().parse_args(arguments_of(config)))

    assert SimConfig(**{k: v for k, v in given.items() if k != "exit_with_stdin"}) == config


def test_every_option_is_a_field_of_the_config(capsys):
    arguments = vars(cli.parser().parse_args([]))
    del arguments["exit_with_stdin"]

    assert SimConfig(**arguments) == SimConfig()
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["--help"])
    assert "--num-blocks" in capsys.readouterr().out
