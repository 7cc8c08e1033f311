import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.core.headers import (
    HOP_BY_HOP,
    MAX_CLIENT_ID_IN_ENGINE_ID,
    MAX_REQUEST_ID,
    authorization,
    client_request_id,
    engine_request_id,
    to_client,
    to_engine,
)
from tests.properties import UNHURRIED

SET_BY_THE_PROXY = (
    "Accept-Encoding",
    "Authorization",
    "Content-Encoding",
    "Content-Length",
    "Content-Type",
    "Cookie",
    "Expect",
    "Host",
    "Via",
    "X-Request-Id",
)


@pytest.mark.case("C64")
@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_hop_by_hop_headers_stay_on_their_hop(name):
    assert to_engine([(name.title(), "x"), ("X-Mine", "1")]) == [("x-mine", "1")]
    assert to_client([(name, "x"), ("x-mine", "1")]) == [("x-mine", "1")]


@pytest.mark.case("C64")
@pytest.mark.parametrize(
    "connection",
    [
        pytest.param(["X-Foo, close,x-bar"], id="one-header"),
        pytest.param(["X-Foo", "X-BAR"], id="two-headers"),
        pytest.param([" ,, x-foo ,x-bar ,"], id="untidy"),
    ],
)
def test_what_connection_names_stays_on_its_hop(connection):
    pairs = [("connection", value) for value in connection]
    pairs = [("x-foo", "1"), *pairs, ("x-bar", "2"), ("x-baz", "3")]

    assert to_engine([(name.title(), value) for name, value in pairs]) == [("x-baz", "3")]
    assert to_client(pairs) == [("x-baz", "3")]


@pytest.mark.parametrize("name", SET_BY_THE_PROXY)
def test_what_the_proxy_sets_does_not_come_from_the_client(name):
    assert to_engine([(name, "x")]) == []


@pytest.mark.case("C63")
def test_other_headers_pass_in_order_and_repeated():
    pairs = [("traceparent", "00-1"), ("X-A", "1"), ("X-A", "2"), ("X-data-parallel-rank", "3")]

    assert to_engine(pairs) == [(name.lower(), value) for name, value in pairs]


@pytest.mark.parametrize("name", ["content-length", "date", "server", "x-request-id"])
def test_answers_framing_date_and_server_are_the_proxys(name):
    answer = [("content-type", "text/x"), (name, "1"), ("retry-after", "7")]

    assert to_client(answer) == [("content-type", "text/x"), ("retry-after", "7")]


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("http://10.0.0.7:8100/v1/x?a=b#c", "/v1/x?a=b#c"),
        ("https://engine", "/"),
        ("//engine:1/v1", "/v1"),
        ("/v1/x", "/v1/x"),
        ("x?y", "x?y"),
        ("http://[bad", "/"),
    ],
)
def test_redirect_does_not_name_the_engine(location, shown):
    assert to_client([("location", location)]) == [("location", shown)]


@pytest.mark.case("C61", "C62")
@pytest.mark.parametrize(
    ("client", "configured", "fallback", "sent"),
    [
        pytest.param("Bearer user", "", "", "Bearer user", id="clients"),
        pytest.param("Basic x", None, "env", "Basic x", id="clients-before-fallback"),
        pytest.param("Bearer user", "conf", "env", "Bearer conf", id="configured-first"),
        pytest.param(None, "", "env", "Bearer env", id="fallback"),
        pytest.param("", None, "env", "Bearer env", id="empty-is-none"),
        pytest.param(None, None, None, None, id="none"),
        pytest.param(None, "", "", None, id="empty-keys-are-none"),
    ],
)
def test_authorization_for_engines(client, configured, fallback, sent):
    assert authorization(client, configured, fallback) == sent


@pytest.mark.case("C65")
@pytest.mark.parametrize(
    "given_id",
    ["a", "chat-0-1", "cmpl-" + "0" * 32, 'q"uote,;', "x" * MAX_REQUEST_ID],
)
def test_clients_id_comes_back_as_it_was(given_id):
    assert client_request_id(given_id, "random") == given_id


@pytest.mark.parametrize(
    "given_id", [None, "", "a b", "a\tb", "\u00e9", "x" * (MAX_REQUEST_ID + 1), "a\n"]
)
def test_unusable_client_id_is_replaced(given_id):
    assert client_request_id(given_id, "random") == "random"


@pytest.mark.case("C65")
@UNHURRIED
@given(st.none() | st.text(max_size=400))
def test_engine_id_is_safe_and_unique_by_its_random_end(given_id):
    made = engine_request_id(given_id, "f" * 32)

    assert made == "f" * 32 or made.endswith("-" + "f" * 32)
    assert made.isascii()
    assert not set(made) & set(', /\\"{}\n')
    assert len(made) <= MAX_CLIENT_ID_IN_ENGINE_ID + 1 + 32


def test_engine_id_begins_with_the_clients():
    assert engine_request_id("chat,7", "9f") == "chat_7-9f"
    assert engine_request_id(None, "9f") == "9f"
