"""The public page of one offer in a real Chromium: what it shows is what SQL has, a lost answer takes nothing
twice, and a hold is paid at the fake provider.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from playwright.async_api import Browser, Page, Route, expect

from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from tests.conftest import until
from tests.gateway.conftest import Door, Guarded
from tests.gateway.test_live_page import ENVELOPE, HOSTILE
from tests.gateway.test_operator_questions import sql
from tests.gateway.test_questions import position
from tests.support.browsers import shown, violations
from tests.support.gateways import Caller, GatewayProcess, calling, new_key
from tests.support.issuer import token
from tests.support.providers import ProviderProcess
from tests.support.receipts import KEYS_TEXT

SALE = {"kind": "stock", "total": 5, "price": 4_900, "currency": "CNY", "hold_ms": 600_000}


class Shop(NamedTuple):
    """A gateway whose pages pay at a provider, and the port of the gateway."""

    gateway: GatewayProcess
    provider: ProviderProcess

    @property
    def port(self) -> int:
        return self.gateway.port


@pytest.fixture(scope="module")
def shop(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A gateway of the shared system with a provider."""
    folder = tmp_path_factory.mktemp("shop")
    [port] = free_ports(1)
    with (
        ProviderProcess(folder / "provider.log") as provider,
        GatewayProcess(
            door.settings, folder / "gateway.log", "--port", str(port), gate_timeout_ms="20000",
            payment_keys=KEYS_TEXT, payment_pay_url=f"http://127.0.0.1:{provider.port}/pay",
            payment_callback_url=f"http://127.0.0.1:{port}/v1/payments/callback",
        ) as gateway,
    ):  # fmt: skip
        yield Shop(gateway, provider)


@asynccontextmanager
async def visited(
    browser: Browser, port: int, offer: str, user: str = "", expected_errors: str = "$none", **options: Any
) -> AsyncIterator[Page]:
    """The page of an offer; `user` looks at it."""
    path = f"o/{offer}" + (f"#user={user}" if user else "")
    async with shown(browser, port, path, expected_errors, **options) as page:
        yield page
        # What the address hands over does not stay in it.
        assert page.url == f"http://127.0.0.1:{port}/o/{offer}"


async def opened(caller: Caller, offer: str, **terms: Any) -> None:
    """Opens an offer; the read models have it."""
    last = await caller.open(offer, **terms)
    await caller.send("GET", f"/v1/offers/{offer}?{position(last)}")


async def test_page_may_connect_to_the_provider_alone(caller: Caller, shop: Shop) -> None:
    got = await caller.send("GET", "/o/lunch")
    assert (got.status, got.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = got.headers["content-security-policy"]
    assert policy == (await caller.send("GET", "/")).headers["content-security-policy"]
    assert "connect-src 'self';" in policy
    async with calling(shop.port) as other:
        paying = (await other.send("GET", "/o/lunch")).headers["content-security-policy"]
        there = f"http://127.0.0.1:{shop.provider.port}"
        assert paying == policy.replace("connect-src 'self';", f"connect-src 'self' {there};")
        assert (await other.send("GET", "/")).headers["content-security-policy"] == policy


@pytest.mark.parametrize("address", ["https://a;b/pay", "https://a,b/pay", "https://a'b/pay", "https://a b/"])
def test_address_that_no_policy_can_name_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="payment_pay_url|PAYMENT_PAY_URL"):
        Settings(payment_pay_url=address)


@pytest.mark.every_change("the page of an envelope in a browser")
async def test_envelope_is_grabbed_and_opened(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await opened(caller, offer, **ENVELOPE, total=5_000, parts=3, title=HOSTILE)
    async with visited(browser, door.gateway.port, offer) as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
        await expect(page.locator("[data-value=left]")).to_have_text("3 left")
        assert await page.locator("main img, main script").count() == 0
        # Without authentication, visitors enter a name. All of it with the keyboard.
        await page.get_by_label("Your name").fill("a b")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("letters, digits")
        await page.get_by_label("Your name").fill("ann")
        await page.keyboard.press("Enter")
        await expect(page.locator("[data-value=user]")).to_have_text("ann")
        await page.get_by_role("button", name="Open it").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("[data-value=left]")).to_have_text("2 left")
        [(amount,)] = await sql(door, "SELECT amount FROM grabs WHERE offer = %s", offer)
        await expect(page.locator("#said")).to_have_text(f"You got {amount / 100:.2f} CNY.")
        await expect(page.locator(".envelope.open b")).to_have_text(f"{amount / 100:.2f}")
        await expect(page.get_by_role("button", name="Open it")).to_be_hidden()
        # A returning visitor sees what they have.
        await page.reload()
        await expect(page.locator(".envelope.open b")).to_have_text(f"{amount / 100:.2f}")
        await expect(page.get_by_role("listitem")).to_contain_text(f"{amount / 100:.2f} CNY")
        # Others empty it.
        for user in ("bob", "carol"):
            await caller.post(f"/v1/offers/{offer}/grabs", {"user": user})
        await page.get_by_role("button", name="Change").click()
        await page.get_by_label("Your name").fill("dave")
        await page.get_by_role("button", name="Continue").click()
        await expect(page.locator("[data-value=state]")).to_have_text("All gone.")
        assert await page.evaluate("Object.keys(localStorage).length") == 0


@pytest.mark.long
async def test_lost_answer_takes_nothing_twice(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await opened(caller, offer, kind="coupon", total=5, max_per_grab=3)
    keys: list[str] = []

    async def lose(route: Route) -> None:
        keys.append(route.request.headers["idempotency-key"])
        await route.fetch()
        await route.abort()

    async with visited(browser, door.gateway.port, offer, "ann", "net::ERR_FAILED") as page:
        await page.route("**/grabs", lose, times=1)
        page.on(
            "request",
            lambda one: keys.append(one.headers["idempotency-key"]) if one.method == "POST" else None,
        )
        await page.get_by_label("How many").fill("2")
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("#said")).to_contain_text("you get nothing twice")
        # The page is closed in the middle of it, and opened again: it asks automatically.
        await page.reload()
        await expect(page.locator("#said")).to_have_text("You got it: 2 coupons.")
        assert len(set(keys)) == 1
        assert await sql(door, "SELECT user_id, quantity FROM grabs WHERE offer = %s", offer) == [("ann", 2)]
        # The next one is another grab.
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("#said")).to_have_text("You got it: 1 coupon.")
        assert len(set(keys)) == 2


@pytest.mark.long
async def test_grab_without_an_answer_waits_for_its_visitor(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await opened(caller, offer, kind="coupon", total=5)
    keys: dict[str, set[str]] = {"ann": set(), "bob": set()}

    async def watch(route: Route) -> None:
        user = json.loads(route.request.post_data or "")["user"]
        keys[user].add(route.request.headers["idempotency-key"])
        if (user, is_lost) == ("ann", True):
            await route.fetch()
            await route.abort()
        else:
            await route.continue_()

    async def become(page: Page, user: str) -> None:
        await page.get_by_role("button", name="Change").click()
        await page.get_by_label("Your name").fill(user)
        await page.get_by_role("button", name="Continue").click()

    async with visited(browser, door.gateway.port, offer, "ann", "net::ERR_FAILED") as page:
        is_lost = True
        await page.route(f"**/v1/offers/{offer}/grabs", watch)
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("#said")).to_contain_text("you get nothing twice")
        await become(page, "bob")
        # Neither is ann's grab sent for bob, nor does bob wait for it.
        await expect(page.locator("#said")).to_have_text("")
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("#said")).to_have_text("You got it: 1 coupon.")
        is_lost = False
        await become(page, "ann")
        # Automatically.
        await expect(page.locator("#said")).to_have_text("You got it: 1 coupon.")
    assert [len(keys["ann"]), len(keys["bob"])] == [1, 1]
    query = "SELECT user_id, quantity FROM grabs WHERE offer = %s ORDER BY user_id"
    assert await sql(door, query, offer) == [("ann", 1), ("bob", 1)]


@pytest.mark.long
async def test_codes_of_returned_coupons_are_crossed_out(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await opened(caller, offer, kind="coupon", total=4, max_per_grab=2, codes=True)
    codes = [f"CODE-{number}" for number in range(4)]
    loaded = {"what": "codes", "chunk": 1, "chunks": 1, "items": codes}
    assert (await caller.post(f"/v1/offers/{offer}/loads", loaded)).body["outcome"] == "loaded"
    async with visited(browser, door.gateway.port, offer, "ann") as page:
        await page.get_by_label("How many").fill("2")
        async with page.expect_response("**/grabs") as answer:
            await page.get_by_role("button", name="Grab").click()
        await expect(page.locator(".mine .code")).to_have_text("CODE-0 CODE-1")
        grab = (await (await answer.value).json())["grab"]
        returned = await caller.post(
            f"/v1/offers/{offer}/grabs/{grab}/return", {"user": "ann", "quantity": 1}
        )
        assert (returned.body["voided_codes"], returned.body["left"]) == (["CODE-1"], 2)
        await page.get_by_label("How many").fill("1")
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("[data-value=left]")).to_have_text("1 left")
        first = page.locator(".mine > li", has_text="CODE-0")
        await expect(first.locator("[data-value=void]")).to_have_text("CODE-1")
        await expect(first).to_contain_text("Returned: 1 crossed-out code is void.")
        await expect(page.locator(".mine .code span").first).to_have_text("CODE-2")
    async with shown(browser, door.gateway.port, f"#/offers/{offer}") as page:
        await expect(page.locator("main")).to_contain_text("and 1 unit without code")


@pytest.mark.long
async def test_hold_is_paid_at_the_provider(
    browser: Browser, caller: Caller, door: Door, shop: Shop, offer: str
) -> None:
    await opened(caller, offer, **SALE, extensions=1, title="Lamp")
    async with visited(browser, shop.port, offer, "ann", "status of 409") as page:
        await page.get_by_role("button", name="Put it on hold for me").click()
        await expect(page.locator("#said")).to_contain_text("1 piece is on hold for you until ")
        await expect(page.get_by_role("timer").first).to_have_text(re.compile(r"^(10:00|9:5\d)$"))
        await page.get_by_role("button", name="More time").click()
        await expect(page.locator("#said")).to_contain_text("You have until ")
        await page.get_by_role("button", name="More time").click()
        await expect(page.get_by_role("alert")).to_have_text("This hold can no longer be extended.")
        await page.get_by_role("button", name="Pay 49.00 CNY").click()
        await expect(page.locator("#said")).to_have_text("Paid: 1 piece is yours.")
        await expect(page.locator(".mine .badge")).to_have_text("Paid, yours")
        query = "SELECT amount, currency, state, outcome FROM payments WHERE offer = %s"
        assert await sql(door, query, offer) == [(4_900, "CNY", "served", "confirmed")]
        assert await sql(door, "SELECT user_id, state FROM grabs WHERE offer = %s", offer) == [
            ("ann", "confirmed")
        ]
        # Another one, given back.
        await page.get_by_role("button", name="Put it on hold for me").click()
        await page.get_by_role("button", name="Give it back").click()
        await page.get_by_role("button", name="Really?").click()
        await expect(page.locator("#said")).to_have_text("Given back. It goes to others.")
        await expect(page.locator(".mine .badge").first).to_have_text("Given back")
        await expect(page.locator("[data-value=left]")).to_have_text("4 left")


@pytest.mark.long
async def test_buttons_of_a_hold_are_disabled_while_an_answer_is_awaited(
    browser: Browser, caller: Caller, shop: Shop, offer: str
) -> None:
    await opened(caller, offer, **SALE, extensions=2)
    go_on = asyncio.Event()

    async def keep(route: Route) -> None:
        await go_on.wait()
        await route.continue_()

    async with visited(browser, shop.port, offer, "ann") as page:
        await page.get_by_role("button", name="Put it on hold for me").click()
        await page.route("**/extend", keep, times=1)
        more = page.get_by_role("button", name="More time")
        # At once: a second click must not come to nothing.
        assert await more.evaluate("it => { it.click(); return it.getAttribute('aria-disabled'); }") == "true"
        go_on.set()
        await expect(page.locator("#said")).to_contain_text("You have until ")
        await expect(more).to_have_attribute("aria-disabled", "false")


@pytest.mark.long
async def test_waiting_list_gives_what_comes_back(
    browser: Browser, caller: Caller, shop: Shop, offer: str
) -> None:
    await opened(caller, offer, **{**SALE, "total": 1, "waiting_list": True})
    held = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "bob"})
    first = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "zoe", "wait": True})
    assert first.body["outcome"] == "waiting"
    async with visited(browser, shop.port, offer, "ann") as page:
        await page.get_by_role("button", name="Join the waiting list").click()
        await expect(page.locator(".mine .badge")).to_have_text("On the waiting list")
        await expect(page.locator(".mine")).to_contain_text("1 before you, since ")
        await caller.post(f"/v1/offers/{offer}/grabs/{first.body['grab']}/release", {"user": "zoe"})
        await expect(page.locator(".mine")).to_contain_text("You are next, since ")
        await caller.post(f"/v1/offers/{offer}/grabs/{held.body['grab']}/release", {"user": "bob"})
        await expect(page.locator("#said")).to_have_text("Your turn: 1 piece is on hold for you.")
        await expect(page.get_by_role("button", name="Pay 49.00 CNY")).to_be_visible()


@pytest.mark.long
async def test_states_of_an_offer(browser: Browser, caller: Caller, door: Door, offer: str) -> None:
    now = time.time_ns() // 1_000_000
    await opened(caller, offer, kind="coupon", total=5, opens_at=now + 3_600_000)
    async with visited(browser, door.gateway.port, offer, "ann", "status of 40[49]") as page:
        state = page.locator("[data-value=state]")
        button = page.get_by_role("button", name="Grab")
        await expect(page.get_by_text(re.compile("^Opens at .*, in$"))).to_be_visible()
        assert await button.is_disabled()
        # Only now, so that a slow machine sees it before, too.
        soon = {"changes": {"opens_at": time.time_ns() // 1_000_000 + 2_000}}
        amended = await caller.send("PATCH", f"/v1/offers/{offer}", soon, new_key())
        assert amended.status == 200, amended
        await expect(button).to_be_enabled()
        for action, words in (
            ("pause", "Paused for now. It may continue; this page will show it."), ("resume", ""),
            ("close", "This has ended, on "),
        ):  # fmt: skip
            await caller.post(f"/v1/offers/{offer}/{action}", {})
            if words:
                await expect(state).to_contain_text(words)
                await expect(button).to_be_hidden()
            else:
                await expect(button).to_be_visible()
        await page.goto(f"http://127.0.0.1:{door.gateway.port}/o/{offer}x")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Nothing here")
        await expect(state).to_have_text("There is no such offer. Is the address complete?")
        await page.goto(f"http://127.0.0.1:{door.gateway.port}/o/{offer}")


@pytest.mark.long
async def test_user_signs_in_with_a_token(
    browser: Browser, caller: Caller, door: Door, guarded: Guarded, offer: str
) -> None:
    await opened(caller, offer, kind="coupon", total=5, limits=[{"by": "user", "per": "day", "max": 1}])
    async with shown(browser, guarded.gateway.port, f"o/{offer}", "status of 40[19]") as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in to see this offer")
        await page.get_by_label("Token").fill("no token")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_have_text("This is not a token.")
        await page.get_by_label("Token").fill(token("ann", exp=1))
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_have_text("This token is not valid, or no longer valid.")
        valid = token("ann")
        await page.goto(f"http://127.0.0.1:{guarded.gateway.port}/o/{offer}#token={valid}")
        await expect(page.locator("[data-value=user]")).to_have_text("ann")
        assert page.url == f"http://127.0.0.1:{guarded.gateway.port}/o/{offer}"
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("#said")).to_have_text("You got it: 1 coupon.")
        await page.get_by_role("button", name="Grab").click()
        await expect(page.locator("#said")).to_contain_text("one person gets at most 1 a day. From ")
        assert await page.evaluate("Object.values(sessionStorage)") == [valid]
        await page.get_by_role("button", name="Sign out").click()
        assert await page.evaluate("Object.values(sessionStorage)") == []


@pytest.mark.long
async def test_everybody_can_use_it(browser: Browser, caller: Caller, shop: Shop, offer: str) -> None:
    """axe finds nothing in any state, light and dark; a phone does not scroll sideways; nothing moves for
    users who prefer that.
    """
    await opened(caller, offer, **ENVELOPE, total=5_000, parts=3, title="W" * 60)
    await opened(caller, f"{offer}s", **{**SALE, "total": 2, "max_per_grab": 2}, title="Lamp")
    await opened(caller, f"{offer}c", kind="coupon", total=2, opens_at=time.time_ns() // 1_000_000 + 600_000)
    options = {"reduced_motion": "reduce"}
    async with visited(browser, shop.port, offer, "", "status of 404", **options) as page:

        async def is_usable() -> None:
            assert await violations(page) == []
            await page.set_viewport_size({"width": 390, "height": 800})
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
            await page.set_viewport_size({"width": 1280, "height": 900})

        async def look(path: str, text: str) -> None:
            await page.goto(f"http://127.0.0.1:{shop.port}/o/{path}")
            await expect(page.get_by_text(text).first).to_be_visible()

        await look(offer, "Who are you?")
        await is_usable()
        await look(f"{offer}#user=ann", "3 left")
        await page.get_by_role("button", name="Open it").click()
        await expect(page.locator("#said")).to_contain_text("You got ")
        assert await page.evaluate("document.getAnimations().length") == 0
        await is_usable()
        await look(f"{offer}s", "2 left")
        await is_usable()
        await page.get_by_role("button", name="Put it on hold for me").click()
        await expect(page.get_by_role("button", name="Pay")).to_be_visible()
        await is_usable()
        await look(f"{offer}c", "Opens at")
        await is_usable()
        await look(f"{offer}x", "Nothing here")
        await is_usable()
        await page.goto(f"http://127.0.0.1:{shop.port}/o/{offer}")


@pytest.mark.long
async def test_two_tabs_and_the_same_user_get_one_part(
    browser: Browser, caller: Caller, door: Door, offer: str
) -> None:
    await opened(caller, offer, **ENVELOPE, total=5_000, parts=3)
    async with (
        visited(browser, door.gateway.port, offer, "ann", "status of 409") as first,
        visited(browser, door.gateway.port, offer, "ann", "status of 409") as second,
    ):
        buttons = [page.get_by_role("button", name="Open it") for page in (first, second)]
        for button in buttons:
            await expect(button).to_be_enabled()
        await asyncio.gather(*(button.click() for button in buttons))
        for page in (first, second):
            await expect(page.locator(".envelope.open")).to_be_visible()

        async def is_one() -> bool:
            return len(await sql(door, "SELECT 1 FROM grabs WHERE offer = %s", offer)) == 1

        await until(is_one, 20, "one part")
        [text] = {await page.locator(".envelope b").inner_text() for page in (first, second)}
        assert text
