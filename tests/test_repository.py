"""The files around the program agree with it: versions, image, CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.documents import ROOT, code, read, rows, section
from tests.fakes.ports import free_port
from tests.fakes.proxy import running_proxy
from tests.lowest_versions import USER_EXTRAS, bounds, lowest_text

PROJECT = tomllib.loads(read("pyproject.toml"))["project"]
PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.+]*)")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def locked() -> dict[str, str]:
    pins = {}
    for line in read("requirements-ci.lock").splitlines():
        if not line.startswith("#"):
            match = PIN.fullmatch(line.lower().replace("_", "-"))
            assert match is not None, f"{line!r} is not an exact version"
            pins[match[1]] = match[2]
    return pins


def tools() -> set[str]:
    """Return what tests and checks need beside the dependencies."""
    extras = PROJECT["optional-dependencies"]
    entries = [e for name, extra in extras.items() if name not in USER_EXTRAS for e in extra]
    names = {re.split(r"[\[>]", entry)[0] for entry in entries}
    return names - {PROJECT["name"]}


@pytest.mark.case("C87")
def test_the_lowest_versions_are_the_lower_bounds() -> None:
    assert read("constraints-lowest.txt") == lowest_text(), "run: python -m tests.lowest_versions"


@pytest.mark.case("C87")
def test_the_locked_versions_are_within_the_bounds() -> None:
    pins = locked()

    for name, (lowest, bound) in bounds().items():
        assert version(lowest) <= version(pins[name]) < version(bound), name


def test_the_lock_holds_all_that_the_tests_and_checks_need() -> None:
    assert tools() | set(bounds()) <= set(locked())


def test_every_dependency_has_its_reason() -> None:
    text = section(read("CONTRIBUTING.md"), "Dependencies")
    table, _, development = text.partition("\nFor development:")

    assert sorted(code(row[0])[0] for row in rows(table)) == sorted(bounds())
    assert set(code(development)) == tools()


def test_everything_that_is_imported_is_a_dependency() -> None:
    found: set[str] = set()
    for path in (ROOT / "pdproxy").rglob("*.py"):
        found.update(re.findall(r"^(?:import|from) (\w+)", path.read_text("utf-8"), re.MULTILINE))

    outside = found - set(sys.stdlib_module_names) - {"pdproxy"}

    # One package of Python, which several distributions fill.
    names = {re.sub("^opentelemetry-.*", "opentelemetry", name) for name in bounds()}
    assert {name.replace("_", "-") for name in outside} == names


def test_ci_ends_with_the_test_command_of_the_readme() -> None:
    last = read(".ci/run").rstrip().splitlines()[-1]

    assert last in read("README.md").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def healthcheck() -> list[str]:
    """Return the command by which the image checks its health, for this Python."""
    match = re.search(r"^HEALTHCHECK .*\\\n  CMD (\[.*\])$", read("Dockerfile"), re.MULTILINE)
    assert match is not None
    command: list[str] = tomllib.loads(f"command = {match[1]}")["command"]
    assert command[0] == "python"
    return [sys.executable, *command[1:]]


def run_healthcheck(port: int) -> int:
    # A proxy that nobody is: the way to oneself must not lead there.
    env = {**os.environ, "PDPROXY_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    ended = subprocess.run(healthcheck(), env=env, capture_output=True, timeout=20, check=False)
    return ended.returncode


@pytest.mark.e2e
@pytest.mark.slow
async def test_the_images_health_check_passes_while_the_proxy_answers() -> None:
    async with running_proxy([], [], wait_ready=False) as proxy:
        assert run_healthcheck(proxy.port) == 0


@pytest.mark.slow
def test_the_images_health_check_fails_without_a_proxy() -> None:
    assert run_healthcheck(free_port()) != 0


def test_the_image_gets_all_files_that_it_copies() -> None:
    dockerfile = read("Dockerfile")
    lines = re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
    copied = {name for line in lines for name in line.split()[:-1]}

    allowed = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}

    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_does_not_run_as_root_and_opens_the_default_port() -> None:
    lines = read("Dockerfile").splitlines()

    assert "USER 10001:10001" in lines
    assert "EXPOSE 1999" in lines
    assert 'ENTRYPOINT ["pdproxy"]' in lines
