"""Settings reach the parts as their rules, zero as "no limit" where it stands for that."""

from __future__ import annotations

import random
import ssl
from pathlib import Path

import pytest

from pdproxy.errors import ConfigError
from pdproxy.runtime.rules import (
    client_limits,
    dispatch_rules,
    engine_ssl,
    listener_ssl,
    roster_rules,
    server_rules,
)
from pdproxy.runtime.sources import load_settings


def settings(*args: str, env: dict[str, str] | None = None):
    return load_settings(["--port", "1", *args], env or {})


def test_every_timeout_reaches_its_step():
    rules = dispatch_rules(
        settings(
            *("--connect-timeout", "1", "--prefill-timeout", "2", "--first-token-timeout", "3"),
            *("--answer-timeout", "4", "--idle-timeout", "5", "--kv-handle-ttl", "6"),
        )
    )

    steps = (rules.prefill, rules.decode_stream, rules.decode_whole)
    assert [step.connect_s for step in steps] == [1, 1, 1]
    assert [step.head_s for step in steps] == [2, 3, 4]
    assert [step.idle_s for step in steps] == [5, 5, 5]
    assert (rules.first_token_s, rules.kv_handle_ttl_s) == (3, 6)


def test_zero_is_no_limit():
    rules = dispatch_rules(
        settings(
            *("--prefill-timeout", "0", "--first-token-timeout", "0"),
            *("--answer-timeout", "0", "--idle-timeout", "0"),
        )
    )

    steps = (rules.prefill, rules.decode_stream, rules.decode_whole)
    assert {step.head_s for step in steps} == {None}
    assert {step.idle_s for step in steps} == {None}
    assert rules.first_token_s is None


@pytest.mark.case("C72")
@pytest.mark.parametrize(("given", "attempts"), [("-1", 1), ("0", 1), ("1", 1), ("3", 3)])
def test_at_least_one_attempt(given, attempts):
    assert dispatch_rules(settings("--max-retries", given)).max_attempts == attempts
    added = settings("--max-waiting-retries", given)
    assert roster_rules(added).add_attempts == attempts


def test_keys_leave_their_wrapping_only_here():
    made = settings(
        *("--api-key", "k1", "--api-key", "k2", "--admin-token", "t", "--engine-api-key", "e"),
        env={"OPENAI_API_KEY": "o"},
    )
    rules = server_rules(made, random.Random(0))

    assert rules.api_keys == ("k1", "k2")
    assert (rules.admin_token, rules.engine_key, rules.fallback_key) == ("t", "e", "o")
    assert "k1" not in repr(made)


@pytest.mark.case("C62")
def test_no_key_is_an_empty_one():
    rules = server_rules(settings(), random.Random(0))

    assert (rules.api_keys, rules.admin_token, rules.engine_key) == ((), "", "")
    assert rules.fallback_key == ""


def test_each_proxy_knows_its_own_via():
    rng = random.Random(0)
    vias = {server_rules(settings(), rng).via for _ in range(100)}

    assert len(vias) == 100
    assert all(via.startswith("1.1 pdproxy-") for via in vias)


def test_engines_idle_connections_are_bounded_in_time():
    assert client_limits(settings("--engine-keepalive-timeout", "2")).idle_keepalive_s == 2


def test_engines_certificates_are_checked_unless_told_otherwise():
    checked, unchecked = engine_ssl(settings()), engine_ssl(settings("--engine-insecure"))

    assert (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (unchecked.verify_mode, unchecked.check_hostname) == (ssl.CERT_NONE, False)


def test_plain_http_needs_no_certificate():
    assert listener_ssl(settings()) is None


def test_unusable_certificates_are_named(tmp_path: Path):
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")

    with pytest.raises(ConfigError, match="--engine-ca-file"):
        engine_ssl(settings("--engine-ca-file", str(bad)))
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        listener_ssl(settings("--ssl-certfile", str(bad), "--ssl-keyfile", str(bad)))
