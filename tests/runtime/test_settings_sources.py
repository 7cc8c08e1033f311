from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pdproxy.errors import ConfigError
from pdproxy.runtime.options import Origin
from pdproxy.runtime.settings import OPTIONS
from pdproxy.runtime.sources import load_settings


def faults_of(*argv: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(argv, environ)
    return list(caught.value.faults)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pdproxy.toml"


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(file: Path) -> None:
    file.write_text("port = 1\nworkers = 1\nmax_retries = 1\n")
    environ = {"PDPROXY_PORT": "2", "PDPROXY_WORKERS": "2"}

    settings = load_settings(["--config", str(file), "--port", "3"], environ)

    assert (settings.port, settings.workers, settings.max_retries) == (3, 2, 1)
    assert settings.idle_timeout == 300
    assert settings.origins == {
        "config": Origin.FLAG,
        "port": Origin.FLAG,
        "workers": Origin.ENV,
        "max_retries": Origin.FILE,
    }


def test_the_reference_command_line_works() -> None:
    line = (
        "--host 192.0.2.1 --port 1999 --prefiller-hosts A A B --prefiller-ports 7100 7101 7100 "
        "--decoder-hosts C D --decoder-ports 7100 7100 --max-retries 3 --retry-delay 0.001 "
        "--max-waiting-retries 3 --waiting-retry-interval 10 --workers 1 --log-level INFO"
    )

    settings = load_settings(line.split(), {})

    assert [str(e) for e in settings.prefill_endpoints] == ["A:7100", "A:7101", "B:7100"]
    assert [str(e) for e in settings.decode_endpoints] == ["C:7100", "D:7100"]
    assert settings.retry_delay == 0.001


def test_the_file_may_be_named_by_a_variable(file: Path) -> None:
    file.write_text('log-level = "debug"\nprefiller_host = "A"\nprefiller_port = 7100\n')

    settings = load_settings([], {"PDPROXY_CONFIG": str(file)})

    assert settings.log_level == "DEBUG"
    assert [str(e) for e in settings.prefill_endpoints] == ["A:7100"]


def test_lists_in_variables_are_parted() -> None:
    environ = {
        "PDPROXY_PREFILLERS": "A:7100,7102  B:7100",
        "PDPROXY_DECODER_HOSTS": "C, D",
        "PDPROXY_DECODER_PORTS": "7100 7101",
        "PDPROXY_API_KEY": "k1,k2",
    }

    settings = load_settings([], environ)

    assert [str(e) for e in settings.prefill_endpoints] == ["A:7100", "A:7102", "B:7100"]
    assert [str(e) for e in settings.decode_endpoints] == ["C:7100", "D:7101"]
    assert len(settings.api_keys) == 2


def test_instances_of_a_stronger_source_replace_both_spellings(file: Path) -> None:
    file.write_text('prefiller_hosts = ["A"]\nprefiller_ports = [1]\ndecoders = ["B:1"]\n')

    settings = load_settings(["--config", str(file), "--prefillers", "C:1"], {})

    assert [str(e) for e in settings.prefill_endpoints] == ["C:1"]
    assert [str(e) for e in settings.decode_endpoints] == ["B:1"]


def test_a_strong_value_hides_a_wrong_weak_one() -> None:
    assert load_settings(["--port", "1"], {"PDPROXY_PORT": "x"}).port == 1


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_counts_as_unset(value: str) -> None:
    settings = load_settings([], {"PDPROXY_PORT": value, "OPENAI_API_KEY": value})

    assert settings.port == 1999
    assert settings.openai_api_key is None


def test_the_key_of_the_reference_is_read_from_its_variable() -> None:
    key = load_settings([], {"OPENAI_API_KEY": "sk-1"}).openai_api_key

    assert key is not None
    assert key.get_secret_value() == "sk-1"


def test_variables_that_describe_a_kubernetes_service_are_passed_over() -> None:
    environ = {
        "PDPROXY_SERVICE_HOST": "10.0.0.1",
        "PDPROXY_SERVICE_PORT": "1999",
        "PDPROXY_SERVICE_PORT_HTTP": "1999",
        "PDPROXY_PORT": "tcp://10.0.0.1:1999",
        "PDPROXY_PORT_1999_TCP": "tcp://10.0.0.1:1999",
        "PDPROXY_PORT_1999_TCP_PROTO": "tcp",
        "PDPROXY_PORT_1999_TCP_PORT": "1999",
        "PDPROXY_PORT_1999_TCP_ADDR": "10.0.0.1",
        "PDPROXY_ADMIN_SERVICE_HOST": "10.0.0.2",
        "PDPROXY_ADMIN_PORT": "tcp://10.0.0.2:80",
    }

    assert load_settings([], environ).origins == {}


def test_all_faults_of_all_sources_are_told_at_once(file: Path) -> None:
    file.write_text(
        'workers = -1\nlog_levle = "INFO"\nprefillers = ["A:1", "B"]\nserver = {a = 1}\n'
    )

    faults = faults_of(
        "--config", str(file), "--prot", "1", "--decoder-ports", "1", "70000", "x", "--seed", "y",
        PDPROXY_IDLE_TIMEOUT="-1", PDPROXY_HOSST="A",
    )  # fmt: skip

    assert faults == [
        "argument 3: unknown option --prot; is --port meant?",
        "PDPROXY_HOSST: unknown variable; is PDPROXY_HOST meant?",
        f"{file}: log_levle: unknown key; is log_level meant?",
        f"{file}: server: unknown key",
        "--decoder-ports: value 2 of 3 ('70000') is not a port (1 to 65535)",
        "--decoder-ports: value 3 of 3 ('x') is not a port (1 to 65535)",
        "--seed: 'y' is not a whole number",
        "PDPROXY_IDLE_TIMEOUT: '-1' is not a number of seconds (0 or more)",
        f"{file}: workers: -1 is below 0",
        (
            f"{file}: prefillers: value 2 of 2 ('B') is not HOST:PORTS: "
            "the port is missing, such as in host:8000"
        ),
    ]


@pytest.mark.case("C84")
@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        pytest.param(
            "--prefiller-hosts A B C --prefiller-ports 1 2",
            "--prefiller-hosts: 3 hosts, but 2 ports in --prefiller-ports; one for each",
            id="three and two",
        ),
        pytest.param(
            "--decoder-host A B --decoder-port 1",
            "--decoder-host: 2 hosts, but 1 port in --decoder-ports; one for each",
            id="one port for all",
        ),
        pytest.param(
            "--decoder-ports 1",
            "--decoder-ports: 1 port, but 0 hosts in --decoder-hosts; one for each",
            id="ports alone",
        ),
    ],
)
def test_lists_of_unlike_length_are_refused_with_both_counts(argv: str, fault: str) -> None:
    assert faults_of(*argv.split()) == [fault]


@pytest.mark.case("C86")
def test_the_own_address_is_refused_as_an_instance() -> None:
    faults = faults_of(
        "--host", "0.0.0.0", "--prefillers", "A:1999", "127.0.0.1:1998-1999",
        "--decoder-hosts", "localhost", "--decoder-ports", "1999",
    )  # fmt: skip

    text = "is the address that the proxy itself listens on"
    assert faults == [
        f"--prefillers: value 2 ('127.0.0.1:1999') {text}",
        f"--decoder-hosts: value 1 ('localhost:1999') {text}",
    ]


@pytest.mark.case("C86")
@pytest.mark.parametrize("port", ["0", "70000", "-1", "8e3", ""])
def test_a_port_that_cannot_be_is_refused(port: str) -> None:
    assert faults_of("--port", port, "--decoder-hosts", "A", "--decoder-ports", port) == [
        f"--port: '{port}' is not a port (1 to 65535)",
        f"--decoder-ports: value 1 of 1 ('{port}') is not a port (1 to 65535)",
    ]


def test_faults_between_settings_are_told_beside_faults_of_others() -> None:
    assert faults_of("--workers", "x", "--decoder-hosts", "A", "--ssl-certfile", "/none") == [
        "--workers: 'x' is not a whole number",
        "--ssl-certfile: '/none' does not exist",
        "--decoder-hosts: 1 host, but 0 ports in --decoder-ports; one for each",
    ]


def test_a_faulty_list_is_not_also_called_too_short() -> None:
    assert faults_of("--decoder-hosts", "A", "--decoder-ports", "x") == [
        "--decoder-ports: value 1 of 1 ('x') is not a port (1 to 65535)"
    ]


@pytest.mark.case("C90")
def test_no_secret_is_in_a_fault() -> None:
    faults = faults_of(
        "--admin-token", "KEY XYZ", "--api-key", "KEY\nXYZ", "--admin-tokn=XYZ",
        OPENAI_API_KEY="KEY XYZ",
    )  # fmt: skip

    assert len(faults) == 4
    assert "XYZ" not in "".join(faults)


@examples(deadline=None, max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([flag for option in OPTIONS for flag in option.flags]),
            st.sampled_from(["A:1", "A:1-2", "1", "-1", "--", "-", "", "=", "--port=", "true"]),
            st.text(st.characters(exclude_characters="\0"), max_size=12),
            st.text(max_size=99).map(lambda text: f"--{text}".replace("\0", "")),
        ),
        max_size=12,
    )
)
def test_any_command_line_gives_settings_or_faults_and_nothing_else(argv: list[str]) -> None:
    faults: tuple[str, ...] = ()
    try:
        load_settings(argv, {})
    except ConfigError as error:
        faults = error.faults

    assert all(len(fault.splitlines()) == 1 for fault in faults)
    assert all(len(fault) < 500 for fault in faults)


def test_a_long_value_is_shortened() -> None:
    (fault,) = faults_of("--port", "9" * 5000)

    assert len(fault) < 150
