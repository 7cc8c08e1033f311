"""Who may administer without a token: programs and own pages on this machine, nobody else."""

from __future__ import annotations

import pytest

from pdproxy.core.instance import Role
from tests.fakes.client import get, post
from tests.server.test_admin import ADD, GOOD, TOKEN, admin, listed

STRANGER = {"type": "decode", "instances": "h:1"}
NAMED = {"own_name": "Proxy.example"}


@pytest.mark.parametrize(
    ("site", "status"),
    [("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)],
)
async def test_pages_of_other_sites_may_not(site, status):
    async with admin() as made:
        reply = await post(made.port, ADD, STRANGER, [("Sec-Fetch-Site", site)])

        assert reply.status == status
        assert ("h:1" in listed(made)[Role.DECODE]) == (status == 200)


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        pytest.param("http://localhost:1999", "localhost:1999", 200, id="own"),
        pytest.param("HTTP://LOCALHOST:1999", "localhost:1999", 200, id="own-in-capitals"),
        pytest.param("http://localhost:3000", "localhost:1999", 403, id="other-port"),
        pytest.param("https://localhost:1999", "localhost:1999", 403, id="other-scheme"),
        pytest.param("http://evil.example", "localhost:1999", 403, id="other-site"),
        pytest.param("null", "localhost:1999", 403, id="hidden"),
        pytest.param("", "localhost:1999", 403, id="empty"),
    ],
)
async def test_pages_of_other_sites_may_not_in_browsers_that_only_name_them(origin, host, status):
    async with admin() as made:
        headers = [("Host", host), ("Origin", origin)]
        reply = await post(made.port, ADD, STRANGER, headers)

        assert reply.status == status
        assert ("h:1" in listed(made)[Role.DECODE]) == (status == 200)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        pytest.param("localhost", 200, id="localhost"),
        pytest.param("LocalHost.:1999", 200, id="localhost-spelled-in-full"),
        pytest.param("127.0.0.1:1999", 200, id="ipv4"),
        pytest.param("10.0.0.1", 200, id="any-address"),
        pytest.param("[::1]:1999", 200, id="ipv6"),
        pytest.param("proxy.example:1999", 200, id="the-name-it-listens-on"),
        pytest.param("evil.example:1999", 403, id="other-name"),
        pytest.param("localhost.evil.example", 403, id="name-that-begins-so"),
        pytest.param("127.0.0.1.evil.example", 403, id="name-that-begins-as-an-address"),
        pytest.param("[evil.example]", 403, id="name-in-brackets"),
        pytest.param("", 403, id="empty"),
    ],
)
async def test_a_name_that_others_may_have_led_here_is_refused(host, status):
    async with admin(rules=NAMED) as made:
        headers = [("Host", host), ("Sec-Fetch-Site", "same-origin")]
        reply = await post(made.port, ADD, STRANGER, headers)
        looked = await get(made.port, "/instances", headers)

        assert reply.status == looked.status == status
        assert ("h:1" in listed(made)[Role.DECODE]) == (status == 200)


async def test_with_a_token_neither_name_nor_page_matters():
    async with admin(rules=TOKEN) as made:
        headers = [GOOD, ("Host", "proxy.example"), ("Origin", "https://other.example")]
        reply = await post(made.port, ADD, STRANGER, headers)

    assert reply.status == 200
