"""Key layouts: a shard of an older one is rebuilt when an operator raises it, under traffic. Layout 2 writes
single events, later ones write runs; from layout 4 on, the ids of grabs belong to their users; from layout 5
on, the counters of a user are one field.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from grabstream.lua.keys import LAYOUT, LAYOUT_MIN, KeySpace
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open
from grabstream.models.offers import EnvelopeTerms, Limit, StockTerms
from grabstream.models.runs import is_run
from grabstream.ops.connections.opening import key_space, open_gate, open_redis, sealer
from grabstream.ops.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.relaying.ownership import SteppedDown
from grabstream.streams.relaying.shadow import SHADOW, NotComparable, Pace, open_shadow
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.streams.state import assert_state_is_the_journal_s, journal_lines
from tests.support.command_line import env_of, grabstream

ASKED: dict[str, Any] = {"patience_ms": 20_000, "timeout_ms": 20_000}
#: The key layout since which the ids of grabs belong to their users.
OWN_IDS = 4
#: Lists of grabs that are sent while the layout is raised, and the grabs of each.
LISTS, GRABS = 40, 5


def openings() -> list[AnyCommand]:
    money = EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=100_000, parts=1_000)
    limits = (Limit("user", "offer", 2), Limit("user", "day", 2, scope="campaign"))
    held = StockTerms(issuer="i", total=1_000, hold_ms=3_600_000, price=5, currency="CNY", limits=limits)
    return [Open(id="open-e", offer="e", terms=money), Open(id="open-s", offer="s", terms=held)]


def crowd(offer: str, number: int) -> list[AnyCommand]:
    return [Grab(id=f"{offer}-{number}.{n}", offer=offer, user=f"{number}.{n}") for n in range(GRABS)]


@pytest.mark.long
@pytest.mark.parametrize(
    "old",
    # By day, the oldest one and the last one.
    [
        pytest.param(old, marks=[pytest.mark.nightly] if LAYOUT_MIN < old < LAYOUT - 1 else [])
        for old in range(LAYOUT_MIN, LAYOUT)
    ],
)
async def test_the_layout_is_raised_under_traffic(
    system: Settings, worker: Callable[..., Any], old: int
) -> None:
    redis, keys = open_redis(system), key_space(system)

    async def are_raised() -> bool:
        states = [keys.shard(number).state for number in range(system.shards)]
        layouts = [await redis.hmget(state, "layout", "partial") for state in states]
        return layouts == [[str(LAYOUT).encode(), None]] * system.shards

    try:
        for number in range(system.shards):
            await redis.hset(keys.shard(number).state, "layout", old)
        worker(system)
        async with open_gate(system) as gate:
            assert [one.outcome for one in await gate.decide(openings(), **ASKED)] == ["opened"] * 2
            await _grant(gate, 0)
            shards = sorted({keys.shard_of_offer(offer) for offer in "es"})
            before = {shard: await journal_lines(system, shard) for shard in shards}
            assert any(is_run(line) for lines in before.values() for line in lines) is (old > LAYOUT_MIN)
            assert await _init(system) == (list(range(system.shards)), [])
            [first] = await gate.decide(crowd("e", 0)[:1], **ASKED)
            [other] = await gate.decide([_of_mallory("e")], **ASKED)
            assert (first.repeated, other.outcome) == (True, "conflict" if old < OWN_IDS else "granted")
            granting = asyncio.create_task(_grant_many(gate))
            assert await _init(system, "--raise-layout") == ([], list(range(system.shards)))
            await granting
            await until(are_raised, 30, "shards of the newest layout")
            await _grant(gate, LISTS + 1)
            # Answers from before the raise are given again; the id belongs to its user now.
            assert await gate.decide(crowd("e", 0)[:1], **ASKED) == [first]
            answers = await gate.decide([_of_mallory("e"), _of_mallory("s")], **ASKED)
            assert [answer.outcome for answer in answers] == ["granted", "conflict"]
            # Units that were counted before the raise still count.
            more = [Grab(id=f"more{number}", offer="s", user="0.0") for number in range(2)]
            answers = await gate.decide(more, **ASKED)
            assert [answer.outcome for answer in answers] == ["held", "limit_reached"]
        for shard in shards:
            lines = await journal_lines(system, shard)
            assert lines[: len(before[shard])] == before[shard]
            assert is_run(lines[-1])
        assert await _init(system, "--raise-layout") == ([], [])
        await assert_state_is_the_journal_s(system)
        verified = await asyncio.to_thread(grabstream, "verify", **env_of(system))
        assert verified.returncode == 0, verified.stdout + verified.stderr
    finally:
        await redis.aclose()


def _of_mallory(offer: str) -> Grab:
    """A grab of another user with the id of the first one."""
    return Grab(id=f"{offer}-0.0", offer=offer, user="mallory")


async def _grant(gate: Any, number: int) -> None:
    """Grabs of both offers, of which all are granted or held at once, and journaled."""
    for offer, outcome in (("e", "granted"), ("s", "held")):
        answers = await gate.decide(crowd(offer, number), **ASKED)
        assert [answer.outcome for answer in answers] == [outcome] * GRABS


async def _grant_many(gate: Any) -> None:
    for number in range(1, LISTS + 1):
        await _grant(gate, number)


async def _init(system: Settings, *options: str) -> tuple[list[int], list[int]]:
    """The shards of an older layout, and those that were raised, as `grabstream init` says."""
    done = await asyncio.to_thread(grabstream, "init", "--json", *options, **env_of(system))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["layout"] == LAYOUT
    return said["shards_of_older_layout"], said["shards_raised"]


async def _no_room_needed(key: str) -> str:
    return ""


async def _booked(system: Settings) -> None:
    """Waits until the read models have all events."""
    status = await asyncio.to_thread(grabstream, "verify", "--wait", "30", **env_of(system))
    assert status.returncode == 0, status.stdout + status.stderr


@pytest.mark.long
async def test_comparisons_survive_a_raise(system: Settings, worker: Callable[..., Any]) -> None:
    """A comparison that goes on after the raise, and one that begins where a killed one has left its shadow,
    find no difference.
    """
    redis, keys = open_redis(system), key_space(system)
    number = keys.shard_of_offer("e")
    state = keys.shard(number).state

    async def is_raised() -> bool:
        return await redis.hmget(state, "layout", "partial") == [str(LAYOUT).encode(), None]

    async def compared(shadow: Any) -> list[str]:
        while True:
            with contextlib.suppress(NotComparable):
                return (await shadow.compare()).differences  # type: ignore[no-any-return]
            await asyncio.sleep(0.1)

    try:
        for shard in range(system.shards):
            await redis.hset(keys.shard(shard).state, "layout", LAYOUT_MIN)
        worker(system)
        async with (
            open_gate(system) as gate,
            open_reader(system.kafka, Topics(system.prefix).journal) as reader,
            contextlib.AsyncExitStack() as stack,
        ):
            await gate.decide(openings(), **ASKED)
            await _grant(gate, 0)
            # The end of the shadow that another process takes over: a killed one has none.
            stack.enter_context(contextlib.suppress(SteppedDown))
            shadows = []
            for prefix in ("/goes-on", SHADOW):
                opened = open_shadow(
                    redis, keys, number, sealer(system), reader, None, pace=Pace(1.0), room=_no_room_needed,
                    prefix=prefix,
                )  # fmt: skip
                shadows.append(await stack.enter_async_context(opened))
                await shadows[-1].make()
            assert await compared(shadows[0]) == []
            await _init(system, "--raise-layout")
            await until(is_raised, 30, "the newest layout")
            async with asyncio.timeout(90):
                assert await compared(shadows[0]) == []
            # The second one was killed, and its lease is over.
            await redis.delete(KeySpace(keys.prefix + SHADOW, keys.shards).shard(number).lease)
            await _booked(system)
    finally:
        await redis.aclose()


@pytest.mark.long
@pytest.mark.parametrize("old", [LAYOUT_MIN, LAYOUT])
async def test_an_emptied_shard_has_its_layout_again(
    system: Settings, worker: Callable[..., Any], old: int
) -> None:
    """The recovery reads only what follows the audit trail: no grab."""
    redis, keys = open_redis(system), key_space(system)
    of_shard = keys.shard(keys.shard_of_offer("e"))
    try:
        for shard in range(system.shards):
            await redis.hset(keys.shard(shard).state, "layout", old)
        running = worker(system)
        async with open_gate(system) as gate:
            await gate.decide(openings(), **ASKED)
            await _grant(gate, 0)
        await _booked(system)
        running.process.terminate()
        running.process.wait()
        async for key in redis.scan_iter(match=f"{of_shard.tag}:*"):
            await redis.delete(key)
        worker(system)
        await until(lambda: redis.hexists(of_shard.state, "life"), 40, "a recovery")
        assert await redis.hget(of_shard.state, "layout") == str(old).encode()
    finally:
        await redis.aclose()


@pytest.mark.long
async def test_a_rebuild_keeps_sound_counts_of_refusals_only(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """Calls that count a refusal would fail at others, again and again."""
    redis, keys = open_redis(system), key_space(system)
    of_shard = keys.shard(keys.shard_of_offer("e"))
    try:
        worker(system)
        async with open_gate(system) as gate:
            await gate.decide(openings(), **ASKED)
            await _grant(gate, 0)
            await redis.delete(of_shard.demand)
            await redis.set(of_shard.demand, "damaged")
            # One is granted, and one refused and counted: the call breaks off, and the shard is rebuilt.
            mixed = [Grab(id="new", offer="e", user="new"), Grab(id="again", offer="e", user="0.0")]
            answers = await gate.decide(mixed, **ASKED)
            assert [answer.outcome for answer in answers] == ["granted", "already_taken"]
    finally:
        await redis.aclose()


@pytest.mark.long
async def test_each_user_of_one_id_has_a_story_of_its_own(
    system: Settings, worker: Callable[..., Any]
) -> None:
    worker(system)
    async with open_gate(system) as gate:
        await gate.decide(openings(), **ASKED)
        pair = [Grab(id="g", offer="e", user=user) for user in ("ann", "bob")]
        first, second = await gate.decide(pair, **ASKED)
        # Money that reached the wrong offer: each user's, and some of which nobody knows whose it is.
        of_nobody = Confirm(id="c0", offer="e", grab="g", payment="p0", paid=5, currency="CNY")
        of_pair = [
            msgspec.structs.replace(of_nobody, id=f"c-{user}", payment=f"p-{user}", user=user)
            for user in ("ann", "bob")
        ]
        unknown, *named = await gate.decide([of_nobody, *of_pair], **ASKED)
    await _booked(system)
    for answer, due in zip((first, second), named, strict=True):
        told = await asyncio.to_thread(grabstream, "why", answer.user, "e", "--json", **env_of(system))
        story = json.loads(told.stdout)
        assert told.returncode == 0, told.stdout + told.stderr
        assert story["not_in_ledger"] == []
        assert {line["seq"] for line in story["ledger"]} == {answer.seq, unknown.seq, due.seq}
        granted = [moment for moment in story["story"] if moment["what"] == "grab.granted"]
        assert [moment["details"]["seq"] for moment in granted] == [answer.seq]
        refunds = [moment for moment in story["story"] if moment["what"] == "payment.refund_due"]
        assert [moment["details"]["seq"] for moment in refunds] == [unknown.seq, due.seq]
        assert [payment["payment"] for payment in story["payments"]] == ["p0", f"p-{answer.user}"]
