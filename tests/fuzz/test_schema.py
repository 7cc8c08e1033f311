"""Requests made from the proxy's own OpenAPI document: all are answered as it says."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.proxy import started
from pdproxy.sim.cluster import processes
from pdproxy.sim.config import SimConfig

EXAMPLES = 8  # per operation, beside those at the edges of each field
CHECKS = (
    "not_a_server_error,status_code_conformance,"
    "content_type_conformance,response_schema_conformance"
)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_operation_answers_as_the_document_says(tmp_path: Path) -> None:
    # Small numbers of choices and tokens: what an engine can take is not the question here.
    config = SimConfig(model="sim", max_n_sequences=4, max_model_len=256)
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert command is not None, "schemathesis is not installed: pip install -e '.[dev]'"
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(processes(config))
        proxy = started(cluster.prefillers, cluster.decoders)
        url, _ = await stack.enter_async_context(proxy)
        run = await asyncio.create_subprocess_exec(
            *(command, "run", f"{url}/openapi.json", "--seed", "1", "--no-color"),
            *("--max-examples", str(EXAMPLES), "--checks", CHECKS, "--request-timeout", "60"),
            # Added instances would be asked for at addresses that are made up.
            *("--exclude-path", "/instances/add", "--suppress-health-check", "all"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await run.communicate()

    assert run.returncode == 0, output.decode()[-8000:]
