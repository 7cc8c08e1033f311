from pathlib import Path

import pytest

from pdproxy.errors import ConfigError
from pdproxy.runtime.sources import load_settings

TLS = Path(__file__).parents[1] / "upstream" / "tls"


def faults_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(argv, {})
    return list(caught.value.faults)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pdproxy.toml"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        pytest.param(b"port = \n", "is not TOML: Invalid value (at line 1, column 8)", id="syntax"),
        pytest.param(b"\xff = 1", "is not TOML: ", id="encoding"),
        pytest.param(b"config = 'x'", "config: unknown key", id="a file in a file"),
        pytest.param(b"demo = true", "demo: unknown key", id="an act"),
        pytest.param(b"origins = {}", "origins: unknown key", id="an inner field"),
        pytest.param(b"port = 1.5", "port: 1.5 is not a port (1 to 65535)", id="type"),
        pytest.param(b"host = []", "host: [] is not a host name or address", id="list for one"),
        pytest.param(
            b"decoders = [1]", "decoders: value 1 of 1 (1) is not text", id="number for text"
        ),
        pytest.param(
            b"log_level = 'INFO'\nlog-level = 'INFO'",
            "log-level: {file}: log_level is set too; keep one",
            id="twice",
        ),
    ],
)
def test_a_fault_of_the_file_names_it(content: bytes, fault: str, file: Path) -> None:
    file.write_bytes(content)

    (told,) = faults_of("--config", str(file))

    assert told.startswith(f"{file}: {fault.replace('{file}', str(file))}")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "--config: '' is not the path of a file"),
        ("/nowhere/x.toml", "--config: '/nowhere/x.toml' does not exist"),
        ("/", "--config: '/' is not a file"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_fault_of_its_option(path: str, fault: str) -> None:
    assert faults_of("--config", path) == [fault]


def test_a_bad_key_file_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none\n")

    assert faults_of("--api-key-file", str(path)) == [f"--api-key-file: '{path}' holds no key"]


def test_half_a_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    path.write_text("not PEM")

    assert faults_of("--ssl-certfile", str(path)) == ["--ssl-certfile: needs --ssl-keyfile too"]
    assert faults_of("--ssl-keyfile", str(path)) == ["--ssl-keyfile: needs --ssl-certfile too"]


def test_a_pair_of_certificate_and_key_is_taken() -> None:
    certificate, key = str(TLS / "cert.pem"), str(TLS / "key.pem")

    argv = ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--engine-ca-file", certificate]
    settings = load_settings(argv, {})

    assert (settings.ssl_certfile, settings.ssl_keyfile) == (Path(certificate), Path(key))


def test_certificates_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    path.write_text("not PEM")

    faults = faults_of(
        "--ssl-certfile", str(path), "--ssl-keyfile", str(path),
        "--engine-ca-file", str(path), "--engine-insecure",
    )  # fmt: skip

    assert [fault.split(":")[0] for fault in faults] == [
        "--ssl-certfile",
        "--engine-ca-file",
        "--engine-ca-file",
    ]
