"""How an operator writes instances: the short form, and the two lists of hosts and ports.

Rule: nothing is guessed or dropped. A pair of lists of unlike length, a range that runs backwards
and an address without a port are errors; a duplicate is kept once and reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import product

from pdproxy.core.instance import Endpoint

# A host runs a handful of engines, one per data-parallel rank; more is a slip of the hand.
MAX_PORTS_PER_ENTRY = 1024

_ENTRY = re.compile(r"(?P<host>.+):(?P<ports>[0-9]+(?:[-,][0-9]+)*)", re.ASCII)
_LOCAL = frozenset(("localhost", "127.0.0.1", "0.0.0.0", "::", "::1"))


def expand(entry: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of one short form.

    `A:7100`, `A:7100-7103`, `A:7100,7102`, `[::1]:7100-7101,7110` and `https://A:8443` are read.

    Raises:
        ValueError: with a text that continues "<entry> ...".
    """
    match = _ENTRY.fullmatch(entry.strip())
    if match is None:
        return (_parse(entry),)
    ports: list[int] = []
    for part in match["ports"].split(","):
        first, dash, last = part.partition("-")
        if "-" in last or (dash and int(last) < int(first)):
            raise ValueError(f"holds '{part}', which is not a range of ports (such as 7100-7103)")
        if int(last or first) - int(first) >= MAX_PORTS_PER_ENTRY - len(ports):
            raise ValueError(f"holds more than {MAX_PORTS_PER_ENTRY} ports")
        ports.extend(range(int(first), int(last or first) + 1))
    return tuple(_parse(f"{match['host']}:{port}") for port in ports)


def pair(hosts: Sequence[str], ports: Sequence[int]) -> tuple[Endpoint, ...]:
    """Return the endpoints of two lists of one length, paired by position."""
    return tuple(engine_at(host, port) for host, port in zip(hosts, ports, strict=True))


def engine_at(host: str, port: int) -> Endpoint:
    """Return the endpoint of an engine's host, such as `A`, `::1`, `[::1]` or `https://A`.

    Raises:
        ValueError: not such a host.
    """
    if "://" in host:
        return Endpoint.parse(f"{host.strip().rstrip('/')}:{port}")
    return Endpoint.of(host, port)


def unique(endpoints: Iterable[Endpoint]) -> tuple[tuple[Endpoint, ...], tuple[str, ...]]:
    """Return each endpoint once, as typed first, and one warning for each that came again."""
    typed: dict[tuple[str, int], list[Endpoint]] = {}
    for endpoint in endpoints:
        typed.setdefault(endpoint.key, []).append(endpoint)
    warnings: list[str] = []
    for first, *again in typed.values():
        if again:
            others = dict.fromkeys(str(other) for other in again if str(other) != str(first))
            also = f" (also as {', '.join(others)})" if others else ""
            warnings.append(
                f"{first} is listed {len(again) + 1} times{also}; it is registered once"
            )
    return tuple(same[0] for same in typed.values()), tuple(warnings)


def is_loopback(host: str) -> bool:
    """Tell whether a host to listen on is reached from this machine alone."""
    return host.lower() in {"localhost", "::1"} or host.startswith("127.")


def is_own_address(endpoint: Endpoint, host: str, port: int) -> bool:
    """Tell whether requests to `endpoint` would come back to a proxy that listens on `host`."""
    if endpoint.port != port:
        return False
    if host.lower() in _LOCAL:
        return endpoint.host.lower() in _LOCAL
    return endpoint.key == Endpoint(host, port, endpoint.tls).key


def share_an_address(host: str, other: str) -> bool:
    """Tell whether two hosts to listen on are sure to meet; names are not resolved."""
    if host.lower() == other.lower():
        return True
    return any(
        ours.version == theirs.version
        and (ours == theirs or ours.is_unspecified or theirs.is_unspecified)
        for ours, theirs in product(_addresses(host), _addresses(other))
    )


def _addresses(host: str) -> tuple[IPv4Address | IPv6Address, ...]:
    try:
        return (ip_address("127.0.0.1" if host.lower() == "localhost" else host),)
    except ValueError:
        return ()


def _parse(entry: str) -> Endpoint:
    try:
        return Endpoint.parse(entry)
    except ValueError as error:
        reason = str(error).removeprefix(f"{entry!r}: ")
        raise ValueError(f"is not HOST:PORTS: {reason}") from error
