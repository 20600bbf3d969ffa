"""Shards that are rebuilt from the journal while their callers continue: found in an older key layout."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from grabstream.connections.opening import key_space, open_gate, open_redis, sealer
from grabstream.lua.keys import LAYOUT, KeySpace
from grabstream.lua.server import raise_term
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open
from grabstream.models.offers import EnvelopeTerms, Limit, StockTerms
from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.relaying.ownership import SteppedDown
from grabstream.streams.relaying.shadow import SHADOW, NotComparable, TimeShare, open_shadow
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.streams.state import assert_state_is_the_journal_s, journal_lines
from tests.support.command_line import env_of, grabstream

ASKED: dict[str, Any] = {"patience_ms": 20_000, "timeout_ms": 20_000}
#: Lists of grabs that are sent while shards are rebuilt, and the grabs of each.
LISTS, GRABS = 40, 5


def openings() -> list[AnyCommand]:
    money = EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=100_000, parts=1_000)
    limits = (Limit("user", "offer", 2), Limit("user", "day", 2, scope="campaign"))
    held = StockTerms(issuer="i", total=1_000, hold_ms=3_600_000, price=5, currency="CNY", limits=limits)
    return [Open(id="open-e", offer="e", terms=money), Open(id="open-s", offer="s", terms=held)]


def crowd(offer: str, number: int) -> list[AnyCommand]:
    return [Grab(id=f"{offer}-{number}.{n}", offer=offer, user=f"{number}.{n}") for n in range(GRABS)]


async def _find_in_an_older_layout(system: Settings, redis: Any) -> None:
    """Gives all shards an older layout, and has their owners take them over again."""
    for number in range(system.shards):
        state = key_space(system).shard(number).state
        await redis.hset(state, "layout", LAYOUT - 1)
        await raise_term(redis, state, 0, secrets.token_hex(8))


async def _are_rebuilt(system: Settings, redis: Any) -> bool:
    states = [key_space(system).shard(number).state for number in range(system.shards)]
    layouts = [await redis.hmget(state, "layout", "partial") for state in states]
    return layouts == [[str(LAYOUT).encode(), None]] * system.shards


@pytest.mark.long
async def test_shards_of_an_older_layout_are_rebuilt_under_traffic(
    system: Settings, worker: Callable[..., Any]
) -> None:
    redis, keys = open_redis(system), key_space(system)
    try:
        worker(system)
        async with open_gate(system) as gate:
            assert [one.outcome for one in await gate.decide(openings(), **ASKED)] == ["opened"] * 2
            await _grant(gate, 0)
            shards = sorted({keys.shard_of_offer(offer) for offer in "es"})
            before = {shard: await journal_lines(system, shard) for shard in shards}
            [first] = await gate.decide(crowd("e", 0)[:1], **ASKED)
            granting = asyncio.create_task(_grant_many(gate))
            await _find_in_an_older_layout(system, redis)
            await granting
            await until(partial(_are_rebuilt, system, redis), 30, "shards of this layout")
            await _grant(gate, LISTS + 1)
            # Answers from before the rebuild are given again; an id belongs to its user.
            assert await gate.decide(crowd("e", 0)[:1], **ASKED) == [first]
            answers = await gate.decide([_of_mallory("e"), _of_mallory("s")], **ASKED)
            assert [answer.outcome for answer in answers] == ["granted", "conflict"]
            # Units that were counted before the rebuild still count.
            more = [Grab(id=f"more{number}", offer="s", user="0.0") for number in range(2)]
            answers = await gate.decide(more, **ASKED)
            assert [answer.outcome for answer in answers] == ["held", "limit_reached"]
        for shard in shards:
            assert (await journal_lines(system, shard))[: len(before[shard])] == before[shard]
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


async def _no_room_needed(key: str) -> str:
    return ""


async def _booked(system: Settings) -> None:
    """Waits until the read models have all events."""
    status = await asyncio.to_thread(grabstream, "verify", "--wait", "30", **env_of(system))
    assert status.returncode == 0, status.stdout + status.stderr


@pytest.mark.long
async def test_comparisons_survive_a_rebuild(system: Settings, worker: Callable[..., Any]) -> None:
    """A comparison that continues after the rebuild, and one that begins where a killed one has left its
    shadow, find no difference.
    """
    redis, keys = open_redis(system), key_space(system)
    number = keys.shard_of_offer("e")

    async def compared(shadow: Any) -> list[str]:
        while True:
            with contextlib.suppress(NotComparable):
                return (await shadow.compare()).differences  # type: ignore[no-any-return]
            await asyncio.sleep(0.1)

    try:
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
                    redis, keys, number, sealer(system), reader, None, pace=TimeShare(1.0),
                    room=_no_room_needed, prefix=prefix,
                )  # fmt: skip
                shadows.append(await stack.enter_async_context(opened))
                await shadows[-1].make()
            assert await compared(shadows[0]) == []
            await _find_in_an_older_layout(system, redis)
            await until(partial(_are_rebuilt, system, redis), 30, "shards of this layout")
            async with asyncio.timeout(90):
                assert await compared(shadows[0]) == []
            # The second one was killed, and its lease is over.
            await redis.delete(KeySpace(keys.prefix + SHADOW, keys.shards).shard(number).lease)
            await _booked(system)
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
        # Money that reached the wrong offer: each user's, and some whose user is unknown.
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
