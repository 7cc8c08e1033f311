import pytest

from pdproxy.runtime.command_line import HELP, VERSION, CommandLine, read_command_line
from pdproxy.runtime.settings import OPTIONS


def read(*argv: str) -> CommandLine:
    return read_command_line(argv, OPTIONS)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["--port", "1"], {"port": "1"}, id="apart"),
        pytest.param(["--port=1"], {"port": "1"}, id="attached"),
        pytest.param(["--port="], {"port": ""}, id="attached and empty"),
        pytest.param(["--host", ""], {"host": ""}, id="empty"),
        pytest.param(["--engine-api-key=a=b"], {"engine_api_key": "a=b"}, id="two equal signs"),
        pytest.param(["--max-retries", "-1"], {"max_retries": "-1"}, id="negative"),
        pytest.param(["--retry-delay", "-.5"], {"retry_delay": "-.5"}, id="negative fraction"),
        pytest.param(["--retry-delay", "-1e3"], {"retry_delay": "-1e3"}, id="negative power"),
        pytest.param(["--port", "1", "--port", "2"], {"port": "2"}, id="last one wins"),
        pytest.param(
            ["--decoder-hosts", "A", "B", "--port", "1"],
            {"decoder_hosts": ["A", "B"], "port": "1"},
            id="list up to the next flag",
        ),
        pytest.param(
            ["--decoder-ports", "1", "-2"], {"decoder_ports": ["1", "-2"]}, id="negative in a list"
        ),
        pytest.param(
            ["--decoder-hosts", "A", "--decoder-hosts", "B"],
            {"decoder_hosts": ["B"]},
            id="last of the reference's lists wins",
        ),
        pytest.param(
            ["--decoders", "A:1", "--decoders", "B:1"],
            {"decoders": ["A:1", "B:1"]},
            id="short forms add up",
        ),
        pytest.param(
            ["--api-key", "a", "--api-keys", "b"], {"api_keys": ["a", "b"]}, id="keys add up"
        ),
        pytest.param(["--demo"], {"demo": True}, id="switch"),
        pytest.param(["--engine-insecure=no"], {"engine_insecure": "no"}, id="switch with a value"),
        pytest.param(["--prefiller-host", "A"], {"prefiller_hosts": ["A"]}, id="alias"),
        pytest.param(["--first", "1"], {"first_token_timeout": "1"}, id="beginning"),
        pytest.param(["--wor=2"], {"workers": "2"}, id="beginning with a value"),
    ],
)
def test_it_reads_as_argparse_does(argv: list[str], expected: dict[str, object]) -> None:
    command = read(*argv)

    assert command.values == expected
    assert command.faults == []


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("--po", "port"),
        ("--ho", "host"),
        ("--prefiller-h", "prefiller_hosts"),
        ("--prefiller-p", "prefiller_ports"),
        ("--decoder-h", "decoder_hosts"),
        ("--decoder-port", "decoder_ports"),
        ("--max-r", "max_retries"),
        ("--max-w", "max_waiting_retries"),
        ("--ret", "retry_delay"),
        ("--wai", "waiting_retry_interval"),
        ("--w", None),
        ("--work", "workers"),
        ("--log", "log_level"),
        ("--l", "log_level"),
    ],
)
def test_beginnings_that_the_reference_accepts_keep_their_meaning(
    typed: str, name: str | None
) -> None:
    command = read(typed, "1")

    assert list(command.values) == ([name] if name else [])
    assert bool(command.faults) == (name is None)


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        pytest.param(
            ["--prot", "1"], "argument 1: unknown option --prot; is --port meant?", id="misspelt"
        ),
        pytest.param(["--qqqqq"], "argument 1: unknown option --qqqqq", id="like nothing"),
        pytest.param(["-x"], "argument 1: unknown option -x", id="short"),
        pytest.param(["--"], "argument 1: unknown option --", id="two dashes"),
        pytest.param(
            ["--log_format=json"],
            "argument 1: unknown option --log_format; is --log-format meant?",
            id="underscore",
        ),
        pytest.param(
            ["--decode"],
            "argument 1: --decode may mean --decode-policy, --decoder-dns, --decoder-hosts, "
            "--decoder-ports, --decoders",
            id="ambiguous",
        ),
        pytest.param(["A:1"], "argument 1 ('A:1') follows no option", id="stray"),
        pytest.param(["--port", "1", "2"], "argument 3 ('2') follows no option", id="too many"),
        pytest.param(
            ["--demo", "yes"], "argument 2 ('yes') follows no option", id="after a switch"
        ),
        pytest.param(
            ["--admin-token", "a", "b"], "argument 3 follows no option", id="half a secret"
        ),
        pytest.param(["--port"], "--port: no value, where PORT is expected", id="nothing follows"),
        pytest.param(
            ["--decoders", "--demo"],
            "--decoders: no value, where HOST:PORTS is expected",
            id="a flag follows",
        ),
        pytest.param(
            ["--openai-api-key", "a"],
            "argument 1: unknown option --openai-api-key; is --engine-api-key meant?",
            id="not a flag",
        ),
    ],
)
def test_a_fault_names_place_and_option(argv: list[str], fault: str) -> None:
    assert read(*argv).faults == [fault]


def test_it_goes_on_after_a_fault() -> None:
    command = read("x", "--prot", "1", "--port", "2", "--decoders", "--host")

    assert len(command.faults) == 4
    assert command.values == {"port": "2"}


def test_help_and_version_are_told() -> None:
    assert read("-h").asks(HELP)
    assert read("--vers").asks(VERSION)
    assert not read("--port", "1").asks(HELP)
