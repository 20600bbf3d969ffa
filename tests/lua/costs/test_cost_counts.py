"""The cost that a script counts is a fair part of the time it takes, for every command at its bounds. A flat
constant for long texts would fail this.

Times are those of the Redis thread, the shortest of several repetitions, divided by the slowness of a
reference script. So they depend little on the speed and the load of the machine. A constant time per call is
subtracted first.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from grabstream.lua.loader import load, script_names
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
)  # fmt: skip
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms
from tests.lua.costs.longest_texts import ATTRIBUTES, ENTRIES, LONG, codes, loads
from tests.lua.costs.measured_shard import Call, MeasuredShard, changed
from tests.lua.histories.recovered import fold
from tests.support.shards import SEALER, event_lines

pytestmark = pytest.mark.long

#: The least counted cost as a share of the µs that the calls take on a quiet machine.
COUNTED_AT_LEAST: Final = 0.5
#: Constant time of a call, µs.
EVERY_CALL_US: Final = 300
#: A reference script, which makes strings of 100,000 characters as calls with long texts do; and its time on
#: a quiet machine, µs.
REFERENCE: Final = "local text = ARGV[1] for i = 1, 20 do local made = text .. i end"
REFERENCE_US: Final = 2_870
#: Time on a quiet machine of the history's plain grabs, whose names have the greatest length, µs.
PLAIN_GRABS_US: Final = 5_100 + 3 * EVERY_CALL_US

HOUR: Final = 3_600_000
LIMITS: Final = tuple(
    Limit(by, per, 10**6)
    for by in ("user", next(iter(ATTRIBUTES)))
    for per in ("offer", "hour", "day", "week")  # type: ignore[arg-type]
)
HOURS: Final = tuple(
    Hours((day,), f"{2 * part:02}:00", f"{2 * part + 1:02}:59")  # type: ignore[arg-type]
    for day in ("mon", "tue", "wed", "thu", "fri", "sat", "sun") for part in range(9)
)  # fmt: skip
TITLE: Final = LONG * 200


def named(kind: str, number: int) -> str:
    """A name of the greatest length."""
    return f"{kind}{number}".ljust(64, "x")


def orders(offer: str, count: int, make: Callable[[str, str], AnyCommand]) -> list[AnyCommand]:
    return [make(named(f"{offer}{number}-", number), named(f"{offer}-g", number)) for number in range(count)]


def history() -> dict[str, list[AnyCommand]]:
    """Commands at their bounds by name of the step, in the order in which they are sent."""
    coupon = CouponTerms(
        issuer="i",
        total=800,
        codes=True,
        max_per_grab=100,
        hours=HOURS,
        title=TITLE,
        return_restores=True,
        limits=LIMITS,
    )
    sale = StockTerms(
        issuer=named("i", 0), total=10**6, max_per_grab=10, price=10**9, currency="CNY", hold_ms=HOUR,
        extensions=9, limits=LIMITS,
        hours=HOURS, title=TITLE,
    )  # fmt: skip
    money = EnvelopeTerms(
        issuer=named("i", 0),
        funding=named("f", 0),
        asset="CNY",
        total=10**9,
        parts=2_000,
        hours=(),
        title=TITLE,
    )
    listed = CouponTerms(issuer="i", total=10, audience="list", opens_at=4_000_000_000_000)
    changes = Changes(title=TITLE, limits=LIMITS, max_per_grab=9, valid_until=4_000_000_000_000)

    def grabs(offer: str, count: int, quantity: int) -> list[AnyCommand]:
        return [
            Grab(
                id=named(f"{offer}-g", n),
                offer=offer,
                user=named("u", n),
                quantity=quantity,
                attributes=ATTRIBUTES,
            )
            for n in range(count)
        ]

    def settled(offer: str, kind: Any, tag: str, numbers: Sequence[int], **more: Any) -> list[AnyCommand]:
        return [
            kind(id=named(f"{offer}-{tag}", n), offer=offer, grab=named(f"{offer}-g", n), **more)
            for n in numbers
        ]

    def operated(kind: Any, tag: str, count: int, **more: Any) -> list[AnyCommand]:
        return [kind(id=named(tag, n), offer="s", operator=named("op", n), **more) for n in range(count)]

    paid = [
        Confirm(
            id=named("pay", n),
            offer="s",
            grab=named("s-g", n),
            payment=named("p", n),
            paid=10 * 10**9,
            currency="CNY",
        )
        for n in range(100)
    ]
    return {
        "open": [
            Open(id=f"open-{n}", offer=n, terms=terms)
            for n, terms in (("c", coupon), ("s", sale), ("e", money), ("l", listed))
        ]
        + [Open(id=named("open", n), offer=named("more", n), terms=sale) for n in range(12)],
        "load codes": loads("c", "codes", codes(800)),
        "load audience": loads("l", "audience", [named("u", n) for n in range(3_000)]),
        "grab codes": grabs("c", 8, 100),
        "grab codes again": grabs("c", 8, 100),
        "grab plain": [Grab(id=named("e-g", n), offer="e", user=named("u", n)) for n in range(1_000)],
        "hold": grabs("s", 200, 10),
        "confirm": paid,
        "redeem": settled("c", Redeem, "redeem", range(8), order=named("o", 0), quantity=1),
        "unredeem": settled("c", Unredeem, "unredeem", range(8), order=named("o", 0)),
        "return": settled("c", Return, "return", range(8), quantity=50, reason=LONG * 200),
        "extend": settled("s", Extend, "extend", range(100, 200)),
        "release": settled("s", Release, "release", range(100, 200)),
        "adjust": operated(
            Adjust, "adjust", 100, transfers=ENTRIES, reason="r" * 200, approved_by=named("b", 0)
        ),
        "amend": operated(Amend, "amend", 100, changes=changes),
        "pause": operated(Pause, "pause", 100),
        "resume": operated(Resume, "resume", 100),
        "close": [Close(id=named("close", n), offer=named("more", n)) for n in range(12)],
    }


async def slowness(system: MeasuredShard) -> float:
    """The time of the reference now, at best, as a multiple of its time on a quiet machine; at least 1."""
    took = []
    for _ in range(10):
        before = await system.cpu_ms()
        await system.redis.eval(REFERENCE, 0, b"x" * 100_000)
        took.append(1_000 * (await system.cpu_ms() - before))
    return max(1.0, min(took) / REFERENCE_US)


async def play(system: MeasuredShard, counted: bool) -> dict[str, list[Call]]:
    """Plays `history` on an empty server, then a recovery; returns the measured calls of each step."""
    await system.redis.flushall()
    await system.gate.close()
    await system.begin()
    calls_of_steps: dict[str, list[Call]] = {}
    for name, commands in history().items():
        with system.measuring(counted) as calls:
            answers = await system.decide(commands)
        refused = {(answer.outcome, answer.message) for answer in answers if not answer.positive}
        assert not refused, (name, refused)
        calls_of_steps[name] = list(calls)
    with system.measuring(counted) as calls:
        keys = type(system.space)("fold", 1).shard(0)
        await fold(system.redis, keys, await event_lines(system.redis, system.space, 0), SEALER, 1)
    calls_of_steps["apply"] = [call for call in calls if call.script == "apply"]
    return calls_of_steps


async def test_counted_cost_is_a_fair_share_of_the_time_of_each_step(system: MeasuredShard) -> None:
    for name in script_names():
        await system.redis.script_load(load(name).text)
        await system.redis.script_load(changed(name, counted=True).text)
    timed = [await play(system, counted=False) for _ in range(2)]
    counted = await play(system, counted=True)
    took_us = {
        name: sum(
            1_000 * min(repetition[name][index].cpu_ms for repetition in timed) for index in range(len(calls))
        )
        for name, calls in counted.items()
    }
    # The greater of two measures of slowness.
    slower = max(await slowness(system), took_us["grab plain"] / PLAIN_GRABS_US)
    shares = {
        name: sum(call.cost for call in calls) / max(took_us[name] / slower - EVERY_CALL_US * len(calls), 1)
        for name, calls in counted.items()
    }
    assert min(shares.values()) > COUNTED_AT_LEAST, shares
