"""The requirements of envelopes (A, B and D of docs/requirements.md), on real Redis and through the real
worker.

A mark on each test names its requirements. Requirements about Kafka or PostgreSQL are in the last test, which
needs a worker.
"""

import asyncio
import itertools
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, get_args

import msgspec
import pytest
import redis
import redis.asyncio
from redis.crc import key_slot

from grabstream.connections.opening import open_gate
from grabstream.gate.calls import GateLimits, now_ms
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import Adjust, Amend, AnyCommand, Close, Grab, Open, Pause
from grabstream.models.entries import BookedEntry, Entry
from grabstream.models.offers import RETIRE_AFTER_MS, Changes, CouponTerms, Draw, EnvelopeTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.models.splitting import LAWS
from grabstream.models.transfers import Transfer, transfers_of
from grabstream.settings import Settings
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import some_by_tier, until
from tests.lua.histories.books import check_books
from tests.lua.histories.scene import DAY, HOUR, Scene, coupon
from tests.lua.histories.twins import packed
from tests.models.recompute import recompute
from tests.support.kcat import consume
from tests.support.runs import as_singles
from tests.support.shards import NOW, SEALER, event_lines, take_over

SEED = "5eed" * 16
DRAWS: tuple[Draw, ...] = get_args(Draw)


def envelope(total: int = 1_000, parts: int = 10, **rest: Any) -> EnvelopeTerms:
    return EnvelopeTerms(
        **{
            "issuer": "alice",
            "funding": "pay",
            "asset": "CNY",
            "seed": SEED,
            "total": total,
            "parts": parts,
            **rest,
        }
    )


def crowd(count: int, offer: str = "o", start: int = 0) -> list[Grab]:
    return [
        Grab(id=f"{offer}-g{number}", offer=offer, user=f"u{number}")
        for number in range(start, start + count)
    ]


def outcomes(answers: Iterable[Answer]) -> Counter[str]:
    return Counter(answer.outcome for answer in answers)


def amounts(answers: Iterable[Answer]) -> list[int]:
    return [answer.amount or 0 for answer in answers if answer.outcome == "granted"]


async def events_of(client: Any, keys: KeySpace, offer: str) -> list[dict[str, Any]]:
    """The events of an offer as plain JSON."""
    events = map(json.loads, await event_lines(client, keys, keys.shard_of_offer(offer)))
    return [event for event in events if event["offer"] == offer]


async def delete_all(client: Any, prefix: str) -> None:
    """Deletes all keys of a prefix."""
    for name in [name async for name in client.scan_iter(match=f"{prefix}:*", count=1_000)]:
        await client.unlink(name)


@pytest.fixture
async def make_checked_gate(
    make_gate: Callable[..., Gate], client: Any, keys: KeySpace
) -> AsyncIterator[Callable[..., Gate]]:
    """Makes gates; checks the books when the test has ended, and deletes all keys."""
    yield make_gate
    try:
        for number in range(keys.shards):
            check_books(await event_lines(client, keys, number))
    finally:
        await delete_all(client, keys.prefix)


# -- A: parts, users and Lua ---------------------------------------------------------------------------------

CALLERS, GRABS_A_CALL = 2_500, 41


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(("parts", "callers"), [(10, 3), (100_000, CALLERS)])
@pytest.mark.every_change("the largest envelope that is allowed")
async def test_an_envelope_of_100_thousand_parts_is_opened_drained_and_closed_like_a_small_one(
    make_gate: Callable[..., Gate], client: Any, keys: KeySpace, parts: int, callers: int
) -> None:
    """Both get the same assertions: many callers send 41 grabs each at once, some of them too late."""
    gate = make_gate(timeout_ms=60_000, queue_commands_max=200_000)
    total = parts * 100 + 7
    [opened] = await gate.decide([Open(id="open", offer="o", terms=envelope(total, parts))], "decided")
    assert (opened.outcome, opened.amount, opened.left) == ("opened", total, parts)
    calls = [crowd(GRABS_A_CALL, start=number * GRABS_A_CALL) for number in range(callers)]
    answers = [
        answer
        for of_call in await asyncio.gather(*(gate.decide(call, "decided") for call in calls))
        for answer in of_call
    ]
    assert outcomes(answers) == {"granted": parts, "sold_out": callers * GRABS_A_CALL - parts}
    assert sum(amounts(answers)) == total
    assert sorted(answer.place or 0 for answer in answers if answer.outcome == "granted") == list(
        range(1, parts + 1)
    )
    events = await events_of(client, keys, "o")
    assert [event["type"] for event in events] == ["offer.opened", *["grab.granted"] * parts, "offer.closed"]
    assert [event["offer_seq"] for event in events] == list(range(1, parts + 3))
    assert (events[-1]["reason"], events[-1]["amount"], events[-1]["left"]) == ("drained", 0, 0)
    by_user = {event["user"]: event["amount"] for event in events[1:-1]}
    assert (len(by_user), list(by_user.values())) == (parts, recompute(events[0], events[-1]))
    # The close deletes the list of parts; the hash of users who have one stays.
    _, users, listed, *_ = keys.shard(keys.shard_of_offer("o")).offer_keys("o")
    assert (await client.exists(listed), await client.hlen(users)) == (0, parts)
    await delete_all(client, keys.prefix)


@pytest.mark.requirement("A2")
async def test_an_envelope_is_split_into_parts_in_advance(scene: Scene) -> None:
    """With `ahead` the shuffled parts are in Redis at the opening; with `at_grab` there is no list. Both give
    the parts that anyone can compute from seed and terms.
    """
    drawn = {}
    for draw in DRAWS:
        await scene.open(envelope(100_000, 50, draw=draw), draw)
        *_, opened = await scene.events("offer.opened")
        drawn[draw] = recompute(json.loads(msgspec.json.encode(opened)), {"seed": SEED})
        _, _, listed, *_ = scene.keys.shard(scene.keys.shard_of_offer(draw)).offer_keys(draw)
        assert await scene.client.get(listed) == (packed(drawn[draw]) if draw == "ahead" else None)
        assert amounts(await scene.decide_both(crowd(50, draw))) == drawn[draw]
        [closed] = await scene.events("offer.closed", offer=draw)
        assert sha256(bytes.fromhex(closed.seed)).hexdigest() == opened.seed_sha256
    assert drawn["ahead"] != drawn["at_grab"]
    assert sorted(drawn["ahead"]) == sorted(drawn["at_grab"])


@pytest.mark.requirement("A3")
async def test_keys_of_an_offer_are_in_the_slot_of_its_shard_and_the_outbox_has_every_grant(
    scene: Scene,
) -> None:
    keys = scene.keys
    await scene.open(envelope(), "e")
    await scene.open(coupon(10), "c")
    taken = [answer for offer in "ec" for answer in await scene.decide_both(crowd(4, offer))]
    _, users, untaken, *_ = keys.shard(keys.shard_of_offer("e")).offer_keys("e")
    _, _, _, grabs, *_ = keys.shard(keys.shard_of_offer("c")).offer_keys("c")
    assert await scene.client.strlen(untaken) == 10 * 6
    assert {name.decode() for name in await scene.client.hkeys(users)} == {
        f"u{number}" for number in range(4)
    }
    assert {name.decode() for name in await scene.client.hkeys(grabs)} == {
        f"c-g{number}" for number in range(4)
    }
    granted = await scene.events("grab.granted")
    assert {(event.offer, event.user, event.amount) for event in granted} == {
        (answer.offer, f"u{number % 4}", answer.amount) for number, answer in enumerate(taken)
    }
    for offer in "ec":
        shard = keys.shard(keys.shard_of_offer(offer))
        names = [name for name in await scene.names() if name.startswith(shard.tag + ":")]
        assert {shard.outbox, shard.offer(offer)} <= set(names)
        assert {key_slot(name.encode()) for name in names} == {key_slot(shard.outbox.encode())}


@pytest.mark.requirement("A4")
async def test_one_script_call_checks_takes_and_records_many_grabs(private_redis: Any) -> None:
    """One call of one script decides hundreds of grabs, some by users with a part, some repeated; their
    repeats are one call too.
    """
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    await gate.decide([Open(id="open", offer="o", terms=envelope(50_000, 180)), *crowd(20)], "decided")
    again = [Grab(id=f"again{number}", offer="o", user=f"u{number}") for number in range(20)]
    grabs = [*crowd(140), *again, *crowd(60, start=140)]
    expected = {"granted": 180, "already_taken": 20, "sold_out": 20}
    for repeated in (20, 220):
        await client.config_resetstat()
        answers = await gate.decide(grabs, "decided")
        stats = await client.info("commandstats")
        assert (stats["cmdstat_fcall"]["calls"], "cmdstat_eval" in stats) == (1, False)
        assert outcomes(answers) == expected
        assert sum(answer.repeated for answer in answers) == repeated
    lines = await event_lines(client, keys, 0)
    assert outcomes(answers)["granted"] == sum(b'"grab.granted"' in line for line in lines)
    check_books(lines)
    await gate.close()


@pytest.mark.requirement("A6")
@pytest.mark.parametrize("opens_in", [0, HOUR])
@pytest.mark.parametrize("open_for", [None, 5_000])
async def test_the_sweeper_refunds_what_is_left_to_the_issuer(
    scene: Scene, open_for: int | None, opens_in: int
) -> None:
    opens = NOW + opens_in
    terms = envelope(opens_at=opens if opens_in else None, closes_at=opens + open_for if open_for else None)
    await scene.open(terms)
    scene.now = opens
    taken = [(await scene.grab(user)).amount or 0 for user in ("ann", "bob")]
    end = opens + (open_for or 24 * HOUR)
    scene.now = end - 1
    await scene.sweep_both()
    assert await scene.events("offer.closed") == []
    taken.append((await scene.grab("eve")).amount or 0)
    scene.now = end
    assert (await scene.grab("joe")).outcome == "over"  # also before the sweep
    await scene.sweep_both()
    await scene.sweep_both()
    [closed] = await scene.events("offer.closed")
    assert (closed.at, closed.reason, closed.command, closed.left) == (end, "deadline", "sweep", 7)
    assert transfers_of(closed) == (Transfer("CNY", "offer:o", "wallet:alice", 1_000 - sum(taken)),)


@pytest.mark.requirement("A7")
async def test_an_operator_can_adjust_the_ledger(scene: Scene) -> None:
    await scene.open(envelope())
    await scene.grab("ann")
    about: dict[str, Any] = {"operator": "olga", "reason": 'paid twice, see "7"', "approved_by": "boss"}
    entries = (
        Entry("CNY", "external:bank", "wallet:ann", 5),
        Entry("CNY", "receivable:bob", "external:bank", 3),
    )
    for _ in range(2):  # also after the close
        assert (await scene.do(Adjust, transfers=entries, **about)).outcome == "adjusted"
        await scene.do(Close)
    first, _ = await scene.events("ledger.adjusted")
    booked = tuple(BookedEntry(*msgspec.structs.astuple(entry)) for entry in entries)
    assert (first.operator, first.reason, first.approved_by, first.transfers) == (
        "olga",
        'paid twice, see "7"',
        "boss",
        booked,
    )
    assert transfers_of(first) == tuple(Transfer(*msgspec.structs.astuple(entry)) for entry in entries)
    refused = [
        *({"transfers": (Entry("CNY", debit, "external:bank", 1),)} for debit in ("wallet:ann", "offer:o",
        "hold:ann", "redeemed:o")),
        *({"transfers": (Entry("CNY", "external:bank", credit, 1),)} for credit in ("offer:o", "hold:ann",
        "external:bank", "ann")),
        {"transfers": (Entry("CNY", "external:bank", "wallet:ann", 0),)}, {"transfers": ()}, {"reason": ""},
        {"approved_by": ""},
    ]  # fmt: skip
    for fields in refused:
        command = Adjust(**{"id": scene.id(), "offer": "o", "transfers": entries, **about, **fields})
        [answer] = await scene.gate.decide([command], "decided")
        assert (answer.outcome, next(iter(fields)) in (answer.message or "")) == ("invalid", True), fields


@pytest.mark.requirement("A8", "E12")
async def test_20_threads_grab_every_part_exactly_once(servers: Settings, prefix: str) -> None:
    """As many threads as in the article, each with its own event loop, connection and gate. `make bench`
    measures the speed.
    """
    keys = KeySpace(prefix, 3)
    client = redis.asyncio.Redis.from_url(servers.redis_url)

    def thread(number: int) -> list[Answer]:
        async def grab() -> list[Answer]:
            client_of_thread = redis.asyncio.Redis.from_url(servers.redis_url)
            gate = Gate(client_of_thread, keys, SEALER, GateLimits(timeout_ms=30_000))
            try:
                return [
                    answer
                    for start in range(0, 200, 8)
                    for answer in await gate.decide(grabs_of_threads[number][start : start + 8], "decided")
                ]
            finally:
                await gate.close()
                await client_of_thread.aclose()

        return asyncio.run(grab())

    # Every user sends grabs in two threads, under two ids.
    grabs_of_threads = [
        [Grab(id=f"t{number}-{n}", offer="o", user=f"u{number // 2}-{n}") for n in range(200)]
        for number in range(20)
    ]
    try:
        await take_over(client, keys)
        gate = Gate(client, keys, SEALER)
        await gate.decide([Open(id="open", offer="o", terms=envelope(100_000, 1_500))], "decided")
        with ThreadPoolExecutor(20) as pool:
            running = [
                asyncio.get_running_loop().run_in_executor(pool, thread, number) for number in range(20)
            ]
            answers = [answer for of_thread in await asyncio.gather(*running) for answer in of_thread]
        counts = outcomes(answers)
        assert (counts["granted"], sum(amounts(answers)), len(answers)) == (1_500, 100_000, 4_000)
        # Every answer is final: none is `busy` or another outcome to be tried again.
        assert counts.keys() <= {"granted", "already_taken", "sold_out"}
        granted = [event for event in await events_of(client, keys, "o") if event["type"] == "grab.granted"]
        granted_amounts = {(event["user"], event["amount"]) for event in granted}
        assert len({user for user, _ in granted_amounts}) == len(granted) == 1_500
        user_of = {grab.id: grab.user for grabs in grabs_of_threads for grab in grabs}
        assert {
            (user_of[answer.id], answer.amount) for answer in answers if answer.outcome != "sold_out"
        } == granted_amounts
        await gate.close()
    finally:
        await delete_all(client, prefix)
        await client.aclose()


@pytest.mark.requirement("A9")
async def test_envelopes_in_many_shards_are_grabbed_by_one_list(scene: Scene) -> None:
    """Envelopes of twelve campaigns are in three slots. A list of grabs for all is answered in its order."""
    offers = [f"week{number}:{name}" for number in range(12) for name in "ab"]
    for offer in offers:
        await scene.open(envelope(300, 3), offer)
    grabs = [
        Grab(id=f"{offer}-g{number}", offer=offer, user=f"u{number}")
        for number in range(4)
        for offer in offers
    ]
    answers = await scene.decide_both(grabs)
    assert [answer.id for answer in answers] == [grab.id for grab in grabs]
    assert outcomes(answers[:72]) == {"granted": 72}
    assert outcomes(answers[72:]) == {"sold_out": 24}
    assert {offer: answer.shard for offer, answer in zip(offers, answers, strict=False)} == {
        offer: scene.keys.shard_of_offer(offer) for offer in offers
    }
    names = await scene.names()
    slots = {
        offer: {key_slot(name.encode()) for name in names if f":offer:{offer}" in name} for offer in offers
    }
    assert {len(slots_of_one) for slots_of_one in slots.values()} == {1}
    assert all(slots[f"week{number}:a"] == slots[f"week{number}:b"] for number in range(12))
    assert len(set.union(*slots.values())) == scene.keys.shards


# -- B: sending and receiving --------------------------------------------------------------------------------


def legal(chance: random.Random, law: Any, number: int) -> EnvelopeTerms:
    """Random valid terms; one time in three the total is the least or the greatest that is possible."""
    parts, least = chance.randint(1, 30), chance.randint(1, 10 ** chance.randint(0, 8))
    most = (
        chance.randint(least, least * chance.randint(1, 20))
        if law == "bounded" and chance.random() < 0.8
        else None
    )
    lowest, highest = parts * least, parts * (most or least * 20)
    total = {0: lowest, 1: highest}.get(chance.randrange(6), chance.randint(lowest, highest))
    return envelope(total, parts, min=least, max=most, law=law, seed=f"{number:032x}")


@pytest.mark.requirement("B1")
@pytest.mark.parametrize("drawn", some_by_tier(itertools.product(LAWS, DRAWS), 1))
async def test_random_amounts_keep_minimum_maximum_and_the_exact_sum(
    scene: Scene, drawn: tuple[Any, Draw]
) -> None:
    law, draw = drawn
    chance = random.Random(f"{law} {draw}")
    for number in range(40):
        terms = msgspec.structs.replace(legal(chance, law, number), draw=draw)
        await scene.open(terms, f"o{number}")
        *answers, late = await scene.decide_both(crowd(terms.parts + 1, f"o{number}"))
        drawn, most = amounts(answers), terms.max or terms.total
        assert (len(drawn), sum(drawn), late.outcome) == (terms.parts, terms.total, "sold_out")
        assert terms.min <= min(drawn)
        assert max(drawn) <= most
        assert law != "equal" or max(drawn) - min(drawn) <= 1
        for index in range(terms.parts):
            # Later users can still get parts within the bounds.
            assert (terms.parts - index) * terms.min <= sum(drawn[index:]) <= (terms.parts - index) * most


@pytest.mark.requirement("B2")
@pytest.mark.parametrize("draw", DRAWS)
async def test_amounts_are_computed_when_sending_or_when_grabbing(
    make_checked_gate: Callable[..., Gate], client: Any, keys: KeySpace, draw: Draw
) -> None:
    """Without a seed in the terms the gate draws a seed and publishes its hash. The seed is secret until the
    close; after that anyone can compute every part.
    """
    gate, seeds = make_checked_gate(), set()
    for law in LAWS:
        terms = envelope(5_000, 20, law=law, draw=draw, seed=None)
        [opened, *answers] = await gate.decide(
            [Open(id=f"open-{law}", offer=law, terms=terms), *crowd(8, law)], "decided"
        )
        before = await events_of(client, keys, law)
        _, _, listed, *_ = keys.shard(keys.shard_of_offer(law)).offer_keys(law)
        assert await client.strlen(listed) == (20 * 6 if draw == "ahead" else 0)
        await gate.decide([Close(id=f"close-{law}", offer=law)], "decided")
        event, *_, closed = await events_of(client, keys, law)
        assert event["seed_sha256"] == sha256(bytes.fromhex(closed["seed"])).hexdigest()
        assert closed["seed"] not in json.dumps(before)
        computed = recompute(event, closed)
        assert computed[:8] == amounts(answers)
        assert (len(computed), sum(computed), closed["amount"]) == (20, opened.amount, sum(computed[8:]))
        seeds.add(closed["seed"])
    assert len(seeds) == len(LAWS)


@pytest.mark.requirement("B4")
async def test_no_keys_are_locks_and_overload_is_busy_with_a_retry_time(
    make_checked_gate: Callable[..., Gate], client: Any, keys: KeySpace
) -> None:
    gate = make_checked_gate()
    await gate.decide([Open(id="open", offer="o", terms=envelope(10_000, 100))], "decided")
    # Fifty gates at once, each with its own connection: no grab is busy, and no key has an expiry as a lock
    # would.
    answered = await asyncio.gather(
        *(make_checked_gate().decide([grab], "decided", timeout_ms=60_000) for grab in crowd(50))
    )
    assert outcomes(answer for [answer] in answered) == {"granted": 50}
    names = [name async for name in client.scan_iter(match=f"{keys.prefix}:*", count=1_000)]
    assert {await client.ttl(name) for name in names} == {-1}
    # Too many commands for the queue of a gate or for the outbox are not decided, and get a time to retry.
    before = await events_of(client, keys, "o")
    for limits in ({"queue_commands_max": 5}, {"outbox_events_max": 50}):
        sent_at, late = now_ms(), crowd(6, start=50)
        answers = await make_checked_gate(**limits).decide(late, "decided")
        assert {
            (answer.outcome, answer.code, answer.decided, bool(answer.message)) for answer in answers
        } == {("busy", 22, False, True)}
        assert all(sent_at < (answer.retry_at or 0) < sent_at + 60_000 for answer in answers)
        assert await events_of(client, keys, "o") == before
    assert outcomes(await gate.decide(late, "decided")) == {"granted": 6}


@pytest.mark.requirement("B5")
@pytest.mark.parametrize("draw", DRAWS)
async def test_a_refused_write_takes_no_part_and_an_expired_hold_is_released(
    scene: Scene, draw: Draw
) -> None:
    await scene.open(envelope(1_000, 3, draw=draw))
    await scene.grab("ann")
    drain: list[AnyCommand] = crowd(3)  # the last part with its close, and a grab that is too late
    async with scene.refusing_writes():
        before = await scene.everything()
        refused = await scene.gate.decide(drain, "decided")
        assert [(answer.outcome, "WRONGTYPE" in (answer.message or "")) for answer in refused] == [
            ("busy", True)
        ] * 3
        assert await scene.everything() == before
    answers = await scene.decide_both(drain)
    assert [(answer.outcome, answer.place, answer.repeated) for answer in answers] == [
        ("granted", 2, False), ("granted", 3, False), ("sold_out", None, False),
    ]  # fmt: skip
    # A hold ends at its deadline, by an event.
    await scene.open(coupon(1, hold_ms=HOUR), "c")
    held = await scene.grab("ann")
    assert await scene.outcomes("bob") == ["sold_out"]
    scene.now += HOUR
    await scene.sweep_both()
    [released] = await scene.events("grab.released")
    assert (released.grab, released.reason, released.left) == (held.grab, "expired", 1)
    assert transfers_of(released) == (Transfer("coupon:c", "hold:ann", "offer:c", 1),)
    assert await scene.outcomes("bob") == ["held"]


@pytest.mark.requirement("B6")
@pytest.mark.parametrize("end", ["drained", "command", "deadline", "paused"])
async def test_already_taken_takes_precedence_over_sold_out_and_over(scene: Scene, end: str) -> None:
    """A user with a part gets its amount again, a user without a part the reason; numbers are stable."""
    await scene.open(envelope(1_000, 2, opens_at=NOW + 9))
    early = await scene.grab("ann")
    assert (early.outcome, early.code, early.retry_at) == ("not_open_yet", 27, NOW + 9)
    scene.now = NOW + 9
    first = await scene.grab("ann")
    assert (first.outcome, first.code, first.left) == ("granted", 0, 1)
    if end == "drained":
        assert (await scene.grab("bob")).left == 0
    elif end == "deadline":
        scene.now += DAY
    else:
        await scene.do(Close if end == "command" else Pause)
    for swept in range(2):
        again, late = await scene.grab("ann"), await scene.grab(f"eve{swept}")
        assert (again.outcome, again.code, again.amount, again.place) == (
            "already_taken",
            26,
            first.amount,
            1,
        )
        expected = {"drained": ("sold_out", 32), "paused": ("on_hold", 28)}.get(end, ("over", 29))
        assert (late.outcome, late.code, late.amount) == (*expected, None)
        await scene.sweep_both()


# -- D: double mean and idempotent grabs ---------------------------------------------------------------------


@pytest.mark.requirement("D1")
@pytest.mark.parametrize("split", some_by_tier([(20, 10), (1_000, 10), (17, 5)], 1))
async def test_parts_of_double_mean_are_from_1_to_twice_the_mean_of_the_rest(
    scene: Scene, split: tuple[int, int]
) -> None:
    """Each part is from 1 to twice the mean of what remains, and parts near both ends are drawn."""
    total, parts = split
    firsts = []
    for number in range(100):
        await scene.open(
            envelope(total, parts, law="double_mean", draw="at_grab", seed=f"{number:032x}"), f"o{number}"
        )
        drawn, left = amounts(await scene.decide_both(crowd(parts, f"o{number}"))), total
        for index, amount in enumerate(drawn):
            assert 1 <= amount <= 2 * left / (parts - index)
            left -= amount
        assert left == 0
        firsts.append(drawn[0])
    mean = total / parts
    assert min(firsts) <= 1 + 0.05 * mean
    assert max(firsts) >= 2 * mean - 1 - 0.05 * mean
    assert abs(sum(firsts) / 100 - mean) < 0.2 * mean


@pytest.mark.requirement("D2")
async def test_ids_of_envelopes_and_grabs_are_unique_and_answers_count_the_parts_left(scene: Scene) -> None:
    opening = Open(id="open", offer="o", terms=envelope(1_000, 5))
    other = envelope(1_001, 5)
    [first] = await scene.decide_both([opening])
    assert (first.outcome, first.left) == ("opened", 5)
    assert await scene.decide_both([opening]) == [msgspec.structs.replace(first, repeated=True)]
    conflicting = [
        Open(id="open", offer="o", terms=other),  # the same id with another body
        Open(id="open-2", offer="o", terms=other),  # another envelope under the same id
        Open(id="open-3", offer="o", terms=opening.terms),
    ]
    assert outcomes(await scene.decide_both(conflicting)) == {"conflict": 3}
    [granted] = await scene.decide_both([Grab(id="g", offer="o", user="ann")])
    [answer] = await scene.decide_both([Grab(id="g", offer="o", user="ann", attributes={"card": "7"})])
    assert (answer.outcome, answer.code, answer.amount) == ("conflict", 23, None)
    # The id of a grab belongs to its user: no other user can use it up.
    [of_bob] = await scene.decide_both([Grab(id="g", offer="o", user="bob")])
    assert (of_bob.outcome, of_bob.place, of_bob.repeated) == ("granted", 2, False)
    assert await scene.decide_both([Grab(id="g", offer="o", user="bob")]) == [
        msgspec.structs.replace(of_bob, repeated=True)
    ]
    assert await scene.decide_both([Grab(id="g", offer="o", user="ann")]) == [
        msgspec.structs.replace(granted, repeated=True)
    ]
    _, _, listed, *_ = scene.keys.shard(scene.keys.shard_of_offer("o")).offer_keys("o")
    for left in (2, 1):
        answer = await scene.grab(f"u{left}")
        assert (answer.left, (await scene.do(Amend, changes=Changes(title=f"{left}"))).left) == (left, left)
        assert await scene.client.strlen(listed) == 5 * 6
    assert sorted(event.amount for event in await scene.events("grab.granted", place=1)) == [granted.amount]
    # The id of a retired envelope is not free.
    await scene.do(Close)
    scene.now += RETIRE_AFTER_MS
    await scene.sweep_both()
    assert len(await scene.events("offer.retired")) == 1
    assert (await scene.do(Open, terms=envelope())).outcome == "conflict"


@pytest.mark.requirement("D4")
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("end", ["drained", "command", "deadline"])
async def test_a_user_with_a_part_gets_its_amount_again_even_after_the_close(
    scene: Scene, draw: Draw, end: str
) -> None:
    grabs = crowd(4)
    await scene.open(envelope(1_000, 4, draw=draw))
    granted = await scene.decide_both(grabs[:3])

    async def check_repeats() -> None:
        """Checks that the same ids get the same answers, and new ids the same parts, also from a new gate."""
        new, old = (
            Gate(scene.client, scene.keys, SEALER, GateLimits(timeout_ms=30_000), clock=lambda: scene.now),
            scene.gate,
        )
        for gate in (old, new):
            scene.gate = gate
            assert await scene.decide_both(grabs[:3]) == [
                msgspec.structs.replace(answer, repeated=True) for answer in granted
            ]
            answers = await scene.decide_both(
                [Grab(id=scene.id(), offer="o", user=grab.user) for grab in grabs[:3]]
            )
            assert [(answer.outcome, answer.amount, answer.place, answer.seq) for answer in answers] == [
                ("already_taken", answer.amount, answer.place, answer.seq) for answer in granted
            ]
        scene.gate = old
        await new.close()

    await check_repeats()
    if end == "drained":
        await scene.decide_both(grabs[3:])
    elif end == "command":
        await scene.do(Close)
    else:
        scene.now += DAY
        await scene.sweep_both()
    assert len(await scene.events("offer.closed", reason=end)) == 1
    await check_repeats()
    assert await scene.outcomes("late") == ["sold_out" if end == "drained" else "over"]


@pytest.mark.requirement("D5")
@pytest.mark.parametrize("draw", DRAWS)
async def test_a_burst_of_the_same_request_gets_one_part(
    make_checked_gate: Callable[..., Gate], client: Any, keys: KeySpace, draw: Draw
) -> None:
    """150 gates with 150 connections send the same request at once; then each sends a request of one user
    under another id.
    """
    first, *others = [make_checked_gate(timeout_ms=30_000) for _ in range(150)]
    await first.decide([Open(id="open", offer="o", terms=envelope(10_000, 100, draw=draw))], "decided")
    for user, ids, refusal in (
        ("ann", ["same"] * 150, "granted"),
        ("bob", [f"b{n}" for n in range(150)], "already_taken"),
    ):
        grabs = [Grab(id=id, offer="o", user=user) for id in ids]
        answered = await asyncio.gather(
            *(
                gate.decide([grab], "decided", patience_ms=60_000)
                for gate, grab in zip([first, *others], grabs, strict=True)
            )
        )
        answers = [answer for [answer] in answered]
        granted = [event for event in await events_of(client, keys, "o") if event.get("user") == user]
        assert [event["type"] for event in granted] == ["grab.granted"]
        assert {(answer.amount, answer.place, answer.seq) for answer in answers} == {
            (event["amount"], event["place"], event["seq"]) for event in granted
        }
        new = [answer for answer in answers if answer.outcome == "granted" and not answer.repeated]
        assert (len(new), outcomes(answers)[refusal]) == (1, 150 if refusal == "granted" else 149)


# -- A, B and D: journal, read models and published events ---------------------------------------------------

PARTS, LEFT = 300, 5


@pytest.mark.requirement("A5", "B3", "B7", "D3")
@pytest.mark.every_change("the whole way of a grab")
async def test_grabs_reach_the_journal_the_books_and_the_published_events_once(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """Relay → journal → agents → PostgreSQL, and `grab.events`. Then the worker is killed, and another worker
    repeats nothing.
    """
    topics, total = Topics(system.prefix), 123_456
    first = worker(system)
    end = now_ms() + 60_000
    opening = [
        Open(id="open", offer="o", terms=envelope(total, PARTS + LEFT, seed=None)),
        Open(id="open-2", offer="back", terms=envelope(700, 7, seed=None, closes_at=end)),
    ]
    async with open_gate(system) as gate, await open_books(system) as books:
        assert outcomes(await gate.decide(opening, patience_ms=60_000)) == {"opened": 2}
        grabs = crowd(PARTS)
        # A: no answer before Kafka has the event. The command was decided once, and its repeat says so.
        first.signal(signal.SIGSTOP)
        with pytest.raises(OutcomeUnknown, match="decided, but not journaled"):
            await gate.decide(grabs[:1], timeout_ms=2_000)
        first.signal(signal.SIGCONT)
        answers = await gate.decide(grabs, patience_ms=20_000, timeout_ms=20_000)
        assert [answer.repeated for answer in answers] == [True] + [False] * (PARTS - 1)
        assert outcomes(answers) == {"granted": PARTS}

        # All answered grants are in the journal now, hundreds of them in one record.
        records = [
            lines.splitlines()
            for lines in "\n".join(consume(system, topics.journal, "%s\n\nRECORD\n")).split("RECORD")
        ]
        blocks = [
            [json.loads(line) for line in as_singles(line.encode() for line in lines if line)]
            for lines in records
        ]
        granted = {(answer.grab, answer.amount, answer.seq) for answer in answers}
        assert {
            (event["grab"], event["amount"], event["seq"])
            for block in blocks
            for event in block
            if event["type"] == "grab.granted"
        } == granted
        assert max(map(len, blocks)) > PARTS / 2

        await gate.decide([Close(id="close", offer="o")], patience_ms=20_000)
        entry = Entry("CNY", "external:bank", "wallet:u7", 11)
        adjust = Adjust(
            id="mend",
            offer="o",
            transfers=(entry,),
            reason="a cent short",
            approved_by="boss",
            operator="olga",
        )
        amend = Amend(id="soon", offer="back", changes=Changes(closes_at=now_ms() + 1_500))
        assert [answer.outcome for answer in await gate.decide([adjust, amend], patience_ms=20_000)] == [
            "adjusted",
            "amended",
        ]

        async def rows(query: str) -> list[Any]:
            return await (await books.execute(query.encode())).fetchall()

        async def booked() -> bool:
            states = await rows("SELECT state FROM offers")
            seqs = await rows(
                "SELECT min(seq), max(seq) FROM (SELECT projection, sum(seq) AS seq FROM cursors GROUP BY 1) "
                "AS read"
            )
            return states == [("closed",)] * 2 and seqs == [(PARTS + 6,) * 2]

        await until(booked, 60, "the books")

        # B, D: issuers, grabs, transfers and balances; the issuers have what was not taken.
        by_user = {grab.user: answer.amount or 0 for grab, answer in zip(grabs, answers, strict=True)}
        given = sum(by_user.values())
        offers = await rows(
            "SELECT offer, issuer, total, grabs, given, refunded, reason FROM offers ORDER BY offer"
        )
        assert offers == [
            ("back", "alice", 700, 0, 0, 700, "deadline"),
            ("o", "alice", total, PARTS, given, total - given, "command"),
        ]
        assert {
            (grab, amount, seq) for grab, amount, seq in await rows("SELECT grab, amount, seq FROM grabs")
        } == granted
        assert dict(
            await rows(
                "SELECT credit, amount FROM transfers WHERE debit = 'offer:o' AND credit <> 'wallet:alice'"
            )
        ) == {f"wallet:{user}": amount for user, amount in by_user.items()}
        by_user["u7"] += entry.amount
        assert dict(await rows("SELECT user_id, available FROM balances")) == {
            **by_user,
            "alice": total - given + 700,
        }
        assert await rows("SELECT sum(posted)::int FROM accounts") == [(0,)]
        [[mended]] = await rows("SELECT body FROM audit WHERE type = 'ledger.adjusted'")
        assert [json.loads(mended)[name] for name in ("operator", "reason", "approved_by")] == [
            "olga",
            "a cent short",
            "boss",
        ]
        # A: few transactions wrote the events.
        [[written, transactions]] = await rows(
            f"SELECT sum(seqs), count(DISTINCT xmin::text) FROM {system.schema_}_audit_1.audit_1"
        )
        assert (written, transactions < PARTS / 10) == (PARTS + 6, True)

        async def published(count: int) -> Any:
            ids = [
                line.partition("ce_id=")[2].partition(",")[0]
                for line in consume(system, topics.events, "%h\n")
            ]
            return ids if len(ids) >= count else None

        events = await until(lambda: published(PARTS + 6), 60, "the published events")

        # D: after a restart too, repeats get the same answers, and nothing is published twice.
        first.kill()
        worker(system)
        repeats = await gate.decide(grabs, patience_ms=60_000, timeout_ms=60_000)
        assert repeats == [msgspec.structs.replace(answer, repeated=True) for answer in answers]
        last = await gate.decide(
            [Open(id="open-3", offer="more", terms=CouponTerms(issuer="shop", total=1))], patience_ms=60_000
        )
        assert outcomes(last) == {"opened": 1}
        more = await until(lambda: published(PARTS + 7), 60, "the last event")
        assert Counter(more) == Counter([*events, f"{last[0].shard}-{last[0].seq}"])
        assert max(Counter(more).values()) == 1
        assert await rows("SELECT count(*) FROM grabs") == [(PARTS,)]
