"""The dashboard: one page without data, open to all, and the data, for administrators.

Rule: the page runs its own script and style only, which the hashes in its policy name, and talks
to this proxy only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web

from pdproxy import __version__
from pdproxy.core.history import BUCKET_S, BUCKETS, WINDOW_S
from pdproxy.core.jsonfields import encode
from pdproxy.errors import InvalidRequest, PDProxyError
from pdproxy.server.admin import check_admin, refusal
from pdproxy.server.context import Context
from pdproxy.server.downstream import SERVER
from pdproxy.server.feed import MINUTE, SHARES, Feed, points, totals

PAGE_TYPE = "text/html; charset=utf-8"
DATA_TYPE = "application/json"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Dashboard:
    """Answers GET /dashboard from memory."""

    def __init__(self) -> None:
        """Read the page that comes with the package."""
        page = resources.files("pdproxy.server").joinpath("dashboard.html").read_text("utf-8")
        self._body = page.encode()
        self._headers = {
            "Content-Type": PAGE_TYPE,
            "Server": SERVER,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _policy(page),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }

    async def answer(self, _context: Context, _request: web.Request) -> web.Response:
        """Answer with the page; it asks for the token itself."""
        return web.Response(body=self._body, headers=self._headers)


async def data(context: Context, request: web.Request) -> web.Response:
    """Answer GET /dashboard/data; `?since=` leaves out points that begin before that time."""
    try:
        check_admin(context, request)
        feed = await _feed(context, _since_s(request))
    except PDProxyError as error:
        return refusal(error)
    headers = {"Content-Type": DATA_TYPE, "Server": SERVER, "Cache-Control": "no-store"}
    return web.Response(body=encode(feed), headers=headers)


async def _feed(context: Context, since_s: float) -> Feed:
    # Before the history, which is to be read at once.
    instances = await context.roster.describe()
    recent = await context.history.recent()
    return Feed(
        version=__version__,
        now_s=recent.now_s,
        started_s=recent.started_s,
        is_stopping=context.is_stopping(),
        in_flight=context.observer.in_flight,
        bucket_s=BUCKET_S,
        window_s=WINDOW_S,
        shares=SHARES,
        points=points(recent, since_s),
        minute=totals(recent, MINUTE),
        window=totals(recent, BUCKETS),
        instances=instances,
        errors=recent.errors,
        failures=recent.failures,
    )


def _since_s(request: web.Request) -> float:
    text = request.query.get("since", "0")
    # Not float(): it takes "nan" and "inf" too.
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text, re.ASCII):
        raise InvalidRequest("since: must be seconds since 1970", param="since")
    return float(text)


def _policy(page: str) -> str:
    """Return the content security policy that lets exactly this page work."""
    allowed = {kind: _hash(text) for kind, text in _INLINE.findall(page)}
    rules = (
        "default-src 'none'",
        f"script-src '{allowed['script']}'",
        f"style-src '{allowed['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
