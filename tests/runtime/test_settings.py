import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from pdproxy.core.instance import Endpoint
from pdproxy.core.policy import POLICIES
from pdproxy.runtime.options import Origin
from pdproxy.runtime.settings import OPTIONS, Settings


def names(endpoints: tuple[Endpoint, ...]) -> list[str]:
    return [str(endpoint) for endpoint in endpoints]


def test_without_anything_the_proxy_starts_empty_on_port_1999() -> None:
    settings = Settings()

    assert (settings.host, settings.port) == ("localhost", 1999)
    assert settings.prefill_endpoints == settings.decode_endpoints == ()
    assert settings.warnings == ()


def test_the_defaults_are_the_documented_ones() -> None:
    given = {option.name: option.default for option in OPTIONS}

    assert given["max_retries"] == 3
    assert given["retry_delay"] == 0.1
    assert given["max_body_bytes"] == 256 * 1024 * 1024
    assert given["prefill_policy"] == given["decode_policy"] == "least_load"
    assert given["kv_handle_ttl"] == 25


def test_both_forms_of_instances_add_up() -> None:
    settings = Settings(
        prefiller_hosts=("A", "::1"),
        prefiller_ports=(7100, 7101),
        prefillers=("B:7102-7103", "https://C:8443"),
    )

    assert names(settings.prefill_endpoints) == [
        "A:7100", "[::1]:7101", "B:7102", "B:7103", "https://C:8443",
    ]  # fmt: skip


@pytest.mark.case("C85", "C57")
def test_a_duplicate_is_kept_once_with_one_warning_that_names_it() -> None:
    settings = Settings(decoders=("localhost:7100", "127.0.0.1:7100", "127.0.0.10:7100"))

    assert names(settings.decode_endpoints) == ["localhost:7100", "127.0.0.10:7100"]
    assert settings.warnings == (
        (
            "decode instance localhost:7100 is listed 2 times (also as 127.0.0.1:7100); "
            "it is registered once"
        ),
    )


@pytest.mark.case("C85")
def test_a_duplicate_across_the_two_forms_is_found() -> None:
    settings = Settings(prefiller_hosts=("A",), prefiller_ports=(1,), prefillers=("A:1",))

    assert names(settings.prefill_endpoints) == ["A:1"]
    assert settings.warnings == ("prefill instance A:1 is listed 2 times; it is registered once",)


def test_one_engine_may_have_both_roles_with_a_warning_that_names_it() -> None:
    settings = Settings(prefillers=("localhost:1", "A:1"), decoders=("127.0.0.1:1", "A:2"))

    assert names(settings.prefill_endpoints) == ["localhost:1", "A:1"]
    (warning,) = settings.warnings
    assert warning.startswith("localhost:1 is a prefiller and a decoder: ")


@pytest.mark.parametrize(
    ("name", "last_good_s", "first_bad_s"),
    [
        pytest.param("kv_handle_ttl", 29.9, 30, id="handle"),
        pytest.param("engine_keepalive_timeout", 4.9, 5, id="connection"),
    ],
)
def test_a_time_that_engines_do_not_keep_warns(
    name: str, last_good_s: float, first_bad_s: float
) -> None:
    assert Settings.model_validate({name: last_good_s}).warnings == ()
    (warning,) = Settings.model_validate({name: first_bad_s}).warnings

    assert warning.startswith(f"--{name.replace('_', '-')} is {first_bad_s} s, but engines ")


@pytest.mark.parametrize(
    ("host", "metrics_host", "is_fault"),
    [
        pytest.param("localhost", None, True, id="host not given"),
        pytest.param("localhost", "127.0.0.1", True, id="two spellings"),
        pytest.param("a.example", "A.example", True, id="one name"),
        pytest.param("0.0.0.0", "10.0.0.1", True, id="all of IPv4"),
        pytest.param("10.0.0.1", "0.0.0.0", True, id="one of all of IPv4"),
        pytest.param("::", "::1", True, id="all of IPv6"),
        pytest.param("::1", "0:0::1", True, id="two spellings of IPv6"),
        pytest.param("0.0.0.0", "::", False, id="two families"),
        pytest.param("127.0.0.1", "10.0.0.1", False, id="two addresses"),
        pytest.param("a.example", "10.0.0.1", False, id="a name that nobody resolved"),
    ],
)
def test_metrics_may_have_the_same_port_on_other_addresses_only(
    host: str, metrics_host: str | None, is_fault: bool
) -> None:
    values = {"host": host, "metrics_host": metrics_host, "admin_token": "t", "metrics_port": 1999}

    if not is_fault:
        assert Settings.model_validate(values).metrics_port == 1999
        return
    with pytest.raises(ValidationError, match="metrics_port: 1999 is --port too"):
        Settings.model_validate(values)


@pytest.mark.case("C88")
@pytest.mark.parametrize(
    ("host", "token", "count"),
    [
        pytest.param("0.0.0.0", None, 1, id="open"),
        pytest.param("0.0.0.0", "t", 0, id="open with token"),
        pytest.param("127.0.0.1", None, 0, id="loopback"),
        pytest.param("::1", None, 0, id="loopback of IPv6"),
    ],
)
def test_listening_for_others_without_an_admin_token_warns(
    host: str, token: str | None, count: int
) -> None:
    settings = Settings.model_validate({"host": host, "admin_token": token})

    assert len(settings.warnings) == count


def test_unchecked_certificates_warn() -> None:
    assert "--engine-insecure" in Settings(engine_insecure=True).warnings[0]


@pytest.mark.case("C72")
@pytest.mark.parametrize("number", [0, -1, 1])
def test_there_is_always_one_attempt(number: int) -> None:
    assert Settings(max_retries=number, max_waiting_retries=number).max_retries == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_chosen_with_dashes_too(policy: str) -> None:
    settings = Settings(prefill_policy=policy, decode_policy=policy.replace("_", "-").upper())

    assert settings.prefill_policy == settings.decode_policy == policy


def test_keys_of_the_file_are_added_to_those_given(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\n key-2 \n\nkey-1\nkey-3\n")

    settings = Settings.model_validate({"api_key_file": str(file), "api_keys": ["key-1"]})

    assert [key.get_secret_value() for key in settings.api_keys] == ["key-1", "key-2", "key-3"]


@pytest.mark.case("C90")
def test_secrets_are_masked_in_every_text() -> None:
    secret = "KEY-XYZ"
    settings = Settings.model_validate(
        {"api_keys": [secret], "admin_token": secret, "engine_api_key": secret}
    )

    assert secret not in f"{settings!r} {settings} {settings.model_dump()}"


@pytest.mark.case("C90")
def test_a_refused_secret_is_not_in_the_error() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"admin_token": "KEY XYZ"})

    assert "XYZ" not in str(caught.value)


def test_settings_are_frozen_and_travel_to_other_processes() -> None:
    settings = Settings(prefillers=("A:1",), origins={"prefillers": Origin.FLAG})

    with pytest.raises(ValidationError):
        settings.port = 1

    assert pickle.loads(pickle.dumps(settings)) == settings


def test_constructing_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("PDPROXY_PORT", "1")

    assert Settings().port == 1999


def test_every_option_explains_itself() -> None:
    for option in OPTIONS:
        assert len(option.help) > 10, option.name
        assert not option.help.endswith("."), option.name


def test_every_field_is_an_option() -> None:
    assert {option.name for option in OPTIONS} == set(Settings.model_fields) - {"origins", "reread"}
