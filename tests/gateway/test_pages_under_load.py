"""Pages while thousands grab each second: their elements stay, their main thread stays free, and in the end
their numbers are those of SQL. What they read and change does not grow with the rate.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from playwright.async_api import Browser, Page, expect

from grabstream.connections.opening import open_gate
from grabstream.models.commands import Grab
from tests.gateway.conftest import Door
from tests.gateway.test_operator_questions import sql, until_books_are_level, until_counted
from tests.gateway.test_questions import position
from tests.support.browsers import shown
from tests.support.gateways import Caller

pytestmark = pytest.mark.long

SECONDS: Final = 5
GRABS_A_SECOND: Final = 3_000
MANY_A_SECOND: Final = 10_000
FEW_A_SECOND: Final = 1_000
#: Lists per second that the crowd sends.
LISTS_A_SECOND: Final = 20
#: Of the grabs, those that are granted; the others come too late.
GRANTED_SHARE: Final = 0.8
#: Elements that may come, and go. The chart has a bar for each of 59 seconds and each outcome: an outcome
#: that is new in it adds as many, and one that overtakes another in number moves as many; each second adds
#: one, and with other tests in parallel the run takes longer. A page whose elements are made again, even
#: once, has twice as many.
ELEMENTS_MAX: Final = {"overview": 12 * 59, "public": 4, "film": 12 * 59}
#: ms. Drawing a refresh must not keep the page from answering to its user.
LONG_TASK_MS_MAX: Final = 400

#: What a page may read and change for each of its requests while many grab, against the same while few do.
GROWTH_MAX: Final = 2.0

#: Counts elements that come and go (but not who got what, of which the newest 12 are shown), all changes, and
#: requests with their bytes; marks the elements that are there; and measures long tasks.
WATCH: Final = """() => {
    const seen = window.seen = {
        added: 0, removed: 0, changes: 0, longest: 0, elements: 0, requests: 0, bytes: 0,
    };
    const elements = [...document.querySelectorAll("main *")];
    seen.elements = elements.length;
    // What an outcome has in the chart leaves with it, a minute after the last answer of that kind.
    window.marked = elements.filter((one) => !one.closest(".chart, .legend"));
    const count = (nodes) => [...nodes].filter((node) => node.nodeType === Node.ELEMENT_NODE)
        .reduce((sum, node) => sum + 1 + node.querySelectorAll("*").length, 0);
    new MutationObserver((records) => {
        for (const record of records) {
            seen.changes += 1;
            if (record.target.closest?.(".film tbody")) continue;
            seen.added += count(record.addedNodes);
            seen.removed += count(record.removedNodes);
        }
    }).observe(document.querySelector("main"),
        { childList: true, subtree: true, attributes: true, characterData: true });
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) seen.longest = Math.max(seen.longest, entry.duration);
    }).observe({ type: "longtask" });
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) {
            seen.requests += 1;
            seen.bytes += entry.transferSize;
        }
    }).observe({ type: "resource" });
}"""
RESULT: Final = "() => ({ ...window.seen, gone: window.marked.filter((one) => !one.isConnected).length })"


async def crowd(door: Door, offer: str, users: range, a_second: int) -> float:
    """Grabs of as many users, at a fixed rate, whether those before are answered or not. Returns how many a
    second were answered.
    """
    together = a_second // LISTS_A_SECOND
    async with open_gate(door.settings) as gate:
        began = time.monotonic()
        async with asyncio.TaskGroup() as calls:
            for sent, first in enumerate(range(users.start, users.stop, together)):
                await asyncio.sleep(began + sent / LISTS_A_SECOND - time.monotonic())
                grabs = [
                    Grab(id=f"g{user}", offer=offer, user=f"u{user}")
                    for user in users[first - users.start :][:together]
                ]
                calls.create_task(gate.decide(grabs, patience_ms=60_000, timeout_ms=60_000))
        return len(users) / (time.monotonic() - began)


@asynccontextmanager
async def shown_everywhere(
    browser: Browser, caller: Caller, door: Door, offer: str, total: int
) -> AsyncIterator[dict[str, Page]]:
    """Opens an offer of coupons, and shows it on the overview, its public page, and its film."""
    last = await caller.open(offer, kind="coupon", total=total, title="Tea")
    await caller.send("GET", f"/v1/offers/{offer}?{position(last)}")
    port = door.gateway.port
    async with (
        shown(browser, port, "") as overview,
        shown(browser, port, f"o/{offer}#user=ann") as public,
        shown(browser, port, f"#/offers/{offer}") as film,
    ):
        yield {"overview": overview, "public": public, "film": film}


@pytest.mark.parametrize("a_second", [GRABS_A_SECOND, pytest.param(MANY_A_SECOND, marks=pytest.mark.nightly)])
async def test_elements_stay_while_thousands_grab(
    browser: Browser, caller: Caller, door: Door, offer: str, a_second: int
) -> None:
    users = range(SECONDS * a_second)
    total = int(len(users) * GRANTED_SHARE)
    async with shown_everywhere(browser, caller, door, offer, total) as pages:
        overview, public, film = pages.values()
        row = overview.locator("tr", has=overview.locator(f"a[href='#/offers/{offer}']"))
        await expect(row.locator("[data-share=given]")).to_have_text("0 taken")
        await expect(overview.get_by_text("balanced", exact=True)).to_be_visible()
        await expect(public.locator("[data-value=left]")).to_have_text(f"{total:,} left")
        await expect(film.locator("[data-film=left]")).to_have_text(f"{total:,}")
        for page in pages.values():
            await page.evaluate(WATCH)
        reached = await crowd(door, offer, users, a_second)
        print(f"{reached:,.0f} of {a_second:,} grabs a second were answered")
        refused = len(users) - total
        await until_counted(door, offer, refused)
        await until_books_are_level(caller)
        [(given, left, grabs)] = await sql(
            door, "SELECT given, amount_left, grabs FROM offers WHERE offer = %s", offer
        )
        assert (given, left, grabs) == (total, 0, total)
        await expect(row.locator("[data-share=given]")).to_have_text(f"{given:,} taken")
        await expect(row.locator("[data-share=left]")).to_have_text(f"{left:,} left")
        await expect(row.locator("td").nth(4)).to_have_text(f"{grabs:,}")
        await expect(public.locator("[data-value=left]")).to_have_text(f"{left:,} left")
        await expect(film.locator("[data-value=given]")).to_have_text(f"{given:,}")
        await expect(film.locator("[data-film=given]")).to_have_text(f"{given:,}")
        refusals = film.locator("section", has=film.get_by_role("heading", name="Refusals"))
        await expect(refusals.locator("tbody td")).to_have_text([f"{refused:,}"])
        seen: dict[str, Any] = {name: await page.evaluate(RESULT) for name, page in pages.items()}
        for name, one in seen.items():
            assert one["changes"] > 3, f"{name} was not refreshed"
            assert one["gone"] == 0, f"{name}: {one}"
            assert max(one["added"], one["removed"]) <= ELEMENTS_MAX[name], f"{name}: {one}"
            assert one["longest"] <= LONG_TASK_MS_MAX, f"{name}: {one}"
        # A page that is kept busy is noticed.
        await public.evaluate(
            f"setTimeout(() => {{ const until = performance.now() + {2 * LONG_TASK_MS_MAX}; "
            "while (performance.now() < until); })"
        )
        await public.wait_for_function(f"window.seen.longest > {LONG_TASK_MS_MAX}")


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_what_pages_do_does_not_grow_with_the_rate(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    """Pages ask for the state at a fixed pace; they are not sent what happens."""
    async with shown_everywhere(browser, caller, door, offer, 1_000_000) as pages:
        await expect(pages["public"].locator("[data-value=left]")).to_have_text("1,000,000 left")
        for page in pages.values():
            await page.evaluate(WATCH)

        async def watched(users: range, a_second: int) -> tuple[float, dict[str, Any]]:
            """How many grabs a second were answered, and what the pages read and changed meanwhile."""
            before = {name: await page.evaluate(RESULT) for name, page in pages.items()}
            reached = await crowd(door, offer, users, a_second)
            after = {name: await page.evaluate(RESULT) for name, page in pages.items()}
            return reached, {
                name: {of: after[name][of] - before[name][of] for of in ("requests", "bytes", "changes")}
                for name in pages
            }

        warm, few, many = 6 * FEW_A_SECOND, 10 * FEW_A_SECOND, 10 * MANY_A_SECOND
        # The film, and the chart of the last minute, fill.
        await watched(range(warm), FEW_A_SECOND)
        slow, of_few = await watched(range(warm, warm + few), FEW_A_SECOND)
        fast, of_many = await watched(range(warm + few, warm + few + many), MANY_A_SECOND)
        print(f"{slow:,.0f} a second: {of_few}\n{fast:,.0f} a second: {of_many}")
        assert fast > 3 * slow
        for name in pages:
            assert of_few[name]["requests"] > 2, name
            assert of_many[name]["requests"] > 2, name
            for of in ("bytes", "changes"):
                growth = (of_many[name][of] / of_many[name]["requests"]) / (
                    of_few[name][of] / of_few[name]["requests"]
                )
                assert growth <= GROWTH_MAX, f"{of} of {name} for each request: {growth:.2f} times as many"
