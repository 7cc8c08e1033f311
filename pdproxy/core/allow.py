"""Which addresses engines may have, if that is limited.

Rule: an address is judged as the number it is, after the name was resolved; a name passes by
itself only if it is listed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


class AllowList:
    """Networks and names.

    Args:
        entries: such as `10.0.0.0/8`, `2001:db8::1` or `engine-1.lab`.

    Raises:
        ValueError: an entry is a network with host bits set.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: set[str] = set()
        for entry in entries:
            if "/" in entry or is_address(entry):
                self._networks.append(ipaddress.ip_network(entry))
            else:
                self._names.add(_plain(entry))

    def allows(self, host: str) -> bool | None:
        """Judge an address or a name; None for a name that has to be resolved first."""
        if _plain(host) in self._names:
            return True
        return self.allows_address(host) if is_address(host) else None

    def allows_address(self, host: str) -> bool:
        """Judge an address."""
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)


def is_address(host: str) -> bool:
    """Tell an address from a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
