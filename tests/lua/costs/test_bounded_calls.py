"""The work of each script call is bounded. Work that does not fit goes into the next call, which changes
nothing else.

The scripts count their cost themselves (lua/includes/cost.lua), and the tests check it strictly. They check
time loosely, since other processes use this machine. docs/performance.md has the times of a quiet machine.
"""

import asyncio
import random
from typing import Any

import pytest
import redis.asyncio

from grabstream.connections.opening import cancellable
from grabstream.lua.loader import script_names
from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.commands import Amend, AnyCommand, Close, Grab, Load, Open, Release
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Limit, StockTerms
from grabstream.models.rules.operating import fall_due
from grabstream.models.rules.settling import lapse
from grabstream.ops.diagnosis.slow_scripts import script_calls, slow_scripts
from grabstream.settings import Settings
from grabstream.streams.deciding.sweeper import HOLDS_AT_ONCE_MAX, OFFERS_AT_ONCE_MAX, Sweeper
from tests.lua.costs.measured_shard import (
    CALL_COST_MAX,
    COMMAND_COST_MAX,
    SLOWER,
    Call,
    MeasuredShard,
    changed,
    longest,
    scripts,
)
from tests.lua.histories.books import check_books
from tests.lua.histories.hostile_history import Sweep
from tests.lua.histories.hostile_twins import HostileTwins, play
from tests.lua.histories.promises import check_promises
from tests.lua.histories.recovered import contents, differences, fold
from tests.support.shards import SEALER, event_lines

HOLD_MS = 60_000


async def with_queue(
    system: MeasuredShard, offer: str, waiting: int, units: int = 1, holds: int = 1, **terms: Any
) -> None:
    """Opens an offer all of whose units are held, with `waiting` grabs of one unit on its waiting list."""
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


# -- where calls end changes nothing -------------------------------------------------------------------------


class OneItemPerCallTwins(HostileTwins):
    """Twins for calls with room for one item: each sweep ends all due holds, then all due offers, one by one
    in order.
    """

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
                events += fall_due(state, min(due, key=lambda offer: (offer.due, offer.name)), now)
            await self._compare(number, events)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
async def test_histories_with_one_command_per_call_match_the_rules(servers: Settings, seed: int) -> None:
    """Answers, events, state and recoveries are those of the rules, wherever calls end."""
    client = cancellable(redis.asyncio.Redis.from_url(servers.redis_url))
    try:
        with scripts(call_max=1):
            await play(client, random.Random(seed), 70, OneItemPerCallTwins())
    finally:
        await client.aclose()


async def test_a_list_is_decided_in_order_in_any_number_of_calls(
    servers: Settings, system: MeasuredShard
) -> None:
    """Several callers send releases and then grabs at once. Every command gets its answer, and each caller's
    commands are decided in their order.
    """
    await with_queue(system, "o", 0, holds=400)
    lists = []
    for caller in range(4):
        numbers = range(caller * 100, caller * 100 + 100)
        lists.append(
            [Release(id=f"r{n}", offer="o", grab=f"o-h{n}") for n in numbers]
            + [Grab(id=f"g{n}", offer="o", user=f"v{n}") for n in numbers]
        )
    with scripts(call_max=200):
        answers = await asyncio.gather(*(system.decide(commands) for commands in lists))
    for commands, of_caller in zip(lists, answers, strict=True):
        assert [answer.id for answer in of_caller] == [command.id for command in commands]
        assert [answer.outcome for answer in of_caller] == 100 * ["released"] + 100 * ["held"]
        seqs = [answer.seq or 0 for answer in of_caller]
        assert seqs == sorted(seqs)
    lines = await event_lines(system.redis, system.space, 0)
    assert len(lines) == 1 + 400 + 800


async def test_a_basket_is_never_split_between_calls(system: MeasuredShard) -> None:
    terms = StockTerms(issuer="i", total=100)
    await system.decide([Open(id=f"open-{n}", offer=f"c:{n}", terms=terms) for n in range(80)])
    baskets: list[AnyCommand] = []
    for basket in range(20):
        users = [f"b{basket}u{n}" for n in range(BASKET_GRABS_MAX)]
        baskets += [
            Grab(id=user, offer=f"c:{(basket * BASKET_GRABS_MAX + n) % 80}", user=user, basket=f"b{basket}")
            for n, user in enumerate(users)
        ]
    with scripts(call_max=1):
        assert {answer.outcome for answer in await system.decide(baskets)} == {"granted"}
    entries = await system.redis.xrange(system.keys.outbox)
    grants = [line for _, fields in entries for line in fields.values() if b"grab.granted" in line]
    assert len(grants) >= 20


# -- the work of a call is bounded ---------------------------------------------------------------------------


def check_bounded(calls: list[Call]) -> None:
    assert any(call.cost for call in calls), "the cost is not counted"
    for call in longest(calls).values():
        assert call.cost < CALL_COST_MAX + COMMAND_COST_MAX, call
        assert call.cpu_ms < 10 * SLOWER, call


async def check_whole(system: MeasuredShard) -> None:
    """Checks the books, the promises, and a recovery, whose calls are bounded too."""
    lines = await event_lines(system.redis, system.space, 0)
    check_books(lines)
    check_promises(lines)
    keys = type(system.space)("fold", 1).shard(0)
    with system.measuring(counted=True) as calls:
        await fold(system.redis, keys, lines, SEALER, 1)
    check_bounded(calls)
    live, recovered = (
        await contents(system.redis, system.keys, system.now),
        await contents(system.redis, keys, system.now),
    )
    assert not differences(live, recovered)


@pytest.mark.long
async def test_calls_are_bounded_when_many_holds_end_before_a_long_queue(system: MeasuredShard) -> None:
    """256 holds of 6 units each, 1,536 waiting grabs."""
    await with_queue(system, "o", 1_536, units=6, holds=256)
    system.now += HOLD_MS + 1
    with system.measuring(counted=True) as calls:
        await system.sweeper.sweep(system.now)
    check_bounded(calls)
    assert await system.redis.zcard(system.keys.holds) == 1_536
    await check_whole(system)


async def test_calls_are_bounded_for_many_releases_before_a_long_queue(system: MeasuredShard) -> None:
    limits = tuple(Limit(by, per, 100) for by in ("user", "card") for per in ("offer", "hour", "day", "week"))
    await with_queue(system, "o", 1_280, units=5, holds=256, limits=limits)
    with system.measuring(counted=True) as calls:
        answers = await system.decide([Release(id=f"r{n}", offer="o", grab=f"o-h{n}") for n in range(256)])
    check_bounded(calls)
    assert {answer.outcome for answer in answers} == {"released"}
    assert await system.redis.zcard(system.keys.holds) == 1_280


@pytest.mark.long
async def test_calls_are_bounded_when_many_offers_with_queues_close(system: MeasuredShard) -> None:
    for n in range(OFFERS_AT_ONCE_MAX):
        await with_queue(system, f"o{n}", 30)
    with system.measuring(counted=True) as calls:
        await system.decide([Close(id=f"c{n}", offer=f"o{n}") for n in range(OFFERS_AT_ONCE_MAX)])
        await system.sweeper.sweep(system.now)
    check_bounded(calls)
    for n in range(OFFERS_AT_ONCE_MAX):
        assert await system.redis.zcard(system.keys.offer_keys(f"o{n}")[7]) == 0
    await check_whole(system)


@pytest.mark.long
async def test_calls_are_bounded_for_many_offers_grabs_and_loads(system: MeasuredShard) -> None:
    """Hundreds of offers with eight limits, long lists of codes, grabs of 100 codes, large envelopes."""
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
    with system.measuring(counted=True) as calls:
        for commands in (opens, coupons, lists, drawn, grabs, with_codes):
            outcomes = {answer.outcome for answer in await system.decide(commands)}
            assert outcomes <= {"opened", "loaded", "granted"}, outcomes
    check_bounded(calls)
    await check_whole(system)


@pytest.mark.long
async def test_calls_of_hostile_histories_are_bounded(system: MeasuredShard) -> None:
    """Checks cost and time of every call, and the times in SLOWLOG, which include the time during which other
    processes kept the Redis thread from running.
    """
    await system.redis.config_set("slowlog-log-slower-than", 0)
    await system.redis.config_set("slowlog-max-len", 1_000_000)
    with system.measuring(counted=True) as calls:
        await play(system.redis, random.Random(3), 100)
    check_bounded(calls)
    shas = {changed(name, counted=True).sha: name for name in script_names()}
    slowest: dict[str, float] = {}
    for entry in await system.redis.slowlog_get(1_000_000):
        words = entry["command"].decode(errors="replace").split(" ", 2)
        if words[0] == "EVALSHA" and (name := shas.get(words[1])):
            slowest[name] = max(slowest.get(name, 0), entry["duration"] / 1_000)
    assert {"open", "grab", "apply"} <= slowest.keys()
    assert max(slowest.values()) < 10 * SLOWER * SLOWER, slowest


# -- no work waits for other work ----------------------------------------------------------------------------


@pytest.mark.long
async def test_a_hold_ends_before_offers_retire_and_answers_are_cleaned(system: MeasuredShard) -> None:
    """200 empty offers retire. Their campaign has another offer with many grabs, whose answers are in the
    same hash.
    """
    await system.decide([Open(id="live", offer="c:live", terms=CouponTerms(issuer="a", total=100_000))])
    for start in range(0, 20_000, 2_000):
        await system.decide(
            [Grab(id=f"g{n}", offer="c:live", user=f"u{n}") for n in range(start, start + 2_000)]
        )
    empty = StockTerms(issuer="i", total=1, retire_after_ms=1)
    await system.decide([Open(id=f"open-{n}", offer=f"c:{n}", terms=empty) for n in range(200)])
    await system.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=1, hold_ms=3_000))])
    await system.decide([Grab(id="held", offer="o", user="ann")])
    await system.decide([Close(id=f"close-{n}", offer=f"c:{n}") for n in range(200)])
    system.now += 3_000
    with system.measuring(counted=True) as calls:
        await system.sweeper.sweep(system.now)
        assert next(call.script for call in calls) == "expire"
        # One step per offer: the answers of the live offer add no calls, however many they are.
        assert len([call for call in calls if call.script == "sweep"]) <= 200 // OFFERS_AT_ONCE_MAX + 4
        assert await system.redis.scard(system.keys.retired) == 200
        # One pass reads each answer once.
        assert await system.sweeper.clean(system.now) < 2 * (20_000 + 400) / 500
    check_bounded(calls)
    assert await system.redis.hlen(system.keys.answers("c")) == 20_001


async def test_a_due_queue_is_served_before_all_due_offers_retire(system: MeasuredShard) -> None:
    """The second call serves the queue, whatever else is due."""
    many = 10 * OFFERS_AT_ONCE_MAX
    await system.decide(
        [
            Open(id=f"open-{n}", offer=f"x{n}", terms=StockTerms(issuer="i", total=1, retire_after_ms=1))
            for n in range(many)
        ]
    )
    await system.decide([Close(id=f"close-{n}", offer=f"x{n}") for n in range(many)])
    await with_queue(system, "o", 50)
    system.now += 10
    await system.decide([Amend(id="a", offer="o", changes=Changes(total=40))])
    for _ in range(2):
        await system.sweeper.close_due(system.now)
    assert await system.redis.scard(system.keys.retired) < many
    assert await system.redis.zcard(system.keys.holds) == 40


async def test_every_count_of_refusals_is_flushed(system: MeasuredShard) -> None:
    """36,000 fields, and new fields are added all the time."""
    fields = {f"1000:32:offer-{n}": 1 for n in range(36_000)}
    await system.redis.hset(system.keys.demand, mapping=fields)
    written: list[tuple[int, int, str, int]] = []

    async def record(shard: int, rows: Any) -> None:
        written.extend(rows)
        await system.redis.hset(system.keys.demand, f"{2**40}:32:now-{len(written)}", 1)

    sweeper = Sweeper(system.redis, system.keys, 1, 0, record)
    for _ in range(3 * 36_000 // 2_000):
        await sweeper.flush_demand()
    assert {offer for _, _, offer, _ in written} >= {f"offer-{n}" for n in range(36_000)}
    assert all(b":now-" in name for name in await system.redis.hkeys(system.keys.demand))


async def test_one_sweep_ends_more_holds_than_one_call_reads(system: MeasuredShard) -> None:
    await with_queue(system, "o", 0, holds=3 * HOLDS_AT_ONCE_MAX + 5)
    system.now += HOLD_MS + 1
    assert await system.sweeper.sweep(system.now) == 3 * HOLDS_AT_ONCE_MAX + 5
    assert await system.redis.zcard(system.keys.holds) == 0


async def test_slow_scripts_lists_the_longest_calls_of_its_system(system: MeasuredShard) -> None:
    """Calls in SLOWLOG of this system's scripts only, not of another system on the same server."""
    await system.redis.config_set("slowlog-log-slower-than", 0)
    await system.decide(
        [Open(id=f"open-{n}", offer=f"o{n}", terms=StockTerms(issuer="i", total=1)) for n in range(2)]
    )
    await system.decide([Open(id="again", offer="o9", terms=StockTerms(issuer="i", total=1))])
    [known] = [call for call in await slow_scripts(system.redis, "own") if call.script == "open"]
    assert known.calls >= 1
    assert known.longest_ms > 0
    assert await slow_scripts(system.redis, "ow") == []


async def test_script_calls_shows_the_longest_call_since_the_server_started(
    system: MeasuredShard,
) -> None:
    """Includes calls that SLOWLOG does not have."""
    await system.redis.config_set("slowlog-log-slower-than", -1)
    await system.redis.config_resetstat()
    assert await script_calls(system.redis) == []
    await system.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=1))])
    [short] = await script_calls(system.redis)
    busy = (
        "local at = redis.call('TIME') repeat local now = redis.call('TIME') until now[1] * 1e6 + now[2] "
        "> at[1] * 1e6 + at[2] + 30000"
    )
    await system.redis.evalsha(await system.redis.script_load(busy), 0)
    [long] = await script_calls(system.redis)
    assert (short.server, long.calls) == ("", short.calls + 1)
    assert long.longest_ms_at_most >= 30
    assert short.longest_ms_at_most <= long.longest_ms_at_most
