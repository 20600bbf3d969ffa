"""Takes the pictures of the pages in docs/images/: a crowd grabs in its own system, which is removed
afterwards. `make pictures` takes all of them, `make pictures ARGS="webhooks hold"` those that it names.
"""

import asyncio
import math
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from playwright.async_api import Browser, Page, expect

from grabstream.connections.opening import checked_database, gate_limits, key_space, open_redis, sealer
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.models.commands import AnyCommand, Grab, Open
from grabstream.models.offers import CouponTerms, EnvelopeTerms, Limit, StockTerms
from grabstream.projections.tables import webhooks as stored
from grabstream.settings import Settings, load_settings
from grabstream.streams.webhooks.messages import SEALED_FOR, new_secret
from grabstream.workshop.rehearsal.stage import GATEWAY, WORKERS, set_up
from tests.streams.webhooks.receiver import Got, ok, receiving
from tests.support.browsers import chromium

IMAGES: Final = Path("docs/images")
CROWD_SECONDS: Final = 50
#: Commands in one call of the gate, and calls a second at most.
TOGETHER: Final = 60
CALLS_A_SECOND: Final = 5
#: A user has one part of an envelope, so each picture has its own user.
USERS: Final = {"light": "mei", "dark": "jun"}
DESKTOP: Final = {"width": 1240, "height": 860}
PHONE: Final = {"width": 390, "height": 800}
BYTES_MAX: Final = 200_000
PICTURES: Final = ("envelope", "hold", "overview", "offer", "webhooks")
#: The webhook whose receiver fails.
FAILING: Final = "warehouse"
#: Returns when a page can be taken.
Ready = Callable[[Page], Awaitable[None]]
OFFERS: Final = {
    "july:dinner": EnvelopeTerms(
        issuer="alice", funding="pay-1", asset="CNY", total=888_800, parts=6_000, title="Dinner for everybody"
    ),
    "july:lamp": StockTerms(
        issuer="lantern-shop", total=900, price=4_900, currency="CNY", hold_ms=600_000, extensions=1,
        max_per_grab=2, waiting_list=True, limits=(Limit(by="user", per="day", max=2),),
        title="Paper lantern",
    ),
    "july:tea": CouponTerms(issuer="tea-house", total=4_000, title="A pot of tea for two"),
    "july:team": EnvelopeTerms(
        issuer="alice", funding="pay-2", asset="CNY", total=8_888, parts=12, title="Thank you, team!"
    ),
}  # fmt: skip


async def decide(gate: Gate, commands: Sequence[AnyCommand]) -> None:
    """Sends commands until all are decided."""
    left = list(commands)
    while left:
        answers = await gate.decide(left, patience_ms=30_000)
        left = [command for command, answer in zip(left, answers, strict=True) if not answer.decided]


async def crowd(gate: Gate) -> None:
    """Grabs that become more, and fewer."""
    began, number = time.monotonic(), 0
    for call in range(CROWD_SECONDS * CALLS_A_SECOND):
        await asyncio.sleep(began + call / CALLS_A_SECOND - time.monotonic())
        share = call / (CROWD_SECONDS * CALLS_A_SECOND)
        size = int(TOGETHER * (0.25 + math.sin(math.pi * share) ** 2 + 0.15 * math.sin(22 * share)))
        grabs: list[AnyCommand] = []
        for _ in range(max(size, 4)):
            number += 1
            offer = ("july:dinner", "july:dinner", "july:lamp", "july:tea", "july:tea")[number % 5]
            # Some come twice.
            user = f"user-{number if number % 6 else number // 2:05}"
            grabs.append(Grab(id=f"g-{number}", offer=offer, user=user))
        await decide(gate, grabs)


async def subscribe(settings: Settings, url: str) -> None:
    """Webhooks: of points, whose receiver takes everything; of a warehouse, whose receiver fails; and of
    letters, which an operator has paused.
    """
    wanted = {
        "points": (["grab.granted"], ["july:team", "july:tea"]),
        FAILING: (["grab.held", "grab.released"], ["july:lamp"]),
        "letters": ([], ["july:team"]),
    }
    async with checked_database(settings) as connection:
        for name, (types, offers) in wanted.items():
            webhook = f"wh-{name}"
            sealed = sealer(settings).seal(0, webhook, SEALED_FOR, new_secret())
            await stored.add(connection, webhook, f"{url}/{name}", types, offers, sealed, None)
        await stored.set_state(connection, "wh-letters", "paused")


async def received(got: Got) -> web.StreamResponse:
    """The warehouse is not there today."""
    return web.Response(status=503) if got.request.path.endswith(FAILING) else await ok(got)


async def take(browser: Browser, port: int, name: str, path: str, ready: Ready, size: Any) -> None:
    """A page in light and in dark, when it is ready."""
    for scheme in ("light", "dark"):
        context = await browser.new_context(
            viewport=size, color_scheme=scheme, device_scale_factor=1, reduced_motion="reduce"
        )  # type: ignore[call-overload]
        page = await context.new_page()
        await page.goto(f"http://127.0.0.1:{port}/{path.format(user=USERS[scheme])}")
        await ready(page)
        file = IMAGES / f"page-{name}-{scheme}.png"
        await page.screenshot(path=file)
        assert file.stat().st_size < BYTES_MAX, f"{file}: {file.stat().st_size} bytes"
        await context.close()


async def overview(page: Page) -> None:
    """The numbers are there."""
    await expect(page.get_by_text("balanced", exact=True)).to_be_visible(timeout=30_000)
    await expect(page.locator("[data-outcome=granted]")).to_be_visible(timeout=30_000)


async def film(page: Page) -> None:
    """The film and the distribution of parts are there."""
    await expect(page.get_by_role("slider")).to_be_visible(timeout=30_000)
    await expect(page.locator("[data-outcome=parts]")).to_be_visible(timeout=30_000)


async def opened(page: Page) -> None:
    """An envelope is opened."""
    await page.get_by_role("button", name="Open it").click()
    await expect(page.locator(".mine .badge")).to_have_text("Yours", timeout=30_000)
    await expect(page.locator("#said")).to_contain_text("You got")
    await expect(page.locator("[data-value=left]")).not_to_have_text("12 left")


async def held(page: Page) -> None:
    """A lantern is held."""
    await page.get_by_role("button", name="Put it on hold for me").click()
    await expect(page.get_by_role("button", name="Pay")).to_be_visible(timeout=30_000)


async def parked(page: Page) -> None:
    """What the warehouse did not take is parked."""
    await expect(page.locator(".badge.bad").first).to_have_text("parked", timeout=30_000)
    await expect(page.locator("[data-webhook=delivered]").first).not_to_have_text("0", timeout=30_000)


async def run(settings: Settings, wanted: Sequence[str]) -> None:
    """Makes the system, lets the crowd grab, and takes the pictures while it does."""
    redis = open_redis(settings)
    try:
        log = Path(".services") / "pictures.log"
        async with (
            set_up(settings, log, False, (*WORKERS, "webhooks", GATEWAY)) as stage,
            receiving() as receiver,
            chromium() as browser,
        ):
            port = await stage.gateway_port()
            receiver.answer = received
            await subscribe(settings, f"http://127.0.0.1:{receiver.port}")

            async def taken(name: str, path: str, ready: Ready, size: Any) -> None:
                if name in wanted:
                    await take(browser, port, name, path, ready, size)

            gate = Gate(redis, key_space(settings), sealer(settings), gate_limits(settings))
            gate.start()
            try:
                await decide(
                    gate, [Open(id=f"open-{name}", offer=name, terms=terms) for name, terms in OFFERS.items()]
                )
                grabbing = asyncio.create_task(crowd(gate))
                await taken("envelope", "o/july:team#user={user}", opened, PHONE)
                await taken("hold", "o/july:lamp#user={user}", held, PHONE)
                await grabbing
                await taken("overview", "", overview, DESKTOP)
                await taken("offer", "#/offers/july:dinner", film, DESKTOP)
                await taken("webhooks", f"#/webhooks/wh-{FAILING}", parked, DESKTOP)
            finally:
                await gate.close()
    finally:
        await redis.aclose()


def main() -> None:
    """Takes the pictures that the arguments name; without any, all."""
    wanted = sys.argv[1:] or PICTURES
    if unknown := set(wanted) - set(PICTURES):
        sys.exit(f"no such picture: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    # Receivers are on this machine, and what fails is parked at once.
    os.environ["GRAB_WEBHOOK_HTTP"] = os.environ["GRAB_WEBHOOK_PRIVATE_ADDRESSES"] = "true"
    os.environ["GRAB_WEBHOOK_ATTEMPTS_MAX"] = "1"
    # The page pays nothing: the button is in the picture.
    os.environ["GRAB_PAYMENT_KEYS"] = f"pictures:{secrets.token_urlsafe(32)}"
    os.environ["GRAB_PAYMENT_PAY_URL"] = "http://127.0.0.1:18090/pay"
    name = f"pictures{now_ms()}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name, "shards": 2})
    asyncio.run(run(settings, wanted))


if __name__ == "__main__":
    main()
