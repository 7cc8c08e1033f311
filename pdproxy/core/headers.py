"""Which headers travel: from a client to engines, and from an engine to a client.

Rule: everything passes but what belongs to one connection, to the framing, or to pdproxy itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit, urlunsplit

HeaderList = list[tuple[str, str]]

# RFC 9110, 7.6.1, with the older names that still turn up.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    }
)
# Set anew on the way to an engine. Cookies are between the client and its site, not an engine's.
_OWN_ON_REQUEST = HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "via",
    "x-pdproxy-debug",
    "x-request-id",
}
_OWN_ON_RESPONSE = HOP_BY_HOP | {"content-length", "date", "server", "x-request-id"}

# It names a rank of one engine, and only the client's answer can be meant: the decoder's.
DATA_PARALLEL_RANK = "x-data-parallel-rank"

# An engine joins ids with commas and puts them into file and metric names.
_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")
MAX_CLIENT_ID_IN_ENGINE_ID = 64
MAX_REQUEST_ID = 256
_PRINTABLE = re.compile(r"[\x21-\x7e]+")


def to_engine(client: Iterable[tuple[str, str]]) -> HeaderList:
    """Return the client's headers that engines get, names in lower case.

    Left out are hop-by-hop headers, those that `Connection` names, and those set by pdproxy:
    framing, type, encodings, Host, Authorization, Via and X-Request-Id.
    """
    pairs = [(name.lower(), value) for name, value in client]
    dropped = _named_by_connection(pairs)
    return [p for p in pairs if p[0] not in _OWN_ON_REQUEST and p[0] not in dropped]


def to_client(engine: Sequence[tuple[str, str]]) -> HeaderList:
    """Return the engine's headers that a client gets; framing, Date and Server are pdproxy's.

    A Location loses its host: an engine redirects to its own address, which is not the client's.
    """
    dropped = _named_by_connection(engine)
    kept = [p for p in engine if p[0] not in _OWN_ON_RESPONSE and p[0] not in dropped]
    return [(n, _without_host(v) if n == "location" else v) for n, v in kept]


def authorization(client: str | None, configured: str | None, fallback: str | None) -> str | None:
    """Return the Authorization for engines: the configured key, else the client's, else fallback.

    `configured` and `fallback` are bare keys; an empty one counts as none.
    """
    if configured:
        return f"Bearer {configured}"
    if client:
        return client
    return f"Bearer {fallback}" if fallback else None


def client_request_id(given: str | None, random_id: str) -> str:
    """Return the id the client sees: its own if that is printable and of sane length."""
    if given and len(given) <= MAX_REQUEST_ID and _PRINTABLE.fullmatch(given):
        return given
    return random_id


def engine_request_id(given: str | None, random_id: str) -> str:
    """Return an id for the engines: unique through `random_id`, and safe for them.

    The client's own id stands in front, so that an engine's log can be searched for it.
    Example: `("chat,7", "9f3c...")` gives `"chat_7-9f3c..."`.
    """
    if not given:
        return random_id
    return f"{_UNSAFE_IN_ID.sub('_', given[:MAX_CLIENT_ID_IN_ENGINE_ID])}-{random_id}"


def _without_host(location: str) -> str:
    try:
        parts = urlsplit(location)
    except ValueError:
        return "/"
    if not parts.netloc:
        return location
    return urlunsplit(("", "", parts.path or "/", parts.query, parts.fragment))


def _named_by_connection(pairs: Iterable[tuple[str, str]]) -> frozenset[str]:
    names: set[str] = set()
    for name, value in pairs:
        if name == "connection":
            names.update(token.strip().lower() for token in value.split(","))
    return frozenset(names)
