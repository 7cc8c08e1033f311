"""Every module has its tests, and stays small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pdproxy"
MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 60

# Modules without a test file of their own name, and the file that tests them instead.
TESTED_ELSEWHERE = {
    "core/judge": "tests/core/test_fleet.py",
    "core/lease": "tests/core/test_fleet.py",
    "core/member": "tests/core/test_fleet.py",
    "core/members": "tests/core/test_fleet.py",
    "runtime/following": "tests/runtime/test_reload.py",
    "upstream/allowed": "tests/upstream/test_allowed.py",
    "runtime/upkeep": "tests/runtime/test_settings.py",
    "runtime/watch": "tests/runtime/test_roster.py",
    "core/record": "tests/runtime/test_roster.py",
    "connectors/base": "tests/connectors/test_registry.py",
    "server/protocol": "tests/cases/test_malformed_http.py",
    "dispatch/attempt": "tests/dispatch/test_legs.py",
    "core/logprobs": "tests/core/test_seam.py",
    "dispatch/cuts": "tests/cases/test_recompute_lost.py",
    "dispatch/delivery": "tests/dispatch/test_generate.py",
    "dispatch/in_flight": "tests/dispatch/test_admission.py",
    "dispatch/part": "tests/cases/test_recompute_streams.py",
    "dispatch/ports": "tests/dispatch/test_generate.py",
    "dispatch/round": "tests/dispatch/test_generate.py",
    "dispatch/tracing": "tests/runtime/test_tracing.py",
    "dispatch/rounds": "tests/cases/test_recompute_streams.py",
    "dispatch/standing": "tests/dispatch/test_admission.py",
    "dispatch/rules": "tests/runtime/test_rules.py",
    "runtime/access": "tests/runtime/test_settings_sources.py",
    "runtime/bounds": "tests/runtime/test_settings.py",
    "runtime/cautions": "tests/runtime/test_settings.py",
    "runtime/command_line": "tests/runtime/test_settings_command_line.py",
    "runtime/cross_checks": "tests/runtime/test_settings.py",
    "runtime/demo": "tests/test_cli.py",
    "runtime/describe": "tests/runtime/test_settings_texts.py",
    "runtime/request_series": "tests/runtime/test_metrics.py",
    "runtime/help_text": "tests/runtime/test_settings_texts.py",
    "runtime/instruments": "tests/runtime/test_metrics.py",
    "runtime/instances_arg": "tests/runtime/test_settings_instances.py",
    "runtime/observing": "tests/runtime/test_settings_texts.py",
    "runtime/options": "tests/runtime/test_settings_command_line.py",
    "runtime/setting_types": "tests/runtime/test_settings_types.py",
    "runtime/sources": "tests/runtime/test_settings_sources.py",
    "runtime/otel": "tests/runtime/test_tracing.py",
    "runtime/aggregate": "tests/runtime/test_supervisor.py",
    "runtime/control": "tests/runtime/test_supervisor.py",
    "runtime/replica": "tests/runtime/test_supervisor.py",
    "runtime/worker_process": "tests/runtime/test_supervisor.py",
    "runtime/front": "tests/cases/test_shutdown.py",
    "runtime/site": "tests/cases/test_configuration.py",
    "runtime/start": "tests/cases/test_configuration.py",
    "runtime/reporter": "tests/runtime/test_recorder.py",
    "runtime/worker": "tests/cases/test_configuration.py",
    "server/context": "tests/server/test_intake.py",
    "upstream/limits": "tests/upstream/test_connection.py",
}

# Longer than they should be, with what they may have at most; the numbers may only go down.
LONG_FILES: dict[str, int] = {}


def modules() -> list[Path]:
    """All modules but the simulated engines, which are a program of their own."""
    found = sorted(PACKAGE.rglob("*.py"))
    return [path for path in found if "sim" not in path.relative_to(PACKAGE).parts]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


MODULES = [path for path in modules() if path.name not in {"__init__.py", "__main__.py"}]
EVERY_MODULE = pytest.mark.parametrize("path", MODULES, ids=name_of)


@EVERY_MODULE
def test_module_has_its_test_file(path):
    own = path.relative_to(PACKAGE).with_name(f"test_{path.stem}.py")
    file = TESTED_ELSEWHERE.get(name_of(path), f"tests/{own.as_posix()}")

    assert (ROOT / file).is_file(), f"{file} is missing"


def test_tables_name_modules_that_exist():
    names = {name_of(path) for path in MODULES}

    assert TESTED_ELSEWHERE.keys() <= names
    assert LONG_FILES.keys() <= names


@EVERY_MODULE
def test_module_is_short_and_says_what_it_is_for(path):
    text = path.read_text()
    tree = ast.parse(text)

    assert text.count("\n") <= LONG_FILES.get(name_of(path), MAX_FILE_LINES)
    assert ast.get_docstring(tree), "the first line says what the module is for"


@EVERY_MODULE
def test_functions_are_short(path):
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@EVERY_MODULE
def test_tasks_are_made_by_spawn_only(path):
    """A task group is fine too: it awaits its own, so none of them is forgotten."""
    made = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"create_task", "ensure_future"}
        and not (isinstance(node.value, ast.Name) and node.value.id == "group")
    ]
    assert not made or name_of(path) == "tasks", f"lines {made}"
