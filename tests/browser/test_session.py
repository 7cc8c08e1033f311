"""Between the page and the proxy: the token, a lost connection, drain and undrain."""

from __future__ import annotations

import pytest

from pdproxy.core.instance import Role, State
from pdproxy.server.app import build_app
from tests.browser.board import board, record
from tests.browser.browsing import visit
from tests.fakes.ports import free_port
from tests.server.stage import listening, server

TOKEN = "t0ken-of-the-administrator"
DRAIN = "#list-decode tbody button"
FOCUSED = "document.activeElement.textContent"


# --- the token


async def test_the_page_asks_for_the_token_once(browser):
    async with board(rules={"admin_token": TOKEN}) as made, visit(browser, made.port) as seen:
        seen.may_complain = True  # the browser tells of each 401
        asked: list[str] = []
        seen.page.on("request", lambda request: asked.append(request.url))
        await seen.page.wait_for_selector("#login")
        focused = await seen.evaluate("document.activeElement.id")
        is_shown = await seen.page.is_visible("#board")
        await seen.page.keyboard.type("wrong")
        await seen.page.keyboard.press("Enter")
        await seen.until_text("#login-fault", "did not take this token")
        kept = await seen.evaluate("Object.values(sessionStorage)")
        await seen.page.fill("#token", TOKEN)
        await seen.page.keyboard.press("Enter")
        await seen.until_shown()
        await seen.page.reload()
        await seen.until_shown()
        stores = await seen.evaluate(
            "[Object.values(sessionStorage), localStorage.length, document.cookie]"
        )

    assert (focused, is_shown, kept) == ("token", False, [])
    assert stores == [[TOKEN], 0, ""]
    assert not any(TOKEN in url for url in asked)


async def test_a_token_that_is_no_longer_taken_is_asked_for_again(browser):
    stale = "sessionStorage.setItem('pdproxy-admin-token', 'of yesterday')"
    rules = {"admin_token": TOKEN}
    async with board(rules=rules) as made, visit(browser, made.port, init=stale) as seen:
        seen.may_complain = True
        await seen.until_text("#login-fault", "did not take this token")

        assert await seen.evaluate("sessionStorage.length") == 0


async def test_from_another_machine_the_page_says_what_is_needed(browser):
    refusal = {"error": {"message": "taken from this machine only"}}
    async with board() as made, visit(browser, made.port) as seen:
        seen.may_complain = True
        await seen.page.route(
            "**/dashboard/data*", lambda route: route.fulfill(status=403, json=refusal)
        )
        await seen.until_text("#lost", "taken from this machine only")

        assert "--admin-token" in await seen.text("#lost")
        assert not await seen.page.is_visible("#board")


# --- the connection


async def test_a_proxy_that_went_and_came_back_is_shown_again(browser):
    port = free_port()
    async with server(p=[], d=[]) as made:
        made.roster.records = [record(instance="before:1")]
        async with listening(build_app(made.context), port):
            await_visit = visit(browser, port)
            seen = await await_visit.__aenter__()
            await seen.until_text("#list-decode", "before:1")
        seen.may_complain = True
        await seen.until_text("#lost", "Connection lost, last data from ")
        lost, rows = await seen.text("#lost"), await seen.text("#list-decode")
        made.roster.records = [record(instance="after:1")]
        async with listening(build_app(made.context), port):
            await seen.until_text("#list-decode", "after:1")
            is_lost = await seen.page.is_visible("#lost")
            await await_visit.__aexit__(None, None, None)

    assert "before:1" in rows, "what was known stays in sight"
    assert lost.splitlines()[0].endswith("Trying again by itself.")
    assert not is_lost


# --- drain


async def test_drain_asks_first_by_keyboard_too(browser):
    sent: list[object] = []

    async def take(route):
        sent.append((route.request.method, route.request.post_data_json))
        made.roster.records = [record(state=State.DRAINING, requests=3)]
        await route.fulfill(json={"message": "decode instance is draining"})

    async with board() as made:
        made.roster.records = [record(requests=3)]
        async with visit(browser, made.port) as seen:
            await seen.page.route("**/instances/drain", take)
            await seen.until_shown()
            button = seen.page.get_by_role("button", name="Drain decoder 10.0.0.1:7100")
            await button.focus()
            await seen.page.keyboard.press("Enter")
            question = await seen.text("#confirm")
            first = await seen.evaluate(FOCUSED)
            await seen.page.keyboard.press("Escape")
            back = await seen.evaluate(FOCUSED)
            unsent = list(sent)
            await button.click()
            await seen.page.keyboard.press("Tab")
            await seen.page.keyboard.press("Enter")
            await seen.until_text("#told", "decode instance is draining")
            await seen.until_text("#list-decode", "draining")
            undrain = seen.page.get_by_role("button", name="Undrain decoder 10.0.0.1:7100")
            await undrain.wait_for()

    assert "It will get no new requests. 3 requests that it has will end as usual." in question
    assert "the only active decoder" in question
    assert (first, back, unsent) == ("Cancel", "Drain", [])
    assert sent == [("POST", {"type": "decode", "instances": ["10.0.0.1:7100"]})]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param(
            {"status": 409, "json": {"error": {"message": "<b>not</b> now"}}},
            "Refused: <b>not</b> now (409)",
            id="refused",
        ),
        pytest.param({"status": 502, "body": "<html>"}, "gave no reason (502)", id="no-json"),
        pytest.param(None, "The proxy did not answer", id="unreachable"),
    ],
)
async def test_a_change_that_fails_is_told_of(browser, answer, told):
    async with board() as made, visit(browser, made.port) as seen:
        seen.may_complain = True
        await seen.page.route(
            "**/instances/drain",
            lambda route: route.abort() if answer is None else route.fulfill(**answer),
        )
        await seen.until_shown()
        await seen.page.click(DRAIN)
        await seen.page.click("#confirm [value=yes]")
        await seen.until_text("#told", told)
        await seen.page.get_by_role("button", name="Close").click()

        assert await seen.text("#told") == ""


async def test_the_only_instance_is_told_from_one_of_several(browser):
    async with board() as made:
        made.roster.records = [record(Role.PREFILL), record(Role.PREFILL, "p:2")]
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            await seen.page.click("#list-prefill tbody button")

            assert "only active" not in await seen.text("#confirm")
