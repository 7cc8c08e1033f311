"""Addresses are read strictly, refused clearly, and identified by what they reach."""

import pytest

from pdproxy.core.instance import TRANSITIONS, Endpoint, Instance, Role, State


@pytest.mark.case("C55", "C56")
@pytest.mark.parametrize(
    ("text", "expected", "shown", "url"),
    [
        pytest.param("h:8100", Endpoint("h", 8100), "h:8100", "http://h:8100", id="plain"),
        pytest.param(" h:8100 ", Endpoint("h", 8100), "h:8100", "http://h:8100", id="spaces"),
        pytest.param("http://h:8100", Endpoint("h", 8100), "h:8100", "http://h:8100", id="http"),
        pytest.param("HTTP://h:8100/", Endpoint("h", 8100), "h:8100", "http://h:8100", id="slash"),
        pytest.param(
            "https://h:8443",
            Endpoint("h", 8443, True),
            "https://h:8443",
            "https://h:8443",
            id="tls",
        ),
        pytest.param(
            "[::1]:8100", Endpoint("::1", 8100), "[::1]:8100", "http://[::1]:8100", id="ipv6"
        ),
        pytest.param(
            "[fe80::1%eth0]:8100",
            Endpoint("fe80::1%eth0", 8100),
            "[fe80::1%eth0]:8100",
            "http://[fe80::1%eth0]:8100",
            id="zone",
        ),
        pytest.param(
            "my_pod-0.svc.:1", Endpoint("my_pod-0.svc.", 1), "my_pod-0.svc.:1", None, id="names"
        ),
        pytest.param("10.0.0.1:65535", Endpoint("10.0.0.1", 65535), None, None, id="ipv4"),
    ],
)
def test_accepted_addresses_are_read_as(text, expected, shown, url):
    endpoint = Endpoint.parse(text)

    assert endpoint == expected
    assert shown is None or str(endpoint) == shown
    assert url is None or endpoint.url == url


@pytest.mark.case("C55", "C56", "C86")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("h", "port is missing", id="no-port"),
        pytest.param("h:", "port is missing", id="empty-port"),
        pytest.param(":8100", "host is missing", id="no-host"),
        pytest.param("", "host is missing", id="empty"),
        pytest.param("/", "host is missing", id="only-path"),
        pytest.param("http://", "host is missing", id="only-scheme"),
        pytest.param("http://h", "port is missing", id="url-without-port"),
        pytest.param("h:0", "from 1 to 65535", id="port-0"),
        pytest.param("h:99999", "from 1 to 65535", id="port-too-high"),
        pytest.param("h:-1", "from 1 to 65535", id="port-negative"),
        pytest.param("h:8e3", "from 1 to 65535", id="port-float"),
        pytest.param("h:+80", "from 1 to 65535", id="port-signed"),
        pytest.param("h:\uff18\uff11", "from 1 to 65535", id="port-of-wide-digits"),
        pytest.param("h:8100/v1/", "path is not accepted", id="path"),
        pytest.param("h:8100?x=1", "from 1 to 65535", id="query"),
        pytest.param("ftp://h:8100", "scheme must be http or https", id="scheme"),
        pytest.param("::1", "needs brackets and a port", id="ipv6-bare"),
        pytest.param("::1:8100", "needs brackets and a port", id="ipv6-without-brackets"),
        pytest.param("[::1]", "port is missing", id="ipv6-without-port"),
        pytest.param("[::1:8100", "closing bracket", id="ipv6-open"),
        pytest.param("[::g]:8100", "not an IPv6 address", id="ipv6-letters"),
        pytest.param("[fe80::1%]:8100", "not a zone id", id="zone-empty"),
        pytest.param("[fe80::1%a b]:8100", "not a zone id", id="zone-with-space"),
        pytest.param("[h]:8100", "only an IPv6 address", id="name-in-brackets"),
        pytest.param("a b:8100", "host is not valid", id="space"),
        pytest.param("user@h:8100", "host is not valid", id="user"),
        pytest.param("h\r\nX:8100", "host is not valid", id="line-break"),
        pytest.param("h\x00:8100", "host is not valid", id="control"),
        pytest.param("höst:8100", "host is not valid", id="not-ascii"),
        pytest.param("a..b:8100", "host is not valid", id="empty-label"),
        pytest.param("-a:8100", "host is not valid", id="leading-dash"),
        pytest.param("256.0.0.1:8100", "not an IPv4 address", id="ipv4-range"),
        pytest.param("127.1:8100", "not an IPv4 address", id="ipv4-short"),
    ],
)
def test_refused_addresses_are_named_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        Endpoint.parse(text)

    message = str(caught.value)
    assert message.startswith(f"{text!r}: ")
    assert "\n" not in message


def test_refusal_of_a_huge_entry_is_short():
    with pytest.raises(ValueError, match="host is not valid") as caught:
        Endpoint.parse(f"{'x' * 100_000}:8100")

    assert len(str(caught.value)) < 300


@pytest.mark.case("C55")
@pytest.mark.parametrize(
    ("host", "authority"),
    [
        pytest.param("h", "h:8100", id="name"),
        pytest.param(" 10.0.0.1", "10.0.0.1:8100", id="ipv4"),
        pytest.param("::1", "[::1]:8100", id="ipv6"),
        pytest.param("[::1]", "[::1]:8100", id="ipv6-in-brackets"),
        pytest.param("fe80::1%eth0", "[fe80::1%eth0]:8100", id="zone"),
    ],
)
def test_host_given_alone_is_accepted_as(host, authority):
    assert Endpoint.of(host, 8100).authority == authority


@pytest.mark.case("C86")
@pytest.mark.parametrize(
    ("host", "port"),
    [
        pytest.param("h", 0, id="port-0"),
        pytest.param("h", -1, id="port-negative"),
        pytest.param("h", 70000, id="port-too-high"),
        pytest.param("", 8100, id="no-host"),
        pytest.param("h:1", 8100, id="port-in-host"),
        pytest.param("http://h", 8100, id="url"),
        pytest.param("h/x", 8100, id="path"),
    ],
)
def test_host_given_alone_is_refused_by_name(host, port):
    with pytest.raises(ValueError, match=f"{host}:{port}"):
        Endpoint.of(host, port)


@pytest.mark.case("C57")
@pytest.mark.parametrize(
    "alias",
    [
        "127.0.0.1:8100",
        "0.0.0.0:8100",
        "LocalHost:8100",
        "http://localhost:8100",
        "localhost:08100",
    ],
)
def test_names_of_this_machine_are_one_host(alias):
    assert Endpoint.parse(alias).key == Endpoint.parse("localhost:8100").key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("Node-1:80", "node-1:80", id="case"),
        pytest.param("https://h:8443", "h:8443", id="scheme"),
        pytest.param("[::1]:80", "[0:0:0:0:0:0:0:1]:80", id="ipv6-zeros"),
        pytest.param("[FE80::A%eth0]:80", "[fe80::a%eth0]:80", id="ipv6-case"),
    ],
)
def test_spellings_of_one_address_share_a_key(one, other):
    assert Endpoint.parse(one).key == Endpoint.parse(other).key


@pytest.mark.case("C57")
def test_look_alikes_are_distinct_hosts():
    hosts = ["localhost", "localhost.lab", "my-localhost", "127.0.0.10", "127.0.0.11", "[::1]"]

    keys = {Endpoint.parse(f"{host}:8100").key for host in hosts}

    assert len(keys) == len(hosts)
    assert Endpoint.parse("[fe80::1%eth0]:1").key != Endpoint.parse("[fe80::1%eth1]:1").key


def test_instance_is_shown_as_typed_and_compared_by_identity():
    endpoint = Endpoint.parse("LocalHost:8100")
    one = Instance(Role.PREFILL, endpoint, 0, 1)
    twin = Instance(Role.PREFILL, endpoint, 0, 1)

    assert one.label == "LocalHost:8100"
    assert one != twin
    assert len({one, twin}) == 2


def test_every_state_has_a_row_of_transitions_and_gone_is_final():
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.GONE] == frozenset()
    assert all(State.GONE in TRANSITIONS[state] for state in State if state is not State.GONE)
