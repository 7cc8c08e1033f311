"""The page and its data: who gets them, what protects them, what they hold."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import asynccontextmanager

import pytest

import pdproxy
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.server.app import build_app
from tests.fakes.client import get
from tests.server.stage import listening, server

PAGE, DATA = "/dashboard", "/dashboard/data"
TOKEN = {"admin_token": "t0ken"}
GOOD = ("Authorization", "Bearer t0ken")


@asynccontextmanager
async def application(**options):
    async with server(**options) as made, listening(build_app(made.context)) as port:
        made.port = port
        yield made


# --- the page


async def test_the_page_is_one_file_that_its_policy_lets_run_and_nothing_else():
    async with application() as made:
        reply = await get(made.port, PAGE)
    page, policy = reply.body.decode(), reply.headers["content-security-policy"]

    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


async def test_the_page_has_no_handlers_styles_or_addresses_in_attributes():
    async with application() as made:
        page = (await get(made.port, PAGE)).body.decode()
    markup = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)

    assert not re.search(r"\s(on\w+|style|src|srcset|action)=", markup)
    assert set(re.findall(r'href="([^"]{5})', markup)) <= {"data:", "#inst"}
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert danger not in page


async def test_the_page_is_neither_framed_nor_guessed_at():
    async with application() as made:
        headers = (await get(made.port, PAGE)).headers

    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


async def test_the_page_is_open_since_it_holds_no_data():
    async with application(rules=TOKEN) as made:
        assert (await get(made.port, PAGE)).status == 200


# --- the data


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param([], 401, id="none"),
        pytest.param([("Authorization", "Bearer wrong")], 401, id="wrong"),
        pytest.param([GOOD], 200, id="right"),
    ],
)
async def test_with_a_token_only_its_holder_gets_the_data(headers, status):
    async with application(rules=TOKEN) as made:
        reply = await get(made.port, DATA, headers)

    assert reply.status == status
    assert (b"instances" in reply.body) == (status == 200)


async def test_data_is_not_kept_by_caches():
    async with application() as made:
        reply = await get(made.port, DATA)

    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["content-type"] == "application/json"


async def test_data_tells_of_the_proxy_and_of_what_ended():
    async with application() as made:
        made.context.shutdown.begin()
        made.requests.started.append("/v1/models")
        account = Account("id", "/v1/chat/completions", "peer", Timeline(0.0), output_tokens=5)
        made.recorder.request_finished(account)
        told = (await get(made.port, DATA)).json

    assert told["version"] == pdproxy.__version__
    assert (told["is_stopping"], told["in_flight"]) == (True, 1)
    assert (told["bucket_s"], told["window_s"], told["shares"]) == (5, 900, [0.5, 0.9, 0.99])
    assert told["started_s"] <= told["now_s"]
    assert told["window"]["outcomes"] == {"success": 1}
    assert told["minute"]["output_tokens"] == 5


async def test_texts_of_clients_go_through_as_text():
    hostile = "</script><img src=x onerror=alert(1)>\u2028\ud800"
    account = Account("id", "/v1/x", "peer", Timeline(0.0), model=hostile)
    account.fail(Outcome.ENGINE_ERROR, hostile)
    async with application() as made:
        made.recorder.request_finished(account)
        (failure,) = (await get(made.port, DATA)).json["failures"]

    assert failure["model"] == failure["why"] == hostile.replace("\ud800", "?")


@pytest.mark.parametrize("since", ["x", "-1", "nan", "inf", "1e3", "9" * 13, "", "%F0"])
async def test_a_time_that_is_none_is_refused(since):
    async with application() as made:
        reply = await get(made.port, f"{DATA}?since={since}")

    assert reply.status == 400
    assert reply.error["param"] == "since"


async def test_only_points_since_a_time_are_sent():
    async with application() as made:
        reply = await get(made.port, f"{DATA}?since=999999999999")

    assert reply.json["points"] == []
