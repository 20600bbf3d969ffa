"""What tests of projections need: events as lines, a writer of journal blocks that may be wrong, projectors
fed by the test, and queries on the books.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection

from grabstream.models.journal import GENESIS, block_headers, chain, marker_headers
from grabstream.settings import Settings
from grabstream.streams.journal import JournalRecord
from grabstream.streams.projecting.agents import make_projectors
from grabstream.streams.projecting.projector import CatchUp, Projector
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.runs import as_singles

SHARD = 3


def opened(offer: str, seq: int, total: int = 1000) -> bytes:
    return (
        f'{{"type":"offer.opened","v":1,"shard":{SHARD},"seq":{seq},"offer_seq":1,"offer":"{offer}",'
        f'"at":{seq},"command":"o-{offer}",'
        f'"kind":"envelope","issuer":"alice","funding":"pay","asset":"CNY","total":{total},"opens_at":1,'
        '"closes_at":9,'
        f'"terms":{{"kind":"envelope","parts":10,"title":"back\\\\slash \\"quote\\" 你好"}},"digest":"d"}}'
    ).encode()


def granted(offer: str, seq: int, amount: int = 10) -> bytes:
    """The line of a run of one grab."""
    return (
        f'{{"type":"grab.granted","v":2,"shard":{SHARD},"seq":{seq},"offer_seq":{seq},"offer":"{offer}",'
        f'"at":{seq},"grabs":["g{seq}"],"users":["u{seq % 7}"],"amounts":[{amount}],"asset":"CNY",'
        f'"place":{seq},"left":3,"digests":["d"]}}'
    ).encode()


def granted_run(offer: str, seq: int, count: int) -> bytes:
    """The line of a run of grabs of one each, of as many users."""
    numbers = range(seq, seq + count)
    grabs, users = (",".join(f'"{letter}{number}"' for number in numbers) for letter in "gu")
    return (
        f'{{"type":"grab.granted","v":2,"shard":{SHARD},"seq":{seq},"offer_seq":{seq},"offer":"{offer}",'
        f'"at":{seq},"grabs":[{grabs}],"users":[{users}],"amounts":[{",".join("1" * count)}],"asset":"CNY",'
        f'"place":{seq - 1},"left":3}}'
    ).encode()


class JournalWriter:
    """Writes markers and blocks to one partition of the journal; blocks may be wrong."""

    def __init__(self, settings: Settings, producer: AIOKafkaProducer, shard: int = SHARD) -> None:
        self._topic, self._producer, self._shard = Topics(settings.prefix).journal, producer, shard
        self.records: list[JournalRecord] = []

    async def _send(self, headers: list[tuple[str, bytes]], value: bytes) -> None:
        sent = await self._producer.send_and_wait(self._topic, value, partition=self._shard, headers=headers)
        self.records.append(JournalRecord(self._shard, sent.offset, tuple(headers), value))

    async def marker(self, term: int, owner: str) -> None:
        await self._send(marker_headers(self._shard, term, owner), b"")

    async def block(
        self, lines: Sequence[bytes], first: int, last: int, term: int = 1, owner: str = "a",
        last_seqs: Sequence[int] | None = None, **wrong: bytes
    ) -> None:  # fmt: skip
        """Writes line number `first` to `last` of lines that begin with seq 1. `last_seqs` are those of all
        lines, if some are runs; `wrong` replaces headers.
        """
        hashes = [GENESIS, *chain(GENESIS, lines)]
        reach = [0, *(last_seqs or range(1, len(lines) + 1))]
        headers = dict(
            block_headers(
                self._shard, term, owner, reach[first - 1] + 1, last - first + 1, hashes[first - 1],
                hashes[last], reach[last] - reach[first - 1],
            )
        )  # fmt: skip
        headers.update(wrong)
        await self._send(list(headers.items()), b"\n".join(lines[first - 1 : last]))


@pytest.fixture
async def journal(system: Settings) -> AsyncIterator[JournalWriter]:
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka, acks="all")
    await producer.start()
    yield JournalWriter(system, producer)
    await producer.stop()


@asynccontextmanager
async def running(settings: Settings, *names: str) -> AsyncIterator[list[Projector]]:
    """Runs projectors that the test feeds in place of Faust."""
    projectors = make_projectors(
        settings.kafka,
        settings.prefix,
        settings.shards,
        settings.postgres,
        settings.schema_,
        names or ("ledger", "balances", "audit"),
    )
    tasks = [asyncio.create_task(projector.run()) for projector in projectors]
    try:
        yield projectors
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def catching_up(settings: Settings, *names: str) -> AsyncIterator[list[Projector]]:
    """Runs projectors that read the journal of SHARD as far as it goes."""
    async with running(settings, *names) as projectors:
        for projector in projectors:
            await projector.put(CatchUp(SHARD))
        yield projectors


async def until_at_seq(settings: Settings, seq: int, *names: str, shard: int = SHARD) -> None:
    """Returns when the cursors of the projections in a shard are at a seq."""
    async with await open_books(settings) as books:

        async def all_at_seq() -> bool:
            rows = await books.execute("SELECT projection, seq FROM cursors WHERE shard = %s", (shard,))
            seqs = dict(await rows.fetchall())
            return all(seqs[name] == seq for name in names or ("ledger", "balances", "audit"))

        await until(all_at_seq, 30, f"seq {seq}")


async def rows(settings: Settings, query: str) -> list[Any]:
    """All rows that a query on the books returns."""
    async with await open_books(settings) as books:
        return await (await books.execute(query.encode())).fetchall()


async def open_tables(settings: Settings) -> AsyncConnection[Any]:
    """A connection whose search path has the tables of the live versions before the views, so that a test can
    damage rows.
    """
    connection = await open_books(settings)
    schemas = ", ".join([*(await live_schemas(connection)).values(), settings.schema_])
    await connection.execute(f"SET search_path = {schemas}".encode())
    return connection


async def live_schemas(connection: AsyncConnection[Any]) -> dict[str, str]:
    """The schema of each read model's live version, by projection; the connection's search path must be the
    system's schema.
    """
    return dict(
        await (
            await connection.execute(
                "SELECT projection, schema FROM read_models WHERE state = 'live' ORDER BY projection"
            )
        ).fetchall()
    )


LINES = [opened("e", 1), *(granted("e", seq) for seq in range(2, 31))]
#: Their events, as on `grab.events`.
EVENTS = as_singles(LINES)
