"""Administrative calls without a token: from this machine, and there from no other site's page.

Rule: the connection's own address decides. What a caller writes into a header (`X-Forwarded-For`)
never lets it in; what a browser adds by itself may only keep it out.
"""

from __future__ import annotations

import ipaddress

from aiohttp import web

from pdproxy.errors import Forbidden

# What browsers say of a request by the user's own hand, and by a page of this proxy.
_OWN_PAGES = frozenset({"none", "same-origin"})


def check_local(request: web.Request, own_name: str) -> None:
    """Let pass a caller on this machine; `own_name` is the host that the proxy listens on.

    Raises:
        Forbidden: it is somewhere else, or a page of another site in a browser here.
    """
    if not _is_loopback(request):
        raise Forbidden("without --admin-token, admin calls are taken from this machine only")
    # A site may have its own name lead to this machine, so that its pages count as the proxy's.
    if not all(_is_own(host, own_name) for host in request.headers.getall("Host", ())):
        text = "without --admin-token, admin calls need localhost, an address or --host in the URL"
        raise Forbidden(text)
    if not _is_by_own_page(request):
        raise Forbidden("without --admin-token, admin calls are not taken from other sites' pages")


def _is_loopback(request: web.Request) -> bool:
    peer = request.transport.get_extra_info("peername") if request.transport else None
    try:
        return ipaddress.ip_address(str(peer[0])).is_loopback if peer else False
    except ValueError:
        return False


def _is_own(authority: str, own_name: str) -> bool:
    host = authority.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    else:
        host = host.partition(":")[0].removesuffix(".")
    if host in {"localhost", own_name.lower().removesuffix(".")}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_by_own_page(request: web.Request) -> bool:
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in _OWN_PAGES
    # Older browsers say only which site's page it is, and programs nothing.
    origin = request.headers.get("Origin")
    own = f"{request.scheme}://{request.headers.get('Host', '')}"
    return origin is None or origin.lower() == own.lower()
