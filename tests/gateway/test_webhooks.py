"""Webhooks over HTTP and on the live page: they show what SQL has, and change it."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from grabstream.connections.opening import checked_database
from grabstream.models.vocabulary.documents import DOCUMENTS
from grabstream.projections.tables import webhooks as stored
from grabstream.settings import Settings
from tests.conftest import until
from tests.gateway.conftest import Door, Guarded
from tests.support.browsers import shown, violations
from tests.support.gateways import Caller
from tests.support.projecting import rows

SEALED = "a sealed secret"
PROBLEM = "the receiver answered 500"


async def undeliver(settings: Settings, webhook: str, offer: str, state: str, seqs: range) -> None:
    """Adds events that a webhook was not delivered. The system has no worker that would deliver them."""
    async with checked_database(settings) as connection, connection.cursor() as cursor:
        await cursor.executemany(
            "INSERT INTO webhook_deliveries (webhook, shard, seq, offer, type, at, body, state, attempts, "
            "status, problem) VALUES (%s, 1, %s, %s, 'grab.granted', 1800000000000, '{}', %s, 18, 500, %s)",
            [(webhook, seq, offer, state, PROBLEM) for seq in seqs],
        )


@pytest.fixture
async def webhook(door: Door, offer: str) -> AsyncIterator[str]:
    """A webhook with three parked events of one offer, and two of another that wait."""
    name = f"wh-{offer}"
    async with checked_database(door.settings) as connection:
        await stored.add(connection, name, "https://example.com/<hook>", ["grab.granted"], [], SEALED, 1)
    await undeliver(door.settings, name, f"{offer}:a", "parked", range(1, 4))
    await undeliver(door.settings, name, f"{offer}:b", "waiting", range(11, 13))
    yield name
    async with checked_database(door.settings) as connection:
        await stored.remove(connection, name)


async def states(door: Door, webhook: str) -> list[Any]:
    """What a webhook was not delivered."""
    return await rows(
        door.settings,
        f"SELECT seq, state, attempts FROM webhook_deliveries WHERE webhook = '{webhook}' ORDER BY seq",
    )


async def shown_of(caller: Caller, webhook: str) -> Any:
    """A webhook as the gateway lists it."""
    got = await caller.send("GET", "/v1/webhooks")
    assert got.status == 200
    DOCUMENTS["webhooks"].model_validate_json(got.raw, strict=False)
    assert SEALED.encode() not in got.raw
    return next(row for row in got.body["webhooks"] if row["webhook"] == webhook)


async def test_webhooks_are_listed_with_what_is_not_delivered(caller: Caller, webhook: str) -> None:
    found = await shown_of(caller, webhook)
    assert found == {
        "webhook": webhook, "url": "https://example.com/<hook>", "types": ["grab.granted"], "offers": [],
        "state": "active", "from_ms": 1, "delivered": 0, "waiting": 2, "parked": 3,
    }  # fmt: skip
    got = await caller.send("GET", f"/v1/webhooks/{webhook}/deliveries")
    DOCUMENTS["webhook_deliveries"].model_validate_json(got.raw, strict=False)
    offer = webhook.removeprefix("wh-")
    assert [
        (one["state"], one["offer"], one["events"], one["event"], one["attempts"], one["status"])
        for one in got.body["deliveries"]
    ] == [("parked", f"{offer}:a", 3, "1-1", 18, 500), ("waiting", f"{offer}:b", 2, "1-11", 18, 500)]
    assert {one["problem"] for one in got.body["deliveries"]} == {PROBLEM}


async def test_events_that_failed_are_sent_again_and_only_those_asked_for(
    caller: Caller, door: Door, webhook: str
) -> None:
    offer = webhook.removeprefix("wh-")
    await undeliver(door.settings, webhook, f"{offer}:c", "parked", range(21, 22))
    path = f"/v1/webhooks/{webhook}/resend"
    got = await caller.send("POST", path, {"offer": f"{offer}:c"})
    assert (got.status, got.body) == (200, {"webhook": webhook, "resent": 1})
    before = await states(door, webhook)
    assert [state for _, state, _ in before] == ["parked"] * 3 + ["waiting"] * 3
    assert [attempts for *_, attempts in before] == [18] * 5 + [0]
    # Also those that wait for the time of their next attempt.
    got = await caller.send("POST", path, {})
    assert (got.status, got.body["resent"]) == (200, 5)
    assert await states(door, webhook) == [(seq, "waiting", 0) for seq in (1, 2, 3, 11, 12, 21)]
    # A repeat changes nothing.
    assert (await caller.send("POST", path, {})).body["resent"] == 0


async def test_an_event_is_given_up_and_the_others_stay(caller: Caller, door: Door, webhook: str) -> None:
    path = f"/v1/webhooks/{webhook}/discard"
    for event, was_there in (("1-1", True), ("1-1", False), ("1-11", True), ("1-999", False)):
        got = await caller.send("POST", path, {"event": event})
        assert (got.status, got.body) == (
            200, {"webhook": webhook, "event": event, "discarded": was_there},
        )  # fmt: skip
    assert [(seq, state) for seq, state, _ in await states(door, webhook)] == [
        (2, "parked"), (3, "parked"), (12, "waiting"),
    ]  # fmt: skip


async def test_a_webhook_is_paused_and_resumed(caller: Caller, door: Door, webhook: str) -> None:
    for state in ("paused", "paused", "active"):
        got = await caller.send("PATCH", f"/v1/webhooks/{webhook}", {"state": state})
        assert (got.status, got.body) == (200, {"webhook": webhook, "state": state})
        known = await rows(door.settings, f"SELECT state FROM webhooks WHERE webhook = '{webhook}'")
        assert known == [(state,)]
        # Resumed, it is sent at once what failed; what is parked stays.
        assert [attempts for *_, attempts in await states(door, webhook)] == (
            [18, 18, 18, 0, 0] if state == "active" else [18] * 5
        )


async def test_wrong_changes_are_refused_and_change_nothing(caller: Caller, door: Door, webhook: str) -> None:
    for method, path, body, field in (
        ("PATCH", "", b"", "body"), ("PATCH", "", {}, "state"), ("PATCH", "", {"state": "gone"}, "state"),
        ("PATCH", "", {"state": "paused", "url": "https://x"}, "url"), ("POST", "/resend", b"", "body"),
        ("POST", "/resend", {"offer": "é"}, "offer"), ("POST", "/resend", [], "body"),
        ("POST", "/discard", {}, "event"), ("POST", "/discard", {"event": "1"}, "event"),
        ("POST", "/discard", {"event": "1-1 "}, "event"), ("POST", "/discard", {"event": 1}, "event"),
        ("POST", "/discard", {"event": "١-1"}, "event"),
        ("POST", "/discard", {"event": f"1-{10**15}"}, "event"),
        ("PATCH", "", b'{"state": "paused", "state": "active"}', "state"),
        ("POST", "/resend", b'{"offer": null, "\\u006fffer": "o"}', "offer"),
        ("POST", "/discard", b'{"event": "1-1", "event": "1-2"}', "event"),
    ):  # fmt: skip
        got = await caller.send(method, f"/v1/webhooks/{webhook}{path}", body)
        assert (got.status, got.body["type"]) == (400, "/problems/invalid"), (body, got)
        assert got.body["field"] == field, (body, got)
    # What a page of another origin makes a browser send without asking.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        got = await caller.send("POST", f"/v1/webhooks/{webhook}/resend", b"{}", Content_Type=kind)
        assert got.status == 415, kind
    assert [state for _, state, _ in await states(door, webhook)] == ["parked"] * 3 + ["waiting"] * 2
    for method, path, body in (
        ("GET", "/deliveries", None), ("PATCH", "", {"state": "paused"}), ("POST", "/resend", {}),
        ("POST", "/discard", {"event": "1-1"}),
    ):  # fmt: skip
        got = await caller.send(method, f"/v1/webhooks/nothing{path}", body)
        assert (got.status, got.body["type"]) == (404, "/problems/no_such_webhook"), path


@pytest.mark.long
async def test_page_shows_webhooks_and_sends_again(
    browser: Browser, caller: Caller, door: Door, webhook: str
) -> None:
    async with shown(browser, door.gateway.port, f"#/webhooks/{webhook}") as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text(webhook)
        row = page.locator("tr", has=page.locator(f"a[href='#/webhooks/{webhook}']"))
        await expect(row.locator("[data-webhook=parked]")).to_have_text("3")
        await expect(row.locator("[data-webhook=waiting]")).to_have_text("2")
        await expect(row).to_contain_text("https://example.com/<hook>")
        parked = page.locator("tr", has_text=PROBLEM).first
        await expect(parked).to_contain_text("1-1, grab.granted")
        dialog = page.get_by_role("dialog")
        assert await violations(page) == []
        await row.get_by_role("button", name="Send again").click()
        await expect(dialog).to_contain_text("3 parked events are sent again")
        assert await violations(page) == []
        await page.keyboard.press("Escape")
        assert [state for _, state, _ in await states(door, webhook)] == ["parked"] * 3 + ["waiting"] * 2
        await row.get_by_role("button", name="Pause").click()
        await dialog.get_by_role("button", name="Pause").click()
        await expect(page.get_by_text(f"{webhook} is paused.")).to_be_visible()
        await expect(row.locator(".badge")).to_have_text("paused")
        await parked.get_by_role("button", name="Give up").click()
        await expect(dialog).to_contain_text("1-1 (grab.granted of ")
        await expect(dialog).to_contain_text("2 events of the offer after it stay parked")
        assert await violations(page) == []
        await expect(dialog.get_by_role("button", name="Give up")).to_be_disabled()
        await dialog.get_by_role("textbox").fill("1-1")
        await dialog.get_by_role("button", name="Give up").click()
        await expect(page.get_by_text(f"1-1 will not be sent to {webhook}.")).to_be_visible()
        await expect(row.locator("[data-webhook=parked]")).to_have_text("2")
        await expect(parked).to_contain_text("1-2, grab.granted")
        await row.get_by_role("button", name="Send again").click()
        await expect(dialog).to_contain_text("they are sent when it is resumed")
        await dialog.get_by_role("button", name="Send again").click()
        await expect(page.get_by_text(f"4 events of {webhook} will be sent again.")).to_be_visible()
        await expect(row.locator("[data-webhook=parked]")).to_have_text("0")
        await expect(row.locator("[data-webhook=waiting]")).to_have_text("4")
        await expect(row.get_by_role("button", name="Send again")).to_be_hidden()
        await row.get_by_role("button", name="Resume").click()
        await dialog.get_by_role("button", name="Resume").click()
        await expect(row.locator(".badge")).to_have_text("active")
        await page.set_viewport_size({"width": 390, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390

        async def are_waiting() -> bool:
            return {state for _, state, _ in await states(door, webhook)} == {"waiting"}

        await until(are_waiting, 20, "what SQL has")


@pytest.mark.long
async def test_page_says_that_webhooks_need_a_scope(browser: Browser, guarded: Guarded) -> None:
    async with shown(browser, guarded.gateway.port, "#/webhooks", "status of 40[13]") as page:
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Secret of the key").fill(guarded.secrets["read"])
        await dialog.get_by_role("button", name="Use this key").click()
        await expect(page.get_by_text(re.compile("need an API key with the scope operate"))).to_be_visible()
        await expect(page.get_by_text("There are no webhooks")).to_be_hidden()
