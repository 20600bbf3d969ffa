"""A shard whose hash in Redis, or whose journal, is damaged stays fenced and names what is; other shards are
relayed.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import StockTerms
from grabstream.settings import Settings
from tests.conftest import until
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    granted,
    journal,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.long

ASKED: dict[str, Any] = {"patience_ms": 60_000, "timeout_ms": 60_000}
DAMAGED = {
    "seq": "x", "journaled_seq": " 7", "journaled_offset": "9" * 5_000, "journaled_term": "-1",
    "journaled_head": "no hash",
}  # fmt: skip


#: These are rebuilt, or written again, by the shard's relay while the system runs.
HEALED = (
    ("term", "x"), ("term", str(2**53)), ("time", "x"), ("time", "9" * 15), ("history", "x"), ("history", ""),
    ("history", None), ("server_epoch", "x"), ("server_epoch", None), ("shards", "x"), ("shards", None),
    ("owner", "x"), ("layout", "0"), ("layout", None), ("layout", "x"),
)  # fmt: skip


async def test_a_damaged_field_never_refuses_a_command(system: Settings, worker: Callable[..., Any]) -> None:
    """A command is not answered `invalid`, nor decided at another time: it waits until the shard is sound."""
    redis, keys = open_redis(system), key_space(system)
    state = keys.shard(keys.shard_of_offer("o")).state
    try:
        async with open_gate(system) as gate:
            worker(system)
            terms = StockTerms(issuer="i", total=99, closes_at=4_000_000_000_000)
            [opened] = await gate.decide([Open(id="open", offer="o", terms=terms)], **ASKED)
            assert opened.outcome == "opened"
            layout = await redis.hget(state, "layout")
            for number, (field, damaged) in enumerate(HEALED):
                if damaged is None:
                    await redis.hdel(state, field)
                else:
                    await redis.hset(state, field, damaged)
                waiting = asyncio.create_task(
                    gate.decide([Grab(id=f"g{number}", offer="o", user=f"u{number}")], **ASKED)
                )
                if damaged == "x" and field == "layout":

                    async def is_named() -> bool:
                        return b"the field layout" in (await redis.hget(state, "fault") or b"")

                    await until(is_named, 60, "the fault of the layout")
                    await redis.hset(state, "layout", layout)
                [answer] = await waiting
                assert (answer.outcome, answer.place) == ("granted", number + 1), (field, damaged, answer)
            term = int(await redis.hget(state, "term"))
            assert 0 < term < 1_000
    finally:
        await redis.aclose()


async def test_a_damaged_key_does_not_stop_a_shard(system: Settings, worker: Callable[..., Any]) -> None:
    """Keys of another type, an outbox with entries that no script writes, and a lease without an end, while
    the shard is idle.
    """
    redis, keys = open_redis(system), key_space(system)
    shard = keys.shard(keys.shard_of_offer("o"))

    async def replace(key: str) -> None:
        other, kind = (redis.rpush, b"list") if key == shard.lease else (redis.set, b"string")

        async def is_healed() -> bool:
            return await redis.type(key) != kind

        await redis.delete(key)
        await other(key, "of another program")
        await until(is_healed, 30, f"the end of the damaged key {key}")

    async def add(field: str, after: int) -> None:
        seq = int(await redis.hget(shard.state, "seq")) + after
        await redis.xadd(shard.outbox, {field: "x"}, id=f"{seq}-0")

    damages: dict[str, Callable[[], Any]] = {
        f"{key} of another type": partial(replace, key)
        for key in (*shard.deciding(), shard.lease, shard.present)
    } | {
        "an entry after the next seq": partial(add, "e", 2),
        "an entry of another form": partial(add, "x", 1),
        "a lease without an end": partial(redis.set, shard.lease, "another"),
    }
    try:
        async with open_gate(system) as gate:
            running = worker(system)
            terms = StockTerms(issuer="i", total=99, closes_at=4_000_000_000_000)
            [opened] = await gate.decide([Open(id="open", offer="o", terms=terms)], **ASKED)
            assert opened.outcome == "opened"
            for number, (what, damage) in enumerate(damages.items()):
                await damage()
                [answer] = await gate.decide([Grab(id=f"g{number}", offer="o", user=f"u{number}")], **ASKED)
                assert (answer.outcome, answer.place) == ("granted", number + 1), (what, answer)
            assert await asyncio.to_thread(running.stop) == 0
    finally:
        await redis.aclose()


async def test_a_damaged_number_is_the_fault_of_its_shard(
    system: Settings, worker: Callable[..., Any]
) -> None:
    redis, keys = open_redis(system), key_space(system)
    offers = {keys.shard_of_offer(f"o{number}"): f"o{number}" for number in range(200)}
    number, other = sorted(offers)[:2]
    state = keys.shard(number).state

    async def fault_names() -> bool:
        fault = (await redis.hget(state, "fault") or b"").decode()
        return f"the field {field} of shard {number} in Redis ({state})" in fault

    try:
        async with open_gate(system) as gate:
            running = worker(system)
            terms = StockTerms(issuer="i", total=9)
            opened = await gate.decide(
                [Open(id=f"open-{shard}", offer=offers[shard], terms=terms) for shard in (number, other)],
                **ASKED,
            )
            assert [answer.outcome for answer in opened] == ["opened"] * 2
            assert running.stop() == 0
            places: list[int] = []
            for field, damaged in DAMAGED.items():
                await redis.hset(state, field, damaged)
                running = worker(system)
                await until(fault_names, 60, f"the fault of {field}")
                [granted] = await gate.decide([Grab(id=field, offer=offers[other], user=field)], **ASKED)
                assert granted.outcome == "granted"
                assert running.process.poll() is None
                # The way out that the fault names.
                fault = (await redis.hget(state, "fault")).decode()
                named = fault.partition(": delete the field ")[2].partition(",")[0]
                assert await redis.hdel(state, named) == 1
                after = Grab(id=f"after-{field}", offer=offers[number], user=field)
                [granted] = await gate.decide([after], **ASKED)
                assert (granted.outcome, granted.place) == ("granted", len(places) + 1)
                places.append(granted.place)
                assert await redis.hget(state, "fault") is None
                assert await asyncio.to_thread(running.stop) == 0
    finally:
        await redis.aclose()


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"{}", id="not an event"),
        pytest.param(granted("e", 1).replace(b"u1", b"\xff"), id="not a text"),
        pytest.param(granted("e", 1)[:-1] + b',"other":"\xff"}', id="not a text where nobody looks"),
    ],
)
async def test_a_line_that_is_not_an_event_ends_no_worker(
    system: Settings,
    worker: Callable[..., Any],
    journal: JournalWriter,
    line: bytes,
) -> None:
    """A shard cannot be rebuilt from such a journal: it stays fenced, and names the cause."""
    keys, redis = key_space(system), open_redis(system)
    other = next(offer for offer in "abcdefgh" if keys.shard_of_offer(offer) != SHARD)
    await journal.marker(1, "earlier")
    await journal.block([line], 1, 1, owner="earlier")

    async def is_named() -> bool:
        return b"cannot be rebuilt" in (await redis.hget(keys.shard(SHARD).state, "fault") or b"")

    try:
        running = worker(system, "decide,relay,sweep")
        async with open_gate(system) as gate:
            await until(is_named, 30, "the fault of the shard")
            terms = StockTerms(issuer="i", total=99, closes_at=4_000_000_000_000)
            [opened] = await gate.decide([Open(id="open", offer=other, terms=terms)], **ASKED)
            assert opened.outcome == "opened"
        assert running.process.poll() is None
        assert running.stop() == 0
    finally:
        await redis.aclose()
