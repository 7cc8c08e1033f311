"""A real browser on the dashboard: headless Chromium, driven by Playwright.

Rule: at the end of each visit the page must have written no error to its console, and must have
asked nobody but the proxy, unless the test says otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tests.needs import chromium_path

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WITHIN_MS = 20_000.0
Scheme = Literal["light", "dark"]


@dataclass(slots=True)
class Visit:
    """One open dashboard."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    may_complain: bool = False

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def until(self, condition: str, argument: object = None) -> None:
        """Wait until a JavaScript expression, a function of `argument` or none, is true."""
        await self.page.wait_for_function(condition, arg=argument, timeout=WITHIN_MS)

    async def until_text(self, selector: str, part: str) -> None:
        """Wait until an element shows a text."""
        await self.until(
            "([where, part]) => document.querySelector(where)?.innerText.includes(part)",
            [selector, part],
        )

    async def until_shown(self) -> None:
        """Wait for the first data."""
        await self.page.wait_for_selector("#board", state="visible", timeout=WITHIN_MS)

    async def evaluate(self, script: str) -> Any:
        return await self.page.evaluate(script)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser with a fresh profile."""
    # Here and not above: the tests of the lowest versions do without a browser.
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=[*ARGUMENTS], timeout=60_000
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def visit(
    browser: Browser,
    port: int,
    *,
    scheme: Scheme = "light",
    width: int = 1280,
    height: int = 900,
    init: str = "",
    motion: Literal["no-preference", "reduce"] = "no-preference",
) -> AsyncIterator[Visit]:
    """Open the dashboard; `init` runs before the page's own script."""
    origin = f"http://127.0.0.1:{port}"
    context = await browser.new_context(
        color_scheme=scheme, reduced_motion=motion, viewport={"width": width, "height": height}
    )
    page = await context.new_page()
    found = Visit(page)

    def listen(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            found.complaints.append(message.text)

    outside: list[str] = []
    page.on("console", listen)
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("request", lambda request: outside.append(request.url))
    if init:
        await page.add_init_script(init)
    await page.goto(f"{origin}/dashboard", timeout=WITHIN_MS)
    yield found
    assert found.may_complain or not found.complaints
    assert all(url.startswith((origin, "data:")) for url in outside), outside
    await context.close()
