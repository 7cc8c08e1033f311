"""What the documents say is true: examples run, tables equal the program, links lead somewhere."""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pdproxy import errors
from pdproxy.cli import main
from pdproxy.core.fleet import Fleet
from pdproxy.core.instance import Role
from pdproxy.core.load import LoadBoard
from pdproxy.core.policy import POLICIES
from pdproxy.errors import PDProxyError
from pdproxy.runtime.help_text import shown_default
from pdproxy.runtime.metrics import Metrics
from pdproxy.runtime.settings import OPTIONS
from pdproxy.server.app import PASSED_PATHS, build_app
from pdproxy.server.context import Context
from tests.documents import DOCUMENTS, ROOT, anchors, code, commands, links, read, rows, section
from tests.fakes.ports import free_port

DEMO = "pip install -e . && pdproxy --demo"
TESTS = "pip install -e '.[dev]' && pytest -n auto"
START_S = 60.0
STOP_S = 20.0

EXAMPLES = [(path.name, line) for path in DOCUMENTS for line in commands(path)]
LAUNCHES = [line for _, line in EXAMPLES if line.startswith("pdproxy ")]
CURLS = [line for _, line in EXAMPLES if line.startswith("curl ")]
SETTINGS = {flag: option for option in OPTIONS for flag in option.flags}


# --- examples


def test_the_start_is_two_commands() -> None:
    assert commands(ROOT / "README.md")[:2] == [DEMO, TESTS]


@pytest.mark.parametrize("line", LAUNCHES)
def test_every_launch_line_is_a_valid_configuration(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    assert main([*shlex.split(line)[1:], "--check-config"]) == 0


class Demo:
    """`pdproxy --demo`, as a user starts it."""

    def __init__(self, port: int) -> None:
        script = Path(sys.executable).with_name("pdproxy")
        command = [str(script)] if script.exists() else [sys.executable, "-m", "pdproxy"]
        self.port = port
        self.process = subprocess.Popen(
            [*command, "--demo", "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.output = self._until("Ctrl-C ends everything.")

    def _until(self, end: str) -> str:
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if end in line:
                break
        return "".join(lines)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    running = Demo(free_port())
    yield running
    assert running.stop() == 0


def run_curl(line: str, demo: Demo) -> tuple[int, str]:
    """Run a documented curl line against the demo; return status and body."""
    argv = shlex.split(line.replace("localhost:1999", f"localhost:{demo.port}"))
    argv += ["-sS", "--noproxy", "*", "--max-time", "30", "-w", "\n%{http_code}"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    body, _, status = ended.stdout.rpartition("\n")
    return int(status), body


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("line", CURLS)
@pytest.mark.needs("curl")
def test_every_documented_request_is_answered(line: str, demo: Demo) -> None:
    status, body = run_curl(line, demo)

    assert status == 200, body
    if "chat/completions" in line:
        assert body.rstrip().endswith("data: [DONE]")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.needs("curl")
def test_the_request_that_the_demo_prints_is_answered_with_a_stream(demo: Demo) -> None:
    printed = [line.strip() for line in demo.output.splitlines() if "curl " in line]

    status, body = run_curl(printed[0], demo)

    assert len(printed) == 1
    assert status == 200
    assert body.count("data: ") > 40
    assert body.rstrip().endswith("data: [DONE]")


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_ends_the_demo_with_all_its_engines() -> None:
    demo = Demo(free_port())
    children = children_of(demo.process.pid)

    code_ = demo.stop()

    assert code_ == 0
    assert len(children) == 4
    deadline = time.monotonic() + STOP_S
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "an engine outlived the demo"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the child processes that run at this moment."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


# --- tables


def test_the_table_of_endpoints_is_the_program() -> None:
    context = cast("Context", SimpleNamespace(rules=SimpleNamespace(max_body_bytes=1)))
    routes = {
        f"{route.method} {route.resource.canonical}"
        for route in build_app(context).router.routes()
        if route.resource is not None and route.method not in {"HEAD", "*"}
    }

    documented = code(section(read("README.md"), "Endpoints"))

    assert {entry for entry in documented if re.match(r"[A-Z]+ /", entry)} == routes
    paths = {entry for entry in documented if entry.startswith("/")}
    assert paths == {*PASSED_PATHS, "/v1/*"}


def test_the_table_of_failures_has_the_statuses_and_codes_of_the_program() -> None:
    text = section(read("README.md"), "When things fail")
    documented = {(int(s), c) for s, c in re.findall(r"\b(\d{3}) `(\w+)`", text)}
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    deliberate = {(c.status, c.code) for c in classes if issubclass(c, PDProxyError)}

    unseen = {
        (502, "upstream_error"),  # only its subclasses are raised
        (500, "engine_error"),  # stands for the engine's own answer
        (500, "config_error"),  # at the start only
        (408, "client_stalled"),  # its connection is cut
    }

    assert documented == deliberate - unseen


def test_every_flag_in_the_documents_exists() -> None:
    others = {"--help", "--version", "--real-engines"}
    examples = {"--flag"}  # stands for any

    for path in DOCUMENTS:
        spans = " ".join([*code(path.read_text("utf-8")), *LAUNCHES])
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", spans):
            assert flag in {*SETTINGS, *others, *examples}, f"{path.name}: {flag}"


@pytest.mark.parametrize("heading", ["Towards clients", "Towards engines"])
def test_limits_are_documented_with_the_values_they_have(heading: str) -> None:
    seen = 0
    for _, value, _, flag, _ in rows(section(read("docs/limits.md"), heading)):
        if flag.startswith("`"):
            assert value == shown_default(SETTINGS[flag.strip("`")]), flag
            seen += 1
    assert seen > 4


def test_every_timeout_and_size_has_its_row_or_mention_in_the_limits() -> None:
    text = read("docs/limits.md")

    for option in OPTIONS:
        if option.metavar in {"SECONDS", "BYTES"}:
            is_there = option.flag in text or option.name in {"models_cache", "models_timeout"}
            assert is_there or option.name == "waiting_retry_interval", option.flag


def test_the_main_flags_are_documented_with_their_defaults() -> None:
    for flags, default, _ in rows(section(read("README.md"), "Main flags")):
        shown = {shown_default(SETTINGS[flag]) for flag in code(flags)}
        assert set(default.split(", ")) == shown, flags


def test_the_table_of_metrics_is_the_program() -> None:
    rng = random.Random(1)
    policies = {role: POLICIES["least_load"](role, rng) for role in Role}
    fleet = Fleet(LoadBoard(on_anomaly=lambda _slot, _text: None), policies, time.monotonic)
    families = [f for f in Metrics(fleet).registry.collect() if f.name.startswith("pdproxy_")]
    there = {(f"{f.name}{'_total' * (f.type == 'counter')}", f.type) for f in families}

    table = section(read("docs/operations.md"), "Metrics").partition("\n### ")[0]
    documented = [(code(row[0])[0], row[1]) for row in rows(table)]

    assert sorted(documented) == sorted(there)


def test_the_policies_are_all_explained() -> None:
    cells = [row[0] for row in rows(section(read("docs/architecture.md"), "Choosing an instance"))]

    assert sorted(code(" ".join(cells))) == sorted(POLICIES)


# --- links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link
