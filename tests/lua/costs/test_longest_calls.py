"""The longest call of each script for the largest legal input takes less than 10 ms of the Redis thread on a
quiet machine.

Other processes use this machine. So of each call the shortest repetition counts, and the time of a plain
grab, measured between the repetitions, shows how slow the machine is. SLOWLOG shows longer times: it includes
the time during which other processes kept the thread from running. docs/performance.md has the table.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Load,
    Open,
    Redeem,
    Release,
    Return,
)
from grabstream.models.identifiers import PAYMENT_BYTES_MAX
from grabstream.models.offers import Changes, CouponTerms, Limit, StockTerms
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.recovery import Recovery
from tests.lua.costs.measured_shard import SLOWER, MeasuredShard
from tests.lua.histories.recovered import fold
from tests.support.shards import NOW, SEALER, event_lines

HOUR = 3_600_000
Act = Callable[[], Awaitable[None]]
#: As many limits as an offer may have.
#: A grab records the names of its counters; those by user are shorter.
LIMITS = tuple(Limit(by, per, 10**6) for by in ("card", "a1") for per in ("offer", "hour", "day", "week"))
ATTRIBUTES = dict.fromkeys(("card", "a1", "a2", "a3", "a4", "a5", "a6", "a7"), "v" * 64)


async def decided(system: MeasuredShard, commands: list[AnyCommand], *outcomes: str) -> list[Answer]:
    answers = await system.decide(commands)
    assert {answer.outcome for answer in answers} <= set(outcomes), answers
    return answers


async def check(system: MeasuredShard, prepare: Act, act: Act, *scripts: str, repetitions: int = 3) -> None:
    longest = await system.longest_of(prepare, act, repetitions)
    rounded = {name: round(took, 1) for name, took in longest.items()}
    print(f"\n{rounded} ms; a plain grab took {system.slowness:.1f} times as long as on a quiet machine")
    assert set(scripts) <= longest.keys()
    assert max(longest.values()) < 10 * max(SLOWER, system.slowness), longest


async def waiting(system: MeasuredShard, offer: str, count: int, quantity: int, **more: Any) -> None:
    """Adds `count` grabs to the waiting list, each for `quantity` units."""
    for start in range(0, count, 1_000):
        numbers = range(start, min(start + 1_000, count))
        grabs: list[AnyCommand] = [
            Grab(
                id=f"{offer}-w{n}",
                offer=offer,
                user=f"w{n}" + "u" * 40,
                wait=True,
                quantity=quantity,
                attributes=ATTRIBUTES,
                **more,
            )
            for n in numbers
        ]
        await decided(system, grabs, "waiting")


@pytest.mark.long
async def test_calls_of_a_basket_over_offers_with_queues_are_short(system: MeasuredShard) -> None:
    """The units left in each offer suffice for none of its first hundred waiting grabs. One basket takes
    them, a second basket is refused.
    """
    names = [f"c:{n}" for n in range(BASKET_GRABS_MAX)]

    async def prepare() -> None:
        terms = StockTerms(
            issuer="i", total=5, hold_ms=HOUR, waiting_list=True, max_per_grab=5, limits=LIMITS
        )
        await decided(system, [Open(id=f"open-{name}", offer=name, terms=terms) for name in names], "opened")
        await decided(
            system, [Grab(id=f"h-{name}", offer=name, user="holder",
            attributes=ATTRIBUTES) for name in names], "held"
        )  # fmt: skip
        for name in names:
            await waiting(system, name, 100, 5)

    def basket(which: str, quantity: int) -> list[AnyCommand]:
        return [
            Grab(
                id=f"{which}{n}",
                offer=name,
                user=f"b{n}",
                basket=which,
                attributes=ATTRIBUTES,
                quantity=quantity,
            )
            for n, name in enumerate(names)
        ]

    async def act() -> None:
        await decided(system, basket("first", 1), "held")
        second = basket("second", 3)
        second[-1] = msgspec.structs.replace(second[-1], quantity=4)
        await decided(system, second, "not_enough_left")

    await check(system, prepare, act, "grab")


async def test_calls_of_a_basket_of_codes_are_short(system: MeasuredShard) -> None:
    names = [f"c:{n}" for n in range(BASKET_GRABS_MAX)]

    async def prepare() -> None:
        terms = CouponTerms(issuer="i", total=100, codes=True, max_per_grab=100, limits=LIMITS)
        await decided(system, [Open(id=f"open-{name}", offer=name, terms=terms) for name in names], "opened")
        lists: list[AnyCommand] = [
            Load(
                id=f"load-{name}",
                offer=name,
                what="codes",
                chunk=1,
                chunks=1,
                items=tuple(f"{name}-{i}" + "x" * 60 for i in range(100)),
            )
            for name in names
        ]
        await decided(system, lists, "loaded")

    async def act() -> None:
        basket: list[AnyCommand] = [
            Grab(id=f"b{n}", offer=name, user=f"b{n}", basket="b", attributes=ATTRIBUTES, quantity=10)
            for n, name in enumerate(names)
        ]
        await decided(system, basket, "granted")

    await check(system, prepare, act, "grab")


@pytest.mark.long
async def test_calls_for_a_grab_with_the_largest_record_are_short(system: MeasuredShard) -> None:
    """Late payments took units again in a hundred windows, under eight limits each. Then every command about
    the grab is sent.
    """

    async def prepare() -> None:
        system.now = NOW
        terms = StockTerms(
            issuer="i",
            total=10_000,
            hold_ms=1_000,
            max_per_grab=1_000,
            late="retake",
            extensions=10,
            limits=LIMITS,
            return_restores=True,
        )
        await decided(system, [Open(id="open", offer="o", terms=terms)], "opened")
        await decided(
            system, [Grab(id="g", offer="o", user="u" * 60, quantity=300, attributes=ATTRIBUTES)], "held"
        )
        for n in range(99):
            system.now += 2 * HOUR
            payment = f"{n:03}" + '"' * (PAYMENT_BYTES_MAX - 3)
            pay = Confirm(id=f"p{n}", offer="o", grab="g", payment=payment, paid=0, quantity=1)
            await decided(system, [pay], "confirmed")

    async def act() -> None:
        system.now += 2 * HOUR
        assert await system.redis.hstrlen(system.keys.offer_keys("o")[3], "g") > 90_000
        await decided(
            system, [Confirm(id="last", offer="o", grab="g", payment="q" * 64, paid=0, quantity=1)],
            "confirmed"
        )  # fmt: skip
        await decided(
            system,
            [Redeem(id=f"r{n}", offer="o", grab="g", order=f"o{n}") for n in range(20)],
            "redeemed",
            "not_redeemable",
        )
        await decided(
            system,
            [Return(id=f"back{n}", offer="o", grab="g", quantity=1) for n in range(20)],
            "returned",
            "not_redeemable",
        )
        await fold(
            system.redis,
            KeySpace("again", 1).shard(0),
            await event_lines(system.redis, system.space, 0),
            SEALER,
            1,
        )

    await check(system, prepare, act, "confirm", "return", "apply")


@pytest.mark.long
async def test_confirmations_of_grabs_with_large_records_are_short(system: MeasuredShard) -> None:
    """Records are read ahead, before it is known how large they are. Each of these has counted in a hundred
    windows of eight limits, as after a hundred late payments that took units again, with the longest ids.
    """
    names = [f"g{n}" for n in range(60)]

    async def prepare() -> None:
        terms = StockTerms(issuer="i", total=200, price=0, currency="CNY", hold_ms=HOUR, limits=LIMITS)
        await decided(system, [Open(id="open", offer="o", terms=terms)], "opened")
        grabs: list[AnyCommand] = [
            Grab(id=name, offer="o", user=name * 20, attributes=ATTRIBUTES) for name in names
        ]
        await decided(system, grabs, "held")
        key = system.keys.offer_keys("o")[3]
        for name in names:
            record = msgspec.msgpack.decode(await system.redis.hget(key, name))
            record[17] = [[1, record[16]]] * 100
            record[18] = [['\\"' * PAYMENT_BYTES_MAX, 1]] * 99
            # A list of 20 values, as the scripts pack it.
            await system.redis.hset(key, name, msgspec.msgpack.encode(record))
            assert await system.redis.hstrlen(key, name) > 90_000

    async def act() -> None:
        paid: list[AnyCommand] = [
            Confirm(id=f"p{name}", offer="o", grab=name, payment=name) for name in names
        ]
        await decided(system, paid, "confirmed")
        await decided(system, paid, "confirmed")

    await check(system, prepare, act, "confirm")


@pytest.mark.long
@pytest.mark.parametrize("count", [1_000, pytest.param(25_600, marks=pytest.mark.nightly)])
async def test_calls_that_give_units_to_a_long_queue_are_short(system: MeasuredShard, count: int) -> None:
    """The total is raised by the units waited for; then units return, one by one and by the hundred, and go
    to the other waiting grabs.
    """

    async def prepare() -> None:
        terms = StockTerms(
            issuer="i",
            total=100,
            hold_ms=1_000_000,
            max_per_grab=100,
            waiting_list=True,
            limits=LIMITS,
            return_restores=True,
            extensions=1,
        )
        await decided(system, [Open(id="open", offer="o", terms=terms)], "opened")
        await decided(
            system,
            [Grab(id=f"h{n}", offer="o", user=f"h{n}", attributes=ATTRIBUTES, quantity=25) for n in range(4)],
            "held",
        )
        await decided(
            system,
            [Confirm(id=f"p{n}", offer="o", grab=f"h{n}", payment=f"p{n}", paid=0) for n in range(4)],
            "confirmed",
        )
        await waiting(system, "o", count, 1)

    async def act() -> None:
        await decided(
            system, [Return(id=f"r{n}", offer="o", grab=f"h{n}", quantity=25) for n in range(4)], "returned"
        )
        await system.sweeper.sweep(system.now)
        await decided(system, [Amend(id="a", offer="o", changes=Changes(total=100 + count - 200))], "amended")
        await system.sweeper.sweep(system.now)
        await decided(
            system,
            [Extend(id=f"e{n}", offer="o", grab=f"o-w{n}") for n in range(100)],
            "extended",
            "not_held",
        )
        await decided(
            system, [Release(id=f"l{n}", offer="o", grab=f"o-w{n}") for n in range(256)], "released"
        )
        await decided(system, [Close(id="close", offer="o")], "closed")
        await system.sweeper.sweep(system.now)

    await check(system, prepare, act, "return", "amend", "sweep", "release", "close")


@pytest.mark.long
async def test_calls_that_wipe_a_shard_are_short(system: MeasuredShard) -> None:
    """Many small keys, large hashes, and parts of envelopes, which Redis frees in its main thread."""
    shard = OwnedShard(system.redis, KeySpace("gone", 1).shard(0))

    async def prepare() -> None:
        pipe = system.redis.pipeline(transaction=False)
        for n in range(600):
            pipe.set(shard.keys.parts(f"small{n}"), b"x" * 48_000)
            pipe.hset(shard.keys.offer(f"o{n}"), mapping={f"f{i}": "v" * 40 for i in range(30)})
        for n in range(4):
            pipe.set(shard.keys.parts(f"large{n}"), b"x" * 6_000_000)
            pipe.hset(shard.keys.offer_keys(f"o{n}")[3], mapping={f"g{i}": "v" * 100 for i in range(5_000)})
        await pipe.execute()

    async def act() -> None:
        ownership = (await shard.raise_term(0)).ownership
        await Recovery(shard, SEALER).wipe(ownership)
        assert {name async for name in system.redis.scan_iter(match=f"{shard.keys.tag}:*")} == {
            shard.keys.state.encode()
        }

    await check(system, prepare, act, "wipe")
