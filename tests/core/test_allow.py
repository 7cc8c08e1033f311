"""Which addresses and names pass."""

import pytest

from pdproxy.core.allow import AllowList


@pytest.mark.case("C88")
@pytest.mark.parametrize(
    ("host", "verdict"),
    [
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("169.254.169.254", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("::ffff:10.1.2.3", True),
        ("::ffff:11.1.2.3", False),
        ("2001:db8::5", True),
        ("fe80::1%eth0", False),
        ("Engine-1.lab.", True),
        ("engine-2.lab", None),
        ("localhost", None),
    ],
)
def test_networks_addresses_and_names(host, verdict):
    allow = AllowList(["10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "engine-1.lab"])

    assert allow.allows(host) is verdict


def test_network_with_host_bits_is_refused():
    with pytest.raises(ValueError, match="host bits"):
        AllowList(["10.0.0.1/8"])
