"""Every number in an event's text is an exact integer: commands at the bounds of all numbers, on real Lua.

The rules decide the same commands with integers of any size, and must write the same bytes.
"""

import asyncio
import json
import secrets
from typing import Any

import redis.asyncio
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.lua.keys import KeySpace
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Open,
    Release,
    Return,
    check,
)
from grabstream.models.entries import Entry
from grabstream.models.money import AMOUNT_MAX, Invalid
from grabstream.models.offers import (
    EXTENSIONS_MAX,
    HOLD_MS_MAX,
    TIME_MS_MAX,
    Changes,
    EnvelopeTerms,
    Limit,
    StockTerms,
)
from grabstream.settings import Settings
from tests.conftest import examples
from tests.lua.histories.scene import Scene
from tests.support.shards import NOW

#: Bounds, their neighbours, and numbers whose products are next to a bound.
NUMBERS = (1, 2, 15, 3_162_277, 3_162_278, 10**9, 10**12, AMOUNT_MAX // 2 + 1, AMOUNT_MAX - 1, AMOUNT_MAX)
amounts = st.sampled_from(NUMBERS) | st.integers(1, AMOUNT_MAX)
holds = st.sampled_from((1, 60_000, HOLD_MS_MAX - 1, HOLD_MS_MAX))
limits = st.lists(
    st.builds(
        Limit,
        by=st.just("user"),
        per=st.sampled_from(("offer", "hour", "week")),
        max=amounts,
        scope=st.sampled_from(("offer", "campaign")),
    ),
    max_size=2,
    unique_by=lambda limit: (limit.name, limit.scope),
).map(tuple)


def no_float(text: str) -> None:
    raise AssertionError(f"a number that is not an integer: {text}")


@st.composite
def terms(draw: Any) -> StockTerms:
    return StockTerms(
        issuer="i", total=draw(amounts), max_per_grab=draw(amounts), price=draw(amounts), currency="CNY",
        hold_ms=draw(holds),
        extensions=draw(st.sampled_from((0, 2, EXTENSIONS_MAX))),
        take=draw(st.sampled_from(("all", "up_to"))), waiting_list=True,
        late=draw(st.sampled_from(("refuse", "retake"))), return_restores=draw(st.booleans()),
        limits=draw(limits),
        retire_after_ms=TIME_MS_MAX, valid_until=draw(st.sampled_from((None, TIME_MS_MAX))),
        closes_at=TIME_MS_MAX,
    )  # fmt: skip


changes = st.one_of(
    *(st.builds(Changes, **{name: amounts}) for name in ("total", "price", "max_per_grab")),
    st.builds(Changes, hold_ms=holds),
    st.builds(Changes, extensions=st.sampled_from((0, EXTENSIONS_MAX))),
    st.builds(Changes, limits=limits),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("grab"), amounts, st.sampled_from(("a", "b")), st.booleans()),
        st.tuples(st.just("grab"), amounts, st.sampled_from(("a", "b")), st.booleans()),
        st.tuples(st.just("amend"), changes),
        st.tuples(st.just("amend"), changes),
        st.tuples(
            st.sampled_from(("confirm", "release", "extend", "return")),
            st.integers(0, 9),
            st.none() | amounts,
        ),
        st.tuples(st.just("adjust"), amounts),
        st.tuples(st.just("pass"), st.sampled_from((1, HOLD_MS_MAX))),
    ),
    min_size=5,
    max_size=25,
)


def command_of(number: int, step: tuple[Any, ...], scene: Scene) -> AnyCommand | None:
    """The command of a step, or None after letting time pass."""
    about = {"id": f"c{number}", "offer": "o:1"}
    offer = next((state.offers["o:1"] for state in scene.states if "o:1" in state.offers), None)
    match step:
        case ("grab", quantity, user, wait):
            return Grab(**about, user=user, quantity=quantity, wait=wait)
        case ("amend", changed):
            return Amend(**about, changes=changed)
        case ("adjust", amount):
            return Adjust(
                **about,
                transfers=(Entry("CNY", "issuer:i", "wallet:u", amount),),
                reason="r",
                approved_by="b",
            )
        case ("pass", ms):
            scene.now += ms
        case (kind, index, quantity):
            name, grab = (
                (list(offer.grabs.items()) or [("none", None)])[index % max(len(offer.grabs), 1)]
                if offer
                else ("none", None)
            )
            if kind == "confirm":
                units = quantity or (grab.held or grab.lapsed if grab else 1)
                paid = (grab.price if grab else 1) * units
                return Confirm(
                    **about, grab=name, payment=f"p{number}", paid=paid, currency="CNY", quantity=quantity
                )
            if kind == "return":
                return Return(**about, grab=name, quantity=quantity)
            return (Release if kind == "release" else Extend)(**about, grab=name)
    return None


def is_valid(command: AnyCommand) -> bool:
    """Whether `check` accepts the command."""
    try:
        check(command)
    except Invalid:
        return False
    return True


WAITER = StockTerms(
    issuer="i",
    total=15,
    max_per_grab=15,
    price=10**11,
    currency="CNY",
    hold_ms=1_000,
    take="up_to",
    waiting_list=True,
    closes_at=TIME_MS_MAX,
)
LARGER_THAN_DUE: list[tuple[Any, ...]] = [
    ("grab", 15, "a", False), ("grab", 15, "b", True), ("amend", Changes(max_per_grab=1)),
    ("amend", Changes(price=10**13)),
    ("release", 0, None), ("amend", Changes(price=10**12)), ("amend", Changes(total=10**13)),
]  # fmt: skip


@hypothesis_settings(max_examples=examples(60), deadline=None)
@given(opened=terms(), commands=steps)
@example(opened=WAITER, commands=LARGER_THAN_DUE)
def test_every_number_in_an_event_is_the_exact_integer_of_the_rules(
    servers: Settings, opened: StockTerms, commands: list[tuple[Any, ...]]
) -> None:
    asyncio.run(_play(servers, opened, commands))


async def _play(servers: Settings, opened: StockTerms, commands: list[tuple[Any, ...]]) -> None:
    scene, client = Scene(), redis.asyncio.Redis.from_url(servers.redis_url)
    await scene.begin(client, KeySpace(f"exact{secrets.token_hex(5)}", 1))
    try:
        scene.now = NOW
        opening = Open(id="open", offer="o:1", terms=opened)
        envelope = EnvelopeTerms(
            issuer="i", funding="f", asset="CNY", total=AMOUNT_MAX, parts=2, law="bounded", seed="0" * 32
        )
        await scene.decide_both(
            [Open(id="e", offer="o:e", terms=envelope), Grab(id="g", offer="o:e", user="a")]
        )
        if is_valid(opening):
            await scene.decide_both([opening])
        for number, step in enumerate(commands):
            command = command_of(number, step, scene)
            if command is None:
                await scene.sweep_both()
            elif is_valid(command):
                await scene.decide_both([command])
        await scene.decide_both([Close(id=f"close-{name}", offer=f"o:{name}") for name in ("1", "e")])
        for line in await scene.all_lines():
            json.loads(line, parse_float=no_float)
    finally:
        await scene.end_twins()
        await client.aclose()
