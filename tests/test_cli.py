import os
import subprocess
import sys
import tomllib

import pytest

from pdproxy import __version__
from pdproxy.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PDPROXY_") or name == "OPENAI_API_KEY":
            monkeypatch.delenv(name)


def test_version_is_printed(capsys: Capture) -> None:
    assert main(["--version"]) == 0

    assert capsys.readouterr().out == f"pdproxy {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_printed_even_beside_faults(flag: str, capsys: Capture) -> None:
    assert main(["--port", "x", flag]) == 0

    captured = capsys.readouterr()
    assert captured.out.startswith("usage: pdproxy")
    assert captured.err == ""


def test_checking_prints_the_effective_settings(capsys: Capture) -> None:
    assert main(["--check-config", "--decoders", "A:7100", "--admin-token", "hidden"]) == 0

    captured = capsys.readouterr()
    assert tomllib.loads(captured.out)["decoders"] == ["A:7100"]
    assert "hidden" not in captured.out
    assert captured.err == ""


def test_checking_tells_of_warnings_beside_the_settings(capsys: Capture) -> None:
    assert main(["--check-config", "--kv-handle-ttl", "30", "--engine-insecure"]) == 0

    captured = capsys.readouterr()
    assert tomllib.loads(captured.out)["kv_handle_ttl"] == 30
    assert "warning" not in captured.out
    first, second = captured.err.splitlines()
    assert first.startswith("pdproxy: warning: --kv-handle-ttl is 30 s, but engines give up")
    assert second.startswith("pdproxy: warning: --engine-insecure: ")


def test_metrics_on_the_port_of_the_api_are_a_fault(capsys: Capture) -> None:
    assert main(["--check-config", "--port", "2000", "--metrics-port", "2000"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "pdproxy: --metrics-port: 2000 is --port too, on the same address\n"


def test_the_environment_is_read(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPROXY_PORT", "2000")

    assert main(["--check-config"]) == 0

    assert "port = 2000  # env" in capsys.readouterr().out


def test_every_fault_is_a_line_on_standard_error(capsys: Capture) -> None:
    code = main(["--port", "70000", "--check-config", "--worker", "-1", "--nonsense"])

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "pdproxy: argument 6: unknown option --nonsense",
        "pdproxy: --port: '70000' is not a port (1 to 65535)",
        "pdproxy: --workers: '-1' is below 0",
    ]


@pytest.mark.case("C84")
def test_the_command_ends_at_once_without_a_traceback_on_a_fault() -> None:
    argv = ["--prefiller-hosts", "A", "B", "C", "--prefiller-ports", "7100", "7101"]

    ended = subprocess.run(
        [sys.executable, "-m", "pdproxy", *argv],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "pdproxy: --prefiller-hosts: 3 hosts, but 2 ports in --prefiller-ports; one for each\n"
    )
