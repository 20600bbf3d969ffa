"""No call of a script does more than a bounded sum of work; what does not fit goes into the next one, and
nothing else differs.

Cost is counted by the scripts themselves (lua/includes/cost.lua) and held strictly; time is looked at
loosely, since others use this machine. docs/performance.md has the times of a quiet one.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from grabstream.lua.loader import script_names
from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.commands import Amend, AnyCommand, Close, Grab, Load, Open, Release
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Limit, StockTerms
from grabstream.models.rules.operating import fall_due
from grabstream.models.rules.settling import lapse
from grabstream.ops.diagnosis.slow_scripts import script_calls, slow_scripts
from grabstream.ops.settings import Settings
from grabstream.streams.deciding.sweeper import HOLDS_AT_ONCE_MAX, OFFERS_AT_ONCE_MAX, Sweeper
from tests.lua.conftest import SEALER, event_lines
from tests.lua.costs.calls import (
    CALL_COST_MAX,
    COMMAND_COST_MAX,
    SLOWER,
    Call,
    Measured,
    changed,
    longest,
    scripts,
)
from tests.lua.histories.books import check_books
from tests.lua.histories.hostile import Sweep
from tests.lua.histories.hostile_runs import HostileTwins, play
from tests.lua.histories.promises import check_promises
from tests.lua.histories.recovered import contents, differences, fold

HOLD_MS = 60_000


@pytest.fixture
async def measured(own_server: Any) -> AsyncIterator[Measured]:
    one = Measured(own_server[1])
    await one.begin()
    yield one
    await one.end()


async def with_queue(
    system: Measured, offer: str, waiting: int, units: int = 1, holds: int = 1, **terms: Any
) -> None:
    """An offer whose units are all held, and as many who wait for one of them."""
    opening = StockTerms(
        issuer="i", total=units * holds, hold_ms=HOLD_MS, waiting_list=True, max_per_grab=units, **terms
    )
    commands: list[AnyCommand] = [Open(id=f"open-{offer}", offer=offer, terms=opening)]
    commands += [
        Grab(id=f"{offer}-h{n}", offer=offer, user=f"u{n}", quantity=units, attributes={"card": f"c{n}"})
        for n in range(holds)
    ]
    commands += [
        Grab(id=f"{offer}-w{n}", offer=offer, user=f"w{n}", wait=True, attributes={"card": f"w{n}"})
        for n in range(waiting)
    ]
    assert {answer.outcome for answer in await system.decide(commands)} <= {"opened", "held", "waiting"}


# -- nothing else differs ------------------------------------------------------------------------------------


class OneByOne(HostileTwins):
    """Calls with room for one thing: the sweeper takes what is due one by one, the first first."""

    async def sweep_some(self, how: Sweep) -> None:
        for number, state in enumerate(self.states):
            await Sweeper(self.client, self.keys.shard(number), self.keys.shards, 10**12).sweep(self.now)
            now, events = max(self.now, state.time), list[Any]()
            holds = [
                (grab.lapses_at, f"{offer.name}/{name}", offer, name)
                for offer in state.offers.values()
                for name, grab in offer.grabs.items()
                if grab.held and self.now >= grab.lapses_at
            ]
            for _, _, offer, name in sorted(holds, key=lambda hold: hold[:2]):
                events += lapse(state, offer, name, now)
            while due := [offer for offer in state.offers.values() if self.now >= offer.due]:
                events += fall_due(state, min(due, key=lambda one: (one.due, one.name)), now)
            await self._compare(number, events)


@pytest.mark.parametrize("seed", range(2))
async def test_histories_with_one_command_a_call(servers: Settings, seed: int) -> None:
    """Answers, events, state, and what a recovery makes of them, as the rules have it: where calls end
    changes nothing.
    """
    client = redis.asyncio.Redis.from_url(servers.redis_url)
    try:
        with scripts(call_max=1):
            await play(client, random.Random(seed), 70, OneByOne())
    finally:
        await client.aclose()


async def test_a_list_is_decided_in_its_order_in_however_many_calls(
    servers: Settings, measured: Measured
) -> None:
    """Of several callers at once, each with releases and grabs in turn; every command has its answer, each
    caller's in its order.
    """
    await with_queue(measured, "o", 0, holds=400)
    lists = []
    for caller in range(4):
        places = range(caller * 100, caller * 100 + 100)
        lists.append(
            [Release(id=f"r{n}", offer="o", grab=f"o-h{n}") for n in places]
            + [Grab(id=f"g{n}", offer="o", user=f"v{n}") for n in places]
        )
    with scripts(call_max=200):
        answers = await asyncio.gather(*(measured.decide(commands) for commands in lists))
    for commands, of_caller in zip(lists, answers, strict=True):
        assert [answer.id for answer in of_caller] == [command.id for command in commands]
        assert [answer.outcome for answer in of_caller] == 100 * ["released"] + 100 * ["held"]
        seqs = [answer.seq or 0 for answer in of_caller]
        assert seqs == sorted(seqs)
    lines = await event_lines(measured.redis, measured.space, 0)
    assert len(lines) == 1 + 400 + 800


async def test_baskets_are_not_torn(measured: Measured) -> None:
    terms = StockTerms(issuer="i", total=100)
    await measured.decide([Open(id=f"open-{n}", offer=f"c:{n}", terms=terms) for n in range(80)])
    baskets: list[AnyCommand] = []
    for basket in range(20):
        users = [f"b{basket}u{n}" for n in range(BASKET_GRABS_MAX)]
        baskets += [
            Grab(id=user, offer=f"c:{(basket * BASKET_GRABS_MAX + n) % 80}", user=user, basket=f"b{basket}")
            for n, user in enumerate(users)
        ]
    with scripts(call_max=1):
        assert {answer.outcome for answer in await measured.decide(baskets)} == {"granted"}
    entries = await measured.redis.xrange(measured.keys.outbox)
    grants = [line for _, fields in entries for line in fields.values() if b"grab.granted" in line]
    assert len(grants) >= 20


# -- a bounded sum of work -----------------------------------------------------------------------------------


def check_bounded(calls: list[Call]) -> None:
    assert calls
    for call in longest(calls).values():
        assert call.cost < CALL_COST_MAX + COMMAND_COST_MAX, call
        assert call.cpu_ms < 10 * SLOWER, call


async def check_whole(system: Measured) -> None:
    """The books, the promises, and a recovery, which is bounded as well."""
    lines = await event_lines(system.redis, system.space, 0)
    check_books(lines)
    check_promises(lines)
    keys = type(system.space)("fold", 1).shard(0)
    with system.measuring(counted=True) as calls:
        await fold(system.redis, keys, lines, SEALER, 1)
    check_bounded(calls)
    live, made = (
        await contents(system.redis, system.keys, system.now),
        await contents(system.redis, keys, system.now),
    )
    assert not differences(live, made)


async def test_many_holds_that_end_together_with_many_who_wait(measured: Measured) -> None:
    """256 holds of 6 units, 1,536 who wait."""
    await with_queue(measured, "o", 1_536, units=6, holds=256)
    measured.now += HOLD_MS + 1
    with measured.measuring(counted=True) as calls:
        await measured.sweeper.sweep(measured.now)
    check_bounded(calls)
    assert await measured.redis.zcard(measured.keys.holds) == 1_536
    await check_whole(measured)


async def test_many_releases_in_one_list_with_many_who_wait(measured: Measured) -> None:
    limits = tuple(Limit(by, per, 100) for by in ("user", "card") for per in ("offer", "hour", "day", "week"))
    await with_queue(measured, "o", 1_280, units=5, holds=256, limits=limits)
    with measured.measuring(counted=True) as calls:
        answers = await measured.decide([Release(id=f"r{n}", offer="o", grab=f"o-h{n}") for n in range(256)])
    check_bounded(calls)
    assert {answer.outcome for answer in answers} == {"released"}
    assert await measured.redis.zcard(measured.keys.holds) == 1_280


async def test_many_closed_offers_with_queues(measured: Measured) -> None:
    for n in range(OFFERS_AT_ONCE_MAX):
        await with_queue(measured, f"o{n}", 30)
    with measured.measuring(counted=True) as calls:
        await measured.decide([Close(id=f"c{n}", offer=f"o{n}") for n in range(OFFERS_AT_ONCE_MAX)])
        await measured.sweeper.sweep(measured.now)
    check_bounded(calls)
    for n in range(OFFERS_AT_ONCE_MAX):
        assert await measured.redis.zcard(measured.keys.of_offer(f"o{n}")[7]) == 0
    await check_whole(measured)


async def test_many_offers_grabs_and_lists_in_one_call(measured: Measured) -> None:
    """Offers by the hundred, eight limits, codes by the hundred, long lists, parts by the ten thousand."""
    limits = tuple(Limit(by, per, 100) for by in ("user", "card") for per in ("offer", "hour", "day", "week"))
    opens = [
        Open(id=f"open-{n}", offer=f"o{n}", terms=StockTerms(issuer="i", total=100, limits=limits))
        for n in range(150)
    ]
    coupons = [
        Open(
            id=f"open-c{n}",
            offer=f"c{n}",
            terms=CouponTerms(issuer="i", total=1_000, codes=True, max_per_grab=100),
        )
        for n in range(8)
    ]
    lists = [
        Load(
            id=f"load{n}",
            offer=f"c{n}",
            what="codes",
            chunk=1,
            chunks=1,
            items=tuple(f"code-{n}-{i}" for i in range(1_000)),
        )
        for n in range(8)
    ]
    drawn = [
        Open(
            id=f"open-e{n}",
            offer=f"e{n}",
            terms=EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=10**9, parts=20_000),
        )
        for n in range(4)
    ]
    grabs = [Grab(id=f"g{n}", offer=f"o{n}", user=f"u{n}", attributes={"card": "c"}) for n in range(150)]
    with_codes = [Grab(id=f"k{n}", offer=f"c{n % 8}", user=f"u{n}", quantity=100) for n in range(80)]
    with measured.measuring(counted=True) as calls:
        for commands in (opens, coupons, lists, drawn, grabs, with_codes):
            outcomes = {answer.outcome for answer in await measured.decide(commands)}
            assert outcomes <= {"opened", "loaded", "granted"}, outcomes
    check_bounded(calls)
    await check_whole(measured)


async def test_newcomers_pass_nobody_while_a_queue_is_served_in_steps(measured: Measured) -> None:
    await with_queue(measured, "o", 200)
    [amended] = await measured.decide([Amend(id="a", offer="o", changes=Changes(total=150))])
    assert amended.outcome == "amended"
    assert (amended.left or 0) > 0
    [newcomer] = await measured.decide([Grab(id="new", offer="o", user="new")])
    assert newcomer.outcome == "sold_out"
    await measured.sweeper.sweep(measured.now)
    held = await measured.redis.zrange(measured.keys.holds, 0, -1)
    assert {name.decode() for name in held} == {"o/o-h0", *(f"o/o-w{n}" for n in range(149))}


async def test_the_longest_call_of_hostile_histories(measured: Measured) -> None:
    """Cost and time of Redis' thread of every call; and by SLOWLOG, which counts also how long others kept
    the thread from running.
    """
    await measured.redis.config_set("slowlog-log-slower-than", 0)
    await measured.redis.config_set("slowlog-max-len", 1_000_000)
    with measured.measuring(counted=True) as calls:
        await play(measured.redis, random.Random(3), 100)
    check_bounded(calls)
    shas = {changed(name, counted=True).sha: name for name in script_names()}
    slowest: dict[str, float] = {}
    for entry in await measured.redis.slowlog_get(1_000_000):
        words = entry["command"].decode(errors="replace").split(" ", 2)
        if words[0] == "EVALSHA" and (name := shas.get(words[1])):
            slowest[name] = max(slowest.get(name, 0), entry["duration"] / 1_000)
    assert {"open", "grab", "apply"} <= slowest.keys()
    assert max(slowest.values()) < 10 * SLOWER * SLOWER, slowest


# -- nobody waits for another --------------------------------------------------------------------------------


async def test_a_hold_ends_in_time_beside_retirement_and_cleaning(measured: Measured) -> None:
    """200 empty offers of a campaign retire beside one with many grabs, whose answers are of the same
    campaign.
    """
    await measured.decide(
        [
            Open(
                id="live",
                offer="c:live",
                terms=EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=10**9, parts=100_000),
            )
        ]
    )
    for start in range(0, 20_000, 2_000):
        await measured.decide(
            [Grab(id=f"g{n}", offer="c:live", user=f"u{n}") for n in range(start, start + 2_000)]
        )
    empty = StockTerms(issuer="i", total=1, retire_after_ms=1)
    await measured.decide([Open(id=f"open-{n}", offer=f"c:{n}", terms=empty) for n in range(200)])
    await measured.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=1, hold_ms=3_000))])
    await measured.decide([Grab(id="held", offer="o", user="ann")])
    await measured.decide([Close(id=f"close-{n}", offer=f"c:{n}") for n in range(200)])
    measured.now += 3_000
    with measured.measuring(counted=True) as calls:
        await measured.sweeper.sweep(measured.now)
        assert next(call.script for call in calls) == "expire"
        # One look at each: nothing is done for the answers of the live offer, however many there are.
        assert len([call for call in calls if call.script == "sweep"]) <= 200 // OFFERS_AT_ONCE_MAX + 4
        assert await measured.redis.scard(measured.keys.retired) == 200
        await measured.sweeper.clean(measured.now)
    check_bounded(calls)
    assert await measured.redis.hlen(measured.keys.answers("c")) == 20_001


async def test_what_falls_due_now_does_not_stand_behind_all_that_retires(measured: Measured) -> None:
    """A queue is served on in the second call, whatever else is due."""
    many = 10 * OFFERS_AT_ONCE_MAX
    await measured.decide(
        [
            Open(id=f"open-{n}", offer=f"x{n}", terms=StockTerms(issuer="i", total=1, retire_after_ms=1))
            for n in range(many)
        ]
    )
    await measured.decide([Close(id=f"close-{n}", offer=f"x{n}") for n in range(many)])
    await with_queue(measured, "o", 50)
    measured.now += 10
    await measured.decide([Amend(id="a", offer="o", changes=Changes(total=40))])
    for _ in range(2):
        await measured.sweeper.close_due(measured.now)
    assert await measured.redis.scard(measured.keys.retired) < many
    assert await measured.redis.zcard(measured.keys.holds) == 40


async def test_counted_refusals_are_all_flushed(measured: Measured) -> None:
    """36,000 fields, of which new ones come all the time."""
    fields = {f"1000:32:offer-{n}": 1 for n in range(36_000)}
    await measured.redis.hset(measured.keys.demand, mapping=fields)
    written: list[tuple[int, int, str, int]] = []

    async def record(shard: int, rows: Any) -> None:
        written.extend(rows)
        await measured.redis.hset(measured.keys.demand, f"{2**40}:32:now-{len(written)}", 1)

    sweeper = Sweeper(measured.redis, measured.keys, 1, 0, record)
    for _ in range(3 * 36_000 // 2_000):
        await sweeper.flush_demand()
    assert {offer for _, _, offer, _ in written} >= {f"offer-{n}" for n in range(36_000)}
    assert all(b":now-" in name for name in await measured.redis.hkeys(measured.keys.demand))


async def test_more_holds_than_a_call_sees_end_in_one_sweep(measured: Measured) -> None:
    await with_queue(measured, "o", 0, holds=3 * HOLDS_AT_ONCE_MAX + 5)
    measured.now += HOLD_MS + 1
    assert await measured.sweeper.sweep(measured.now) == 3 * HOLDS_AT_ONCE_MAX + 5
    assert await measured.redis.zcard(measured.keys.holds) == 0


async def test_operators_see_the_longest_calls(measured: Measured) -> None:
    """Of this system's scripts, by SLOWLOG; not those of another on the same server."""
    await measured.redis.config_set("slowlog-log-slower-than", 0)
    await measured.decide(
        [Open(id=f"open-{n}", offer=f"o{n}", terms=StockTerms(issuer="i", total=1)) for n in range(2)]
    )
    await measured.decide([Open(id="again", offer="o9", terms=StockTerms(issuer="i", total=1))])
    [known] = [one for one in await slow_scripts(measured.redis, "own") if one.script == "open"]
    assert known.calls >= 1
    assert known.longest_ms > 0
    assert await slow_scripts(measured.redis, "ow") == []


async def test_operators_see_how_long_the_longest_call_was_since_the_server_started(
    measured: Measured,
) -> None:
    """Also of calls that no SLOWLOG has."""
    await measured.redis.config_set("slowlog-log-slower-than", -1)
    await measured.redis.config_resetstat()
    assert await script_calls(measured.redis) == []
    await measured.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=1))])
    [short] = await script_calls(measured.redis)
    busy = (
        "local at = redis.call('TIME') repeat local now = redis.call('TIME') until now[1] * 1e6 + now[2] "
        "> at[1] * 1e6 + at[2] + 30000"
    )
    await measured.redis.evalsha(await measured.redis.script_load(busy), 0)
    [long] = await script_calls(measured.redis)
    assert (short.server, long.calls) == ("", short.calls + 1)
    assert long.longest_ms_at_most >= 30
    assert short.longest_ms_at_most <= long.longest_ms_at_most
