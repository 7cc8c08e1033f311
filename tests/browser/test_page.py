"""The page in a real browser: what it shows, how it fits, and that it lets nothing in."""

from __future__ import annotations

import random

import pytest

from pdproxy.core.instance import Endpoint, Instance, Role, State
from pdproxy.core.record import EngineReport
from pdproxy.core.timeline import Timeline
from pdproxy.dispatch.account import Account, Outcome
from pdproxy.runtime.recorder import Recorder
from tests.browser.board import board, busy_past, crowd, record
from tests.browser.browsing import visit

PHONE = 360
OVERHANG = "document.documentElement.scrollWidth - innerWidth"
# Names in the order in which the rows stand.
ROWS = """(role) => [...document.querySelectorAll(`#list-${role} tbody .name`)]
    .map((node) => node.textContent)"""
TROUBLED = [
    record(instance="d:1", requests=1, kv_tokens=90, capacity_tokens=100),
    record(instance="d:10", requests=5),
    record(instance="d:2", requests=9, state=State.EJECTED),
    record(instance="d:3", requests=3, kv_tokens=97, capacity_tokens=100),
    record(instance="d:4", requests=2, state=State.DRAINING),
    record(instance="d:0", state=State.GONE),
]

# Every visible text whose contrast with what lies behind it is below 4.5 (WCAG 2, AA).
FAINT = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(behind(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(`${walker.currentNode.data.trim()}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""


# --- what it shows


async def test_a_new_proxy_says_what_to_do(browser):
    async with board() as made:
        made.roster.records = []
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            health, quiet = await seen.text("#health"), await seen.text("#quiet")
            hint = await seen.text("#list-decode")
            failures = await seen.text("#failures")

    assert "No prefiller is known" in health
    assert "No requests yet" in quiet
    assert "/v1/chat/completions" in quiet
    assert '/instances/add -d \'{"type":"decode","instances":["D:7100"]}\'' in hint
    assert failures == "None so far."


async def test_problems_stand_first_and_other_orders_can_be_chosen(browser):
    async with board() as made:
        made.roster.records = TROUBLED
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            orders = {}
            for order in ("problems", "load", "state", "name"):
                await seen.page.select_option("#sort", order)
                orders[order] = await seen.page.evaluate(ROWS, "decode")
            text = await seen.text("#list-decode")

    assert orders == {
        "problems": ["d:2", "d:4", "d:3", "d:1", "d:10", "d:0"],
        "load": ["d:2", "d:10", "d:3", "d:4", "d:1", "d:0"],
        "state": ["d:2", "d:4", "d:1", "d:10", "d:3", "d:0"],
        "name": ["d:0", "d:1", "d:2", "d:3", "d:4", "d:10"],
    }
    for part in ("ejected for 1 min", "draining for 1 min", "97 % of 100", "90 % of 100"):
        assert part in text


async def test_kv_cache_is_as_full_as_its_engine_says_or_else_as_is_counted_here(browser):
    async with board() as made:
        made.roster.records = [
            record(instance="d:1", kv_tokens=10, capacity_tokens=100),
            record(
                instance="d:2",
                kv_tokens=10,
                capacity_tokens=100,
                engine=EngineReport(capacity_tokens=100, kv_usage=0.96),
            ),
        ]
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            rows = await seen.page.evaluate(ROWS, "decode")
            text = await seen.text("#list-decode")

    assert rows == ["d:2", "d:1"]
    assert "96 % of 100" in text
    assert "10 % of 100" in text


async def test_what_went_wrong_on_an_instance_stands_in_its_row(browser):
    failed = Instance(Role.DECODE, Endpoint("10.0.0.1", 7100), 0, 1)
    why = "connection refused"
    async with board() as made:
        made.recorder.attempt_failed(failed, "connect")
        made.roster.records = [
            record(state=State.EJECTED, ejections=2, last_error=why, last_error_age_s=10.0),
            record(instance="d:2", ramp=0.25),
        ]
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            text = await seen.text("#list-decode")

    assert "2 ejections · 1 failed attempt · " in text
    assert "connection refused" in text
    assert "slow start, 25 %" in text


async def test_rows_keep_their_places_under_the_pointer(browser):
    async with board() as made:
        made.roster.records = [record(instance="d:1"), record(instance="d:2")]
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            await seen.page.hover("#list-decode tbody tr:first-child")
            made.roster.records = [
                record(instance="d:1"),
                record(instance="d:2", state=State.EJECTED),
                record(instance="d:3"),
            ]
            await seen.until_text("#list-decode", "ejected")
            held = await seen.page.evaluate(ROWS, "decode")
            await seen.page.hover("h1")
            await seen.until(
                "() => document.querySelector('#list-decode .name').textContent === 'd:2'"
            )

    assert held == ["d:1", "d:2", "d:3"]


async def test_instances_that_are_gone_leave_the_list(browser):
    async with board() as made, visit(browser, made.port) as seen:
        await seen.until_shown()
        made.roster.records = [record(Role.PREFILL)]
        await seen.until_text("#list-decode", "No decoder yet")

        assert await seen.page.evaluate(ROWS, "decode") == []


async def test_charts_are_read_by_arrow_keys(browser):
    async with board(recorder=busy_past()) as made, visit(browser, made.port) as seen:
        await seen.until_shown()
        await seen.page.focus("#plot-ttft")
        spoken = "() => document.querySelector('#plot-ttft').ariaValueText"
        before = await seen.evaluate(spoken)
        await seen.page.keyboard.press("ArrowLeft")
        last = await seen.evaluate(spoken)
        await seen.page.keyboard.press("Home")
        first = await seen.evaluate(spoken)
        shown = await seen.text("#ttft-p99")
        await seen.page.keyboard.press("Escape")
        after = await seen.evaluate(spoken)

    assert before.startswith("last minute: p50 ")
    assert last.startswith("at ")
    assert first.startswith("at ")
    assert first != last
    assert first.endswith(f"p99 {shown}")
    assert after.startswith("last minute")


async def test_nothing_is_asked_while_the_tab_is_hidden(browser):
    hide = """
        let isHidden = false;
        Object.defineProperty(document, "hidden", { get: () => isHidden });
        window.hide = (value) => {
            isHidden = value; document.dispatchEvent(new Event("visibilitychange"));
        };"""
    async with board() as made, visit(browser, made.port, init=hide) as seen:
        await seen.until_shown()
        await seen.evaluate("window.hide(true)")
        asked: list[str] = []
        seen.page.on("request", lambda request: asked.append(request.url))
        # Longer than two polls: that nothing comes can only be waited for.
        await seen.page.wait_for_timeout(4500)
        hidden = list(asked)
        await seen.evaluate("window.hide(false)")
        await seen.until("() => performance.getEntriesByType('resource').length > 1")

    assert hidden == []
    assert asked


# --- how it fits


@pytest.mark.parametrize("width", [PHONE, 768, 1280, 1920])
async def test_nothing_is_wider_than_the_window(browser, width):
    host = "a-rather-long-host-name-of-a-node.of-a-cluster-somewhere.example.internal"
    async with board(recorder=busy_past()) as made:
        made.recorder.attempt_failed(
            Instance(Role.DECODE, Endpoint(host, 7100), 0, 1), "connection_lost"
        )
        made.roster.records = [
            record(Role.PREFILL, f"{host}:7100", compute_tokens=123_456, kv_tokens=1_234_567),
            record(Role.PREFILL, "p", kv_tokens=999_999, capacity_tokens=1_000_000),
            record(instance=f"{host}:7100", requests=12345, state=State.EJECTED),
            record(instance="d", kv_tokens=999_999, capacity_tokens=1_000_000),
        ]
        async with visit(browser, made.port, width=width) as seen:
            await seen.until_shown()
            overhang = await seen.evaluate(OVERHANG)
            rows = await seen.evaluate(
                """[...document.querySelectorAll(".list tbody tr")].map((row) =>
                    [row.offsetHeight, row.querySelector(".name").getClientRects()[0].width])"""
            )
            clipped = await seen.evaluate(
                """() => [...document.querySelectorAll("button, .meter, .values b, dd")]
                    .filter((node) => node.checkVisibility())
                    .filter((node) => node.getBoundingClientRect().right > innerWidth)
                    .map((node) => node.textContent)"""
            )

    assert overhang <= 0
    assert clipped == []
    assert all(height < 220 and name > 5 for height, name in rows), rows


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_can_be_read_in_both_schemes(browser, scheme):
    async with board(recorder=busy_past()) as made:
        made.roster.records = [*TROUBLED, record(state=State.JOINING)]
        async with visit(browser, made.port, scheme=scheme) as seen:
            await seen.until_shown()
            page = await seen.evaluate("getComputedStyle(document.body).backgroundColor")
            faint = await seen.evaluate(FAINT)
            await seen.page.click("#list-decode tbody button")
            faint += await seen.evaluate(FAINT)

    assert faint == []
    assert page == ("rgb(244, 246, 249)" if scheme == "light" else "rgb(14, 17, 23)")


async def test_reduced_motion_is_honoured(browser):
    duration = "getComputedStyle(document.querySelector('.meter > b > b')).transitionDuration"
    async with board() as made:
        durations = []
        for motion in ("no-preference", "reduce"):
            async with visit(browser, made.port, motion=motion) as seen:
                await seen.until_shown()
                durations.append(await seen.evaluate(duration))

    assert durations == ["0.4s", "0s"]


async def test_64_instances_fit_and_cost_little_per_update(browser):
    rng = random.Random(3)
    async with board(recorder=busy_past()) as made:
        made.roster.records = crowd(64, rng)
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            rows = await seen.evaluate("document.querySelectorAll('#fleets tbody tr').length")
            height = await seen.evaluate("document.querySelector('#fleets').offsetHeight")
            session = await seen.page.context.new_cdp_session(seen.page)
            await session.send("Performance.enable")
            before = await spent_s(session)
            polls = "() => performance.getEntriesByType('resource').length"
            begun = await seen.evaluate(polls)
            made.roster.records = crowd(64, rng)
            await seen.until(f"(begun) => ({polls})() >= begun + 3", begun)
            after = await spent_s(session)
            overhang = await seen.evaluate(OVERHANG)

    assert rows == 64
    assert height < 32 * 48
    assert overhang <= 0
    assert (after - before) / 3 < 0.1


async def spent_s(session):
    """Return the seconds spent on scripts, styles and layout so far."""
    found = (await session.send("Performance.getMetrics"))["metrics"]
    values = {metric["name"]: metric["value"] for metric in found}
    return values["ScriptDuration"] + values["LayoutDuration"] + values["RecalcStyleDuration"]


# --- what it lets in


HOSTILE = "<img src=x onerror=hacked=1><script>hacked=1</script>\"'&amp;\u202e`${hacked=1}"


async def test_texts_of_clients_and_engines_are_text(browser):
    recorder = Recorder()
    account = Account(HOSTILE, HOSTILE, HOSTILE, Timeline(0.0), model=HOSTILE)
    account.prefiller = account.decoder = HOSTILE
    account.fail(Outcome.ENGINE_ERROR, HOSTILE)
    recorder.request_finished(account)
    async with board(recorder=recorder) as made:
        made.roster.records = [record(instance=HOSTILE, state=State.EJECTED)]
        async with visit(browser, made.port) as seen:
            await seen.until_shown()
            cells = await seen.evaluate(
                "[...document.querySelectorAll('#failures td')].map((cell) => cell.textContent)"
            )
            name = await seen.evaluate("document.querySelector('#list-decode .name').textContent")
            await seen.page.click("#list-decode tbody button")
            title = await seen.evaluate("document.querySelector('#confirm-title').textContent")
            made_of_it = await seen.evaluate(
                "[window.hacked, document.images.length, document.scripts.length]"
            )

    assert name == HOSTILE
    assert cells[2:6] == [f"{HOSTILE} → {HOSTILE}", HOSTILE, f"{HOSTILE} · {HOSTILE}", HOSTILE]
    assert title == f"Drain decoder {HOSTILE}?"
    assert made_of_it == [None, 0, 1]


async def test_the_policy_stops_what_would_get_in_anyway(browser):
    inject = """async () => {
        const stopped = [];
        document.addEventListener("securitypolicyviolation",
            (event) => stopped.push(event.effectiveDirective));
        const script = document.createElement("script");
        try { script.textContent = "window.hacked = 1"; } catch { stopped.push("trusted-types"); }
        try { document.body.innerHTML = "<p onclick='hacked = 1'>"; }
        catch { stopped.push("trusted-types"); }
        document.body.append(Object.assign(document.createElement("img"),
            { src: "/health" }));
        await fetch("http://127.0.0.2:9/").catch(() => {});
        await new Promise((done) => setTimeout(done, 100));
        return [window.hacked, ...new Set(stopped)].sort();
    }"""
    async with board() as made, visit(browser, made.port) as seen:
        await seen.until_shown()
        seen.may_complain = True
        stopped = await seen.evaluate(inject)

    assert {"trusted-types", "connect-src", "img-src"} <= set(stopped)
    assert 1 not in stopped
