"""The live page in a real Chromium: its numbers are those of SQL, its actions are executed, it is accessible,
and nothing that it shows becomes code.
"""

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.conftest import until
from tests.gateway.conftest import Door, Guarded
from tests.gateway.test_commands import SALE
from tests.gateway.test_operator_questions import sql, until_books_are_level, until_counted
from tests.gateway.test_questions import position
from tests.support.browsers import shown, violations
from tests.support.gateways import Caller

ENVELOPE = {"kind": "envelope", "issuer": "alice", "funding": "pay-1", "asset": "CNY"}
HOSTILE = "<script>document.title='hit'</script><img src=x onerror=alert(1)>"


async def crowd(caller: Caller, offer: str, users: int, **more: Any) -> list[Any]:
    """Grabs of as many users at once."""
    return await asyncio.gather(
        *(caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}", **more}) for number in range(users))
    )


def minor(text: str) -> int:
    """An amount as the page writes it, in minor units or pieces."""
    return int(re.sub(r"[,.]", "", text).replace("−", "-"))


@pytest.mark.every_change("the numbers that people watch are those of the books")
async def test_overview_has_the_numbers_of_sql(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await caller.open(f"{offer}e", **ENVELOPE, total=9_999, parts=40, title="Dinner")
    await caller.open(f"{offer}s", **{**SALE, "total": 25})
    await caller.open(f"{offer}c", kind="coupon", total=30)
    async with shown(browser, door.gateway.port, "") as page:
        await asyncio.gather(*(crowd(caller, f"{offer}{kind}", 60) for kind in "esc"))
        refused = 0
        for kind, granted in (("e", 40), ("s", 25), ("c", 30)):
            await until_counted(door, f"{offer}{kind}", 60 - granted)
            refused += 60 - granted
        await until_books_are_level(caller)
        for kind in "esc":
            [(total, given, held, left, grabs)] = await sql(
                door,
                "SELECT total, given, held, amount_left, grabs FROM offers WHERE offer = %s",
                f"{offer}{kind}",
            )
            row = page.locator("tr", has=page.locator(f"a[href='#/offers/{offer}{kind}']"))
            digits = ".2f" if kind == "e" else ""
            scale = 100 if kind == "e" else 1
            words = [f"{value / scale:,{digits}}" if kind == "e" else f"{value:,}" for value in (given, left)]
            await expect(row.locator("[data-share=given]")).to_have_text(f"{words[0]} taken")
            await expect(row.locator("[data-share=left]")).to_have_text(f"{words[1]} left")
            await expect(row.locator("[data-share=held]")).to_have_text(f"{held:,} held" if held else "")
            assert minor(await row.locator("td").nth(3).inner_text()) == total
            await expect(row.locator("td").nth(4)).to_have_text(f"{grabs:,}")

        async def chart_is_sql() -> bool:
            """The last minute, while no user grabs: the window moves, so both are read until they agree."""
            rows = await sql(
                door,
                "SELECT outcome, sum(answers)::bigint FROM (SELECT CASE type WHEN 'grab.granted' THEN "
                "'granted' WHEN 'grab.held' THEN 'held' ELSE 'waiting' END, seqs, at / 1000 FROM audit "
                "WHERE type IN ('grab.granted', 'grab.held', 'grab.queued') UNION ALL SELECT outcome, "
                "refusals, second FROM demand) AS one (outcome, answers, second) "
                "WHERE second > extract(epoch FROM now())::bigint - 60 GROUP BY 1",
            )
            written = {
                await one.get_attribute("data-outcome"): minor(await one.inner_text())
                for one in await page.locator("[data-outcome]").all()
            }
            return bool(rows) and written == dict(rows)

        await until(chart_is_sql, 20, "the chart of the last minute")
        sums = await sql(
            door,
            "SELECT split_part(account, ':', 1), sum(posted) FROM accounts WHERE asset = 'CNY' GROUP BY 1",
        )
        books = page.locator("section", has=page.get_by_role("heading", name="Sums of the books"))
        head = await books.locator("thead th").all_inner_texts()
        cells = books.locator("tbody tr", has=page.locator("th", has_text=re.compile("^CNY$"))).locator("td")

        async def books_are_sql() -> bool:
            row = dict(zip(head[1:], await cells.all_inner_texts(), strict=False))
            return bool(row) and all(minor(row[kind]) == int(total) for kind, total in sums)

        await until(books_are_sql, 20, "the sums of the books")
        await expect(books.locator(".badge")).to_have_text("balanced")


@pytest.mark.long
async def test_offer_has_the_numbers_of_sql_and_a_film(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await caller.open(offer, **ENVELOPE, total=50_000, parts=60, title="Dinner")
    for group in range(3):
        for got in await crowd(caller, offer, 10 * (group + 1)):
            last = got
    await until_counted(door, offer, 30)
    await until_books_are_level(caller)
    assert last.status in (201, 409)
    columns = "total, given, held, amount_left, refunded, grabs"
    [row] = await sql(door, f"SELECT {columns} FROM offers WHERE offer = %s", offer)
    async with shown(browser, door.gateway.port, f"#/offers/{offer}") as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text("Dinner")
        for name, value in zip(("total", "given", "held", "left", "refunded"), row[:-1], strict=True):
            await expect(page.locator(f"[data-value={name}]")).to_have_text(f"{value / 100:,.2f}")
        lucky = await sql(
            door,
            "SELECT user_id, amount FROM grabs WHERE offer = %s ORDER BY amount DESC, place LIMIT 5",
            offer,
        )
        luckiest = page.locator("section", has=page.get_by_role("heading", name="The luckiest"))
        for index, (user, amount) in enumerate(lucky):
            await expect(luckiest.locator("tbody tr").nth(index).locator("th")).to_have_text(user)
            cell = luckiest.locator("tbody tr").nth(index).locator("td").nth(1)
            await expect(cell).to_have_text(f"{amount / 100:,.2f}")
        await expect(page.locator("[data-outcome=parts]")).to_have_text("30")
        # The film: each frame is what the events until then add up to. The last one can be seen, too.
        path = await page.locator(".film .chart path").first.get_attribute("d")
        points = re.findall(r"H([0-9.]+)V", path or "")
        assert float(points[points.index("600") - 1]) < 595
        slider = page.get_by_role("slider", name="Time")
        await expect(page.locator("[data-film=given]")).to_have_text(f"{row[1] / 100:,.2f}")
        await slider.focus()
        await page.keyboard.press("Home")
        await expect(page.locator("[data-film=given]")).to_have_text("0.00")
        await page.keyboard.press("ArrowRight")
        frames = (await caller.send("GET", f"/v1/offers/{offer}/film")).body["frames"]
        [(given,)] = await sql(
            door,
            "SELECT sum(amount)::bigint FROM grabs WHERE offer = %s AND at <= %s", offer, frames[1]["at"],
        )  # fmt: skip
        await expect(page.locator("[data-film=given]")).to_have_text(f"{given / 100:,.2f}")
        await page.get_by_role("button", name="Follow").click()
        await expect(page.locator("[data-film=given]")).to_have_text(f"{row[1] / 100:,.2f}")


@pytest.mark.long
async def test_actions_say_what_they_do_and_are_done(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    last = await caller.open(offer, **{**SALE, "total": 10})
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})
    await caller.send("GET", f"/v1/offers/{offer}?{position(last)}")

    async def is_now(state: str, total: int) -> None:
        async def is_so() -> bool:
            query = "SELECT state, total FROM offers WHERE offer = %s"
            return await sql(door, query, offer) == [(state, total)]

        await until(is_so, 20, f"{state}, {total}")

    async with shown(browser, door.gateway.port, f"#/offers/{offer}", "net::ERR_FAILED") as page:
        dialog = page.get_by_role("dialog")

        async def act(name: str) -> None:
            await page.get_by_role("button", name=name, exact=True).click()
            await expect(dialog).to_be_visible()

        await act("Pause")
        await expect(dialog).to_contain_text("1 unit on hold can still be paid or released.")
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await act("Pause")
        await dialog.get_by_role("button", name="Pause the offer").click()
        await is_now("paused", 10)
        await act("Resume")
        await dialog.get_by_role("button", name="Resume the offer").click()
        await is_now("open", 10)
        await act("Amend")
        assert await dialog.get_by_role("button", name="Amend the offer").is_disabled()
        await dialog.get_by_label("Total units").fill("0")
        await dialog.get_by_label("Total units").fill("15")
        await expect(dialog).to_contain_text("Total units: 10 → 15")
        await expect(dialog).to_contain_text("5 units come from the issuer.")
        await dialog.get_by_role("button", name="Amend the offer").click()
        await is_now("open", 15)
        await act("Close")
        assert await dialog.get_by_role("button", name="Close the offer").is_disabled()
        await dialog.get_by_role("textbox").fill(offer)
        # The answer is lost on the way: sent again, it is the same command.
        lost: list[str] = []

        async def lose(route: Any) -> None:
            lost.append(route.request.headers["idempotency-key"])
            await route.fetch()
            await route.abort()

        await page.route("**/close", lose, times=1)
        page.on(
            "request",
            lambda one: lost.append(one.headers["idempotency-key"]) if one.url.endswith("/close") else None,
        )
        await dialog.get_by_role("button", name="Close the offer").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("try again")
        await dialog.get_by_role("button", name="Close the offer").click()
        await expect(dialog).to_have_count(0)
        await is_now("closed", 15)
        assert len(set(lost)) == 1
        assert len(lost) >= 2
        await expect(page.get_by_role("group", name="Actions").get_by_role("button")).to_have_count(0)


@pytest.mark.long
async def test_user_and_system_have_the_numbers_of_sql(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    user = f"ann-{offer}"
    await caller.open(f"{offer}e", **ENVELOPE, total=777, parts=1)
    await caller.open(offer, kind="coupon", total=2)
    for name in (f"{offer}e", offer):
        await caller.post(f"/v1/offers/{name}/grabs", {"user": user}, "first")
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "bob"}, "last")
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": user}, "second")
    await until_counted(door, offer, 1)
    await until_books_are_level(caller)
    async with shown(browser, door.gateway.port, f"#/users/{user}?offer={offer}") as page:
        balances = page.locator("section", has=page.get_by_role("heading", name="Balances"))
        rows = await sql(door, "SELECT asset, available FROM balances WHERE user_id = %s", user)
        assert len(rows) == 2
        for asset, available in rows:
            row = balances.locator("tr", has_text=asset)
            await expect(row.locator("td").first).to_have_text("7.77" if asset == "CNY" else f"{available}")
        story = page.locator("ol.story > li strong")
        await expect(story).to_have_text(["Offer opened", "Grab granted", "Refused: Sold out"])
        await expect(page.locator("ol.story > li").nth(1)).to_contain_text("place 1, 1 unit left after it")
        await page.get_by_role("link", name="System").click()
        await expect(page.get_by_role("heading", level=1)).to_be_focused()
        models = page.locator("section", has=page.get_by_role("heading", name="Read models by shard"))
        seqs = await sql(door, "SELECT shard, seq FROM cursors WHERE projection = 'ledger' ORDER BY shard")
        for shard, seq in seqs:
            await expect(models.locator("tbody tr").nth(shard).locator("td").nth(1)).to_have_text(f"{seq:,}")
        await expect(page.locator("[data-value=deciding]")).to_have_text(str(door.settings.shards))
        doctor = page.locator("section", has=page.get_by_role("heading", name="Doctor"))
        await expect(doctor.locator(".badge").first).to_have_text(re.compile("healthy|finding"))


@pytest.mark.long
async def test_title_is_text(browser: Browser, caller: Caller, door: Door, offer: str) -> None:
    last = await caller.open(offer, kind="coupon", total=5, title=HOSTILE)
    await caller.send("GET", f"/v1/offers/{offer}?{position(last)}")
    async with shown(browser, door.gateway.port, "", "status of 400") as page:
        link = page.locator(f"a[href='#/offers/{offer}']")
        await expect(link).to_have_text(HOSTILE)
        await link.click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
        await page.get_by_role("button", name="Pause", exact=True).click()
        await expect(page.get_by_role("dialog").get_by_role("heading").first).to_have_text(f"Pause {HOSTILE}")
        assert await page.locator("main img, main script, dialog img").count() == 0
        assert await page.title() == f"{offer} · Offer · grabstream"
        # An id in the address is text, too.
        await page.goto(f"http://127.0.0.1:{door.gateway.port}/#/users/%3Cimg%20src=x%20onerror=alert(1)%3E")
        await page.reload()
        await expect(page.get_by_role("heading", level=1)).to_have_text("<img src=x onerror=alert(1)>")


@pytest.mark.long
async def test_everybody_can_use_it(browser: Browser, caller: Caller, door: Door, offer: str) -> None:
    """axe finds nothing on any page, light and dark; a phone does not scroll sideways."""
    await caller.open(f"{offer}e", **ENVELOPE, total=5_000, parts=20, title="Dinner")
    terms = {**SALE, "total": 2, "waiting_list": True, "limits": [{"by": "user", "per": "day", "max": 1}]}
    await caller.open(offer, **terms)
    await crowd(caller, f"{offer}e", 5)
    await crowd(caller, offer, 5, wait=True)
    await until_books_are_level(caller)
    pages = {
        "": "Overview", f"#/offers/{offer}e": "Dinner", f"#/offers/{offer}": offer, "#/offers": "Offer",
        f"#/users/u1?offer={offer}e": "u1", "#/users": "User", "#/system": "System",
        "#/webhooks": "Webhooks",
    }  # fmt: skip
    async with shown(browser, door.gateway.port, "") as page:
        for path, heading in pages.items():
            await page.goto(f"http://127.0.0.1:{door.gateway.port}/{path}")
            await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
            await expect(page.get_by_text("Loading…").locator("visible=true")).to_have_count(0)
            assert await violations(page) == []
            await page.set_viewport_size({"width": 390, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, path
            await page.set_viewport_size({"width": 1280, "height": 900})
        await page.goto(f"http://127.0.0.1:{door.gateway.port}/#/offers/{offer}")
        for name in ("Amend", "Close"):
            await page.get_by_role("button", name=name, exact=True).click()
            assert await violations(page) == []
            await page.keyboard.press("Escape")


@pytest.mark.long
async def test_page_is_used_with_the_keyboard(browser: Browser, door: Door) -> None:
    async with shown(browser, door.gateway.port, "") as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        await page.get_by_role("link", name="Offer", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_be_focused()
        assert await page.evaluate("document.querySelector('[aria-current]').textContent") == "Offer"


@pytest.mark.long
async def test_rows_are_updated_in_place(browser: Browser, caller: Caller, door: Door, offer: str) -> None:
    """Elements stay while their numbers change, so nothing flickers, and focus and selection stay."""
    last = await caller.open(offer, kind="coupon", total=50)
    await caller.send("GET", f"/v1/offers/{offer}?{position(last)}")
    async with shown(browser, door.gateway.port, "") as page:
        row = page.locator("tr", has=page.locator(f"a[href='#/offers/{offer}']"))
        await expect(row.locator("[data-share=given]")).to_have_text("0 taken")
        await page.evaluate(
            f"window.kept = document.querySelector(\"a[href='#/offers/{offer}']\"); window.kept.focus()"
        )
        await crowd(caller, offer, 20)
        await expect(row.locator("[data-share=given]")).to_have_text("20 taken")
        assert await page.evaluate("window.kept.isConnected && document.activeElement === window.kept")


@pytest.mark.long
async def test_key_is_asked_for_and_kept_by_the_tab(browser: Browser, guarded: Guarded) -> None:
    asked: list[int] = []
    async with shown(browser, guarded.gateway.port, "", "status of 40[13]") as page:
        page.on("response", lambda answer: asked.append(answer.status) if "/v1/" in answer.url else None)
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_be_visible()
        await dialog.get_by_label("Secret of the key").fill("grabkey_" + "0" * 64)
        await dialog.get_by_role("button", name="Use this key").click()
        await expect(dialog).to_contain_text("are not valid")
        # A wrong key is sent once: the gateway counts it against the address.
        assert asked.count(401) <= 2
        await dialog.get_by_label("Secret of the key").fill(guarded.secrets["read"])
        await dialog.get_by_role("button", name="Use this key").click()
        await expect(page.get_by_text("Live", exact=True)).to_be_visible()
        await expect(page.locator("[data-value=verified]")).not_to_have_text("–")
        assert await page.evaluate("Object.keys(localStorage).length") == 0
        assert await page.evaluate("Object.values(sessionStorage)") == [guarded.secrets["read"]]
        await page.get_by_role("link", name="System").click()
        await expect(page.get_by_text("needs the scope operate", exact=True)).to_be_visible()
        await page.get_by_role("button", name="API key").click()
        await dialog.get_by_role("button", name="Forget the key").click()
        assert await page.evaluate("Object.values(sessionStorage)") == []


@pytest.mark.long
async def test_numbers_stay_while_the_gateway_is_away(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    last = await caller.open(offer, kind="coupon", total=7)
    await caller.send("GET", f"/v1/offers/{offer}?{position(last)}")
    async with shown(browser, door.gateway.port, f"#/offers/{offer}", "Failed to load resource") as page:
        await expect(page.locator("[data-value=total]")).to_have_text("7")
        await page.context.set_offline(True)
        await expect(page.get_by_text("Not live")).to_be_visible()
        await expect(page.get_by_text("The gateway cannot be reached.")).to_be_visible()
        await expect(page.locator("[data-value=total]")).to_have_text("7")
        await page.context.set_offline(False)
        await expect(page.get_by_text("Live", exact=True)).to_be_visible()
