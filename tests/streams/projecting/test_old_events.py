"""A journal that several releases have written: the rows are those of the events in their current versions.
With Kafka and PostgreSQL.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from grabstream.models.journal import GENESIS, chain
from grabstream.models.runs import AnyLine, LineDecoder
from grabstream.ops.verification.verifying import verify
from grabstream.projections import audit, ledger
from grabstream.projections.balances import users as balances
from grabstream.settings import Settings
from grabstream.streams.follower import Decoder
from grabstream.streams.projecting.projector import CatchUp, Projector
from grabstream.streams.topics import Topics
from tests.conftest import make_system, take_down, until
from tests.models.old_events import UPCASTERS, as_it_was
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    until_at_seq,
)
from tests.support.runs import as_lines

APPLY = {"ledger": ledger.apply, "balances": balances.apply, "audit": audit.apply}
TABLES = (
    "SELECT * FROM transfers ORDER BY shard, seq, leg",
    "SELECT * FROM accounts ORDER BY account, asset",
    "SELECT * FROM balances ORDER BY user_id, asset",
    "SELECT * FROM grabs ORDER BY offer, grab",
    "SELECT * FROM offers ORDER BY offer",
    "SELECT shard, seq, offer, type, at FROM audit ORDER BY shard, seq",
)


def coupons(name: str, first_seq: int) -> list[bytes]:
    """The events of a coupon offer, grabs by users with cards, and a redemption of each."""
    head = {"v": 1, "shard": SHARD, "offer": name, "at": 5}
    terms = {"kind": "coupon", "issuer": "shop", "total": 9}
    lines: list[dict[str, Any]] = [
        {"type": "offer.opened", **head, "command": "o", "kind": "coupon", "issuer": "shop",
        "asset": f"coupon:{name}", "total": 9,
         "opens_at": 1, "closes_at": 9, "terms": terms, "digest": "d"},
    ]  # fmt: skip
    for place in range(1, 6):
        of_grab = {
            "grab": f"g{place}",
            "user": f"u{place % 2}",
            "quantity": 1,
            "amount": 1,
            "asset": f"coupon:{name}",
            "place": place,
        }
        lines.append(
            {"type": "grab.granted", **head, "command": f"g{place}", **of_grab, "left": 9 - place,
            "attributes": {"card": f"k:{place}"},
             "digest": "d"}
        )  # fmt: skip
        lines.append(
            {
                "type": "grab.redeemed",
                **head,
                "command": f"r{place}",
                **of_grab,
                "left": 9 - place,
                "order": "x",
                "digest": "d",
            }
        )
    numbered = [
        {**line, "seq": first_seq + place, "offer_seq": place + 1} for place, line in enumerate(lines)
    ]
    return [json.dumps(line, separators=(",", ":")).encode() for line in numbered]


LINES = [opened("e", 1), *(granted("e", seq) for seq in range(2, 21)), *as_lines(coupons("c", 21))]
#: A journal of three releases: first old versions, then old and current ones, then only current ones.
JOURNAL = [as_it_was(line) if seq <= 23 or seq == 27 else line for seq, line in enumerate(LINES, 1)]


@asynccontextmanager
async def running(settings: Settings, lines: LineDecoder, *names: str) -> AsyncIterator[list[Projector]]:
    """Runs projectors with the decoder of a test."""
    decoder = Decoder(lines=lines)
    where = {"postgres": settings.postgres, "schema": settings.schema_, "kafka": settings.kafka}
    projectors = [
        Projector(name, APPLY[name], journal=Topics(settings.prefix).journal, decoder=decoder, **where)
        for name in names or APPLY
    ]
    tasks = [asyncio.create_task(projector.run()) for projector in projectors]
    try:
        for projector in projectors:
            await projector.put(CatchUp(SHARD))
        yield projectors
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def another(settings: Settings) -> AsyncIterator[Settings]:
    """A second system."""
    changed = settings.model_copy(update={"prefix": f"{settings.prefix}b", "schema_": f"{settings.prefix}b"})
    await make_system(changed)
    yield changed
    await take_down(changed)


async def read_models(settings: Settings) -> list[list[Any]]:
    return [await rows(settings, query) for query in TABLES]


async def write(journal: JournalWriter, lines: Sequence[bytes]) -> None:
    await journal.marker(1, "a")
    for first in range(1, len(lines) + 1, 7):
        await journal.block(lines, first, min(first + 6, len(lines)))


@pytest.mark.long
async def test_old_event_versions_produce_the_same_rows(
    system: Settings, another: Settings, journal: JournalWriter
) -> None:
    today = JournalWriter(another, journal._producer)
    await write(journal, JOURNAL)
    await write(today, LINES)
    async with running(system, LineDecoder(UPCASTERS)), running(another, LineDecoder()):
        await until_at_seq(system, len(LINES))
        await until_at_seq(another, len(LINES))
    assert await read_models(system) == await read_models(another)
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(1000 - 190,)]
    assert (
        await rows(system, "SELECT amount FROM transfers WHERE credit = 'redeemed:c' ORDER BY seq")
        == [(1,)] * 5
    )
    # The text and the chain are those of the journal, byte for byte.
    assert [body.encode() for (body,) in await rows(system, "SELECT body FROM audit ORDER BY seq")] == JOURNAL
    assert [bytes(hash_) for (hash_,) in await rows(system, "SELECT hash FROM audit ORDER BY seq")] == chain(
        GENESIS, JOURNAL
    )
    assert JOURNAL != LINES


class Newer(LineDecoder):
    """The decoder of a later program that knows grab.granted v3, here the same as v2."""

    def decode_list(self, lines: bytes) -> list[AnyLine]:
        return super().decode_list(
            lines.replace(b'"type":"grab.granted","v":3', b'"type":"grab.granted","v":2')
        )


@pytest.mark.long
async def test_a_newer_event_version_stops_the_shard_until_a_newer_program_runs(
    system: Settings, journal: JournalWriter
) -> None:
    """An older program stops the shard before the event and states the reason; a newer program continues from
    there without a command, and no event is lost.
    """
    lines = [*LINES[:9], LINES[9].replace(b'"v":2', b'"v":3'), *LINES[10:20]]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 5)
    await journal.block(lines, 6, 20)
    for _ in range(2):  # started again, it stops at the same event
        async with running(system, LineDecoder(), "ledger") as [ledger_]:
            await until(lambda ledger_=ledger_: ledger_._stopped == {SHARD}, 30, "the stop")
        [(seq, reason)] = await rows(system, "SELECT seq, reason FROM stopped_shards")
        assert seq == 5
        assert (
            "seq 10: grab.granted v3 was written by a newer grabstream, this release knows up to v2" in reason
        )
    async with running(system, Newer(), "ledger"):
        await until_at_seq(system, 20, "ledger")
    assert await rows(system, "SELECT count(*) FROM stopped_shards") == [(0,)]
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(1000 - 190,)]
    # `verify` of the older program reports it too.
    [problem] = [
        problem
        for check in await verify(system, 0)
        if check.name == "chain of every shard"
        for problem in check.problems
    ]
    assert problem.startswith(f"shard {SHARD}: seq 10: grab.granted v3 was written by a newer grabstream")


async def test_a_stop_for_another_reason_remains_after_a_restart(
    system: Settings, journal: JournalWriter
) -> None:
    lines = [*LINES[:5], LINES[5].replace(b'grab.granted","v":2', b'grab.extended","v":1')]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 6)
    async with running(system, LineDecoder(UPCASTERS), "ledger") as [ledger_]:
        await until(lambda: ledger_._stopped == {SHARD}, 30, "the stop")
    before = await rows(system, "SELECT * FROM stopped_shards")
    async with running(system, LineDecoder(UPCASTERS), "ledger") as [ledger_]:
        await until(lambda: ledger_._stopped == {SHARD}, 30, "the same stop")
    assert await rows(system, "SELECT * FROM stopped_shards") == before


def amended(offer: str, seq: int, changes: str) -> bytes:
    """The third event of an offer: an amendment."""
    head = (
        f'{{"type":"offer.amended","v":1,"shard":{SHARD},"seq":{seq},"offer_seq":3,"offer":"{offer}",'
        f'"at":{seq},"command":"a{seq}"'
    )
    return (
        f'{head},"asset":"CNY","source":"issuer:alice","changes":{changes},"added":0,"removed":0,"left":9,'
        f'"digest":"d"}}'
    ).encode()


async def test_unknown_fields_of_events_are_ignored(system: Settings, journal: JournalWriter) -> None:
    lines = [opened("e", 1).replace(b'"parts":10', b'"parts":10,"colour":"red"'), granted("e", 2)]
    lines.append(
        amended(
            "e", 3, '{"title":"t","colour":"red","limits":[{"by":"user","per":"day","max":2,"colour":"red"}]}'
        )
    )
    await journal.marker(1, "a")
    await journal.block(lines, 1, 3)
    async with running(system, LineDecoder()):
        await until_at_seq(system, 3)
    assert await rows(system, "SELECT title, grabs FROM offers") == [("t", 1)]


async def test_an_event_that_cannot_become_rows_stops_only_its_shard(
    system: Settings, journal: JournalWriter
) -> None:
    """The other shards of the same read model and process continue; `stopped_shards` has the reason."""
    other = JournalWriter(system, journal._producer, SHARD + 1)
    lines = [opened("e", 1), granted("e", 2), amended("e", 3, '{"limits":7}'), granted("e", 4)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2)
    await journal.block(lines, 3, 4)
    await other.marker(1, "a")
    numbered = [
        line.replace(f'"shard":{SHARD}'.encode(), f'"shard":{SHARD + 1}'.encode())
        for line in (opened("f", 1), granted("f", 2))
    ]
    await other.block(numbered, 1, 2)
    async with running(system, LineDecoder(), "balances") as [balances_]:
        await balances_.put(CatchUp(SHARD + 1))
        await until(lambda: balances_._stopped == {SHARD}, 30, "the stop")
        await until_at_seq(system, 2, "balances", shard=SHARD + 1)
    [(shard, seq, reason)] = await rows(system, "SELECT shard, seq, reason FROM stopped_shards")
    assert (shard, seq) == (SHARD, 2)
    assert "its events cannot be turned into rows: ValueError" in reason
    assert await rows(system, "SELECT offer, grabs FROM offers ORDER BY offer") == [("e", 1), ("f", 1)]
