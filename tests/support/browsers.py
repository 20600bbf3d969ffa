"""A real Chromium, and pages of a gateway in it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = "/usr/bin/chromium"
#: ms; a busy machine draws slowly.
expect.set_options(timeout=60_000)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A Chromium without a past."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        await browser.close()


@asynccontextmanager
async def shown(
    browser: Browser, port: int, path: str, expected_errors: str = "$none", **options: Any
) -> AsyncIterator[Page]:
    """A page of the gateway. Afterwards, the console has no error but those that are expected: neither of a
    script, nor of the Content-Security-Policy.
    """
    context = await browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    page = await context.new_page()
    page.set_default_timeout(60_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    await page.goto(f"http://127.0.0.1:{port}/{path}")
    yield page
    unexpected = [text for text in said if not re.search(expected_errors, text)]
    assert not unexpected, unexpected
    assert await context.cookies() == []
    await context.close()


async def violations(page: Page) -> list[str]:
    """What axe finds on a page as it is, in light and in dark."""
    found = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        result = await Axe().run(page)
        if result.violations_count:
            found.append(f"{page.url}, {scheme}: {result.generate_report()}")
    return found
