import pytest

from pdproxy.core.instance import Endpoint
from pdproxy.runtime.instances_arg import engine_at, expand, is_own_address, unique


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("A:7100", ["A:7100"]),
        (" A:7100 ", ["A:7100"]),
        ("A:7100-7102", ["A:7100", "A:7101", "A:7102"]),
        ("A:7100-7100", ["A:7100"]),
        ("A:7102,7100", ["A:7102", "A:7100"]),
        ("A:1-2,9", ["A:1", "A:2", "A:9"]),
        ("[::1]:7100-7101", ["[::1]:7100", "[::1]:7101"]),
        ("[fe80::1%eth0]:7100", ["[fe80::1%eth0]:7100"]),
        ("https://A:8443,8444", ["https://A:8443", "https://A:8444"]),
        ("http://A:80", ["A:80"]),
        ("host-1-2.lab:7100", ["host-1-2.lab:7100"]),
    ],
)
@pytest.mark.case("C55", "C56")
def test_a_short_form_names_its_endpoints(entry: str, expected: list[str]) -> None:
    assert [str(endpoint) for endpoint in expand(entry)] == expected


@pytest.mark.parametrize(
    "entry",
    [
        "", "A", "A:", ":7100", "A:99999", "A:0", "A:-1", "A:7103-7100", "A:1-2-3", "A:1,,2",
        "A:,1", "A:1-", "A:1-65535", "A:1-1000,2000-2999", "::1:7100", "::1", "[::1]", "A:7100/v1",
        "ftp://A:1", "A B:1", "A:1 2", "A:x", "A:1,B:2", "A:" + "9" * 400,
    ],
)  # fmt: skip
@pytest.mark.case("C56")
def test_a_bad_short_form_is_refused_with_the_rest_of_a_sentence(entry: str) -> None:
    with pytest.raises(ValueError, match=r"^(is not HOST:PORTS: |holds )"):
        expand(entry)


def test_as_many_ports_as_allowed_are_taken() -> None:
    assert len(expand("A:1-1024")) == 1024


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("A", "A:1"),
        ("::1", "[::1]:1"),
        ("[::1]", "[::1]:1"),
        ("https://A", "https://A:1"),
        ("https://A/", "https://A:1"),
        ("https://[::1]", "https://[::1]:1"),
    ],
)
@pytest.mark.case("C55")
def test_a_host_of_the_two_list_form_may_be_an_address_or_https(host: str, expected: str) -> None:
    assert str(engine_at(host, 1)) == expected


@pytest.mark.case("C85")
def test_three_of_a_kind_give_one_warning() -> None:
    kept, warnings = unique([Endpoint("A", 1), Endpoint("a", 1), Endpoint("A", 1)])

    assert kept == (Endpoint("A", 1),)
    assert warnings == ("A:1 is listed 3 times (also as a:1); it is registered once",)


@pytest.mark.parametrize(
    ("endpoint", "host", "is_own"),
    [
        ("localhost:1999", "localhost", True),
        ("127.0.0.1:1999", "localhost", True),
        ("0.0.0.0:1999", "127.0.0.1", True),
        ("localhost:1999", "0.0.0.0", True),
        ("[::1]:1999", "::", True),
        ("[::1]:1999", "localhost", True),
        ("192.0.2.1:1999", "192.0.2.1", True),
        ("https://Proxy.lab:1999", "proxy.lab", True),
        ("localhost:2000", "localhost", False),
        ("127.0.0.10:1999", "localhost", False),
        ("192.0.2.2:1999", "192.0.2.1", False),
        ("localhost:1999", "192.0.2.1", False),
    ],
)
@pytest.mark.case("C86")
def test_the_proxys_own_address_is_known(endpoint: str, host: str, is_own: bool) -> None:
    assert is_own_address(Endpoint.parse(endpoint), host, 1999) is is_own
