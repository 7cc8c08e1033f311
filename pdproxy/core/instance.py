"""What an engine is to the proxy: its role, its address, and the states it goes through.

Rule: an address is checked once, where it enters (`Endpoint.parse`, `Endpoint.of`), and every
refusal names the entry and says what is wrong with it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

MAX_PORT = 65535
MAX_HOST_CHARACTERS = 253  # RFC 1035, section 2.3.4, without the root's trailing dot
_SHOWN_CHARACTERS = 80  # of a refused entry: enough to find it, too few to flood a log

# Host names as resolvers and container networks use them: RFC 1123 labels and underscores.
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9_.~-]+", re.ASCII)  # RFC 6874: unreserved characters
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)

# One engine listening on this machine is reached by each of them.
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "0.0.0.0"})


class Role(StrEnum):
    """What an engine is used for; one engine may be registered once per role."""

    PREFILL = "prefill"
    DECODE = "decode"


class Source(StrEnum):
    """Who wants an instance; only the same takes it back by leaving it out."""

    CONFIGURED = "configured"  # flags, environment, file
    CALL = "call"  # POST /instances/add
    NAME = "name"  # an address of --prefiller-dns or --decoder-dns


class State(StrEnum):
    """Where an instance is in its life."""

    JOINING = "joining"  # registered, has not answered a probe yet; gets nothing
    ACTIVE = "active"  # gets leases
    DRAINING = "draining"  # removed by the operator: finishes its own, gets nothing new
    EJECTED = "ejected"  # failed; gets leases only when no active instance is left
    GONE = "gone"  # forgotten; final


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.JOINING: frozenset({State.ACTIVE, State.EJECTED, State.DRAINING, State.GONE}),
        State.ACTIVE: frozenset({State.EJECTED, State.DRAINING, State.GONE}),
        State.DRAINING: frozenset({State.ACTIVE, State.GONE}),
        State.EJECTED: frozenset({State.ACTIVE, State.DRAINING, State.GONE}),
        State.GONE: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens.

    Two spellings of one address are unequal endpoints with an equal `key`: what the operator typed
    is kept for listings, `key` decides identity.

    Attributes:
        host: a name or an address as typed; IPv6 without brackets, a zone id after `%`.
        port: 1..65535.
        tls: whether the engine speaks https.
        authority: `h:8100` or `[::1]:8100`; also the value of the Host header.
    """

    host: str
    port: int
    tls: bool = False
    authority: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        object.__setattr__(self, "authority", f"{host}:{self.port}")

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `h:8100`, `[::1]:8100`, `http://h:8100` or `https://h:8443`.

        Raises:
            ValueError: anything else; the text names the entry and is fit for an operator.
        """
        try:
            tls, rest = _split_scheme(text.strip())
            host, port = _split_port(rest)
            return cls(_checked_host(host), _checked_port(port), tls)
        except ValueError as error:
            raise ValueError(f"{_shown(text)}: {error}") from None

    @classmethod
    def of(cls, host: str, port: int, tls: bool = False) -> Endpoint:
        """Build from a host given alone: `h`, `10.0.0.1`, `::1` or `[::1]`.

        Raises:
            ValueError: as for `parse`.
        """
        try:
            return cls(_checked_host(_without_brackets(host.strip())), _checked_port(port), tls)
        except ValueError as error:
            raise ValueError(f"{_shown(f'{host}:{port}')}: {error}") from None

    @property
    def url(self) -> str:
        """`http://h:8100`, without a trailing slash."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def key(self) -> tuple[str, int]:
        """Identity: equal for all spellings of one address, whatever the scheme."""
        return _canonical_host(self.host), self.port

    def __str__(self) -> str:  # type: ignore[explicit-override]  # typing has it from 3.12 on
        return self.url if self.tls else self.authority


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """One registration of an engine; compared by identity.

    Attributes:
        role: what it is used for.
        endpoint: where it listens, as typed first.
        slot: its row on the load board, its own until it is gone and holds no load.
        serial: unique per registration; a removed and re-registered engine has a new one.
        label: its name in listings, logs and metrics: the endpoint as typed first.
    """

    role: Role
    endpoint: Endpoint
    slot: int
    serial: int
    label: str = field(init=False)

    def __post_init__(self) -> None:
        # Made once: it is asked for several times per request.
        object.__setattr__(self, "label", str(self.endpoint))


def _split_scheme(text: str) -> tuple[bool, str]:
    """Return whether it is https, and the authority; a bare `/` path is dropped."""
    scheme = "http"
    if match := _SCHEME.match(text):
        scheme, text = match[1].lower(), text[match.end() :]
    if scheme not in {"http", "https"}:
        raise ValueError(f"the scheme must be http or https, not {_shown(scheme)}")
    authority, slash, path = text.partition("/")
    if path:
        raise ValueError(
            f"a path is not accepted, write only host and port (found {_shown(slash + path)})"
        )
    if slash and not authority:
        raise ValueError("the host is missing")
    return scheme == "https", authority


def _split_port(authority: str) -> tuple[str, str]:
    """Return host (no brackets) and port, both unchecked."""
    if authority.startswith("["):
        host, bracket, tail = authority[1:].partition("]")
        if not bracket:
            raise ValueError("the closing bracket of the IPv6 address is missing")
        if ":" not in host:
            raise ValueError("only an IPv6 address stands in brackets")
        if not tail.startswith(":"):
            raise ValueError("the port is missing, such as in [::1]:8000")
        return host, tail[1:]
    if authority.count(":") > 1:
        raise ValueError("an IPv6 address needs brackets and a port, such as [::1]:8000")
    host, colon, port = authority.partition(":")
    if not host:
        raise ValueError("the host is missing")
    if not colon:
        raise ValueError("the port is missing, such as in host:8000")
    return host, port


def _without_brackets(host: str) -> str:
    if host.startswith("[") and host.endswith("]") and ":" in host:
        return host[1:-1]
    return host


def _checked_host(host: str) -> str:
    if not host:
        raise ValueError("the host is missing")
    if ":" in host:
        _check_ipv6(host)
        return host
    if host.replace(".", "").isdecimal():
        _check_ipv4(host)
        return host
    if len(host) > MAX_HOST_CHARACTERS or not _HOST_NAME.fullmatch(host):
        raise ValueError(
            "the host is not valid: letters, digits, '-', '_' and dots between them are"
        )
    return host


def _check_ipv4(host: str) -> None:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"{_shown(host)} is not an IPv4 address of four numbers") from None


def _check_ipv6(host: str) -> None:
    address, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        raise ValueError(f"{_shown(host)} is not an IPv6 address") from None
    if percent and not _ZONE.fullmatch(zone):
        raise ValueError(f"{_shown(zone)} is not a zone id, such as eth0")


def _checked_port(port: str | int) -> int:
    if port == "":
        raise ValueError("the port is missing, such as in host:8000")
    number = int(port) if _PORT.fullmatch(str(port)) else 0
    if not 1 <= number <= MAX_PORT:
        raise ValueError(f"the port must be a number from 1 to {MAX_PORT}, not {_shown(str(port))}")
    return number


def _canonical_host(host: str) -> str:
    if ":" in host:
        address, percent, zone = host.partition("%")
        return f"{ipaddress.IPv6Address(address).compressed}{percent}{zone}"
    name = host.lower()
    return "localhost" if name in _THIS_HOST else name


def _shown(text: str) -> str:
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    return repr(text)
