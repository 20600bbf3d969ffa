"""What tests share of `tests/streams/rebuilding/test_rebuild.py`."""

from typing import Any

import pytest
from psycopg import sql

from grabstream.ops.commands.rebuild.read_models import where_of
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import Settings
from grabstream.projections.definitions import definition_of
from grabstream.projections.versions import Version, in_state
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.rebuilding.rebuild import open_rebuild, open_source
from tests.conftest import until
from tests.support.projections import (
    SHARD,
    Journal,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    running,
)

GRANTS = 40


async def digests(settings: Settings, version: Version) -> dict[str, Any]:
    """Number and digest of all rows, by table."""
    found = {}
    async with await open_books(settings) as books:
        for table in definition_of(version.projection).tables:
            name = sql.Identifier(version.schema, table)
            query = sql.SQL(
                "SELECT count(*), md5(string_agg(t::text, '' ORDER BY t::text)) FROM {} AS t"
            ).format(name)
            found[table] = await (await books.execute(query)).fetchone()
    return found


async def version_in(settings: Settings, projection: str, state: str = "live") -> Version:
    async with await open_books(settings) as books:
        found = await in_state(books, settings.schema_, projection, state)
    assert found is not None
    return found


async def rebuilt(settings: Settings, projection: str, source: str = "journal", **rest: Any) -> Version:
    """Rebuilds in this process and switches; returns the new version. Raises AssertionError when a row
    differs.
    """
    where = where_of(settings)
    async with (
        open_rebuild(where, projection, **rest) as work,
        open_source(source, where.kafka, where.journal, where.postgres, where.schema) as events,
    ):
        new = await work.build(events)
        assert not [one for one in await work.difference(events, new) if one.undeclared]
        await work.switch(events, await work.agree(new), keep=True, patience_seconds=60)
    return await version_in(settings, projection)


def granted(shard: int, seq: int) -> bytes:
    return (
        f'{{"type":"grab.granted","v":1,"shard":{shard},"seq":{seq},"offer_seq":{seq},"offer":"e{shard}",'
        f'"at":{seq},"command":"g{seq}",'
        f'"grab":"g{seq}","user":"u{seq % 7}","quantity":1,"amount":10,"asset":"CNY","place":{seq},"left":3,'
        f'"digest":"d"}}'
    ).encode()


def lines_of(shard: int, grants: int = GRANTS) -> list[bytes]:
    first = opened(f"e{shard}", 1).replace(f'"shard":{SHARD}'.encode(), f'"shard":{shard}'.encode())
    return [first, *(granted(shard, seq) for seq in range(2, grants + 2))]


@pytest.fixture
async def booked(system: Settings, journal: Journal) -> Settings:
    """A system with some events in every shard, booked."""
    for shard in range(system.shards):
        of_shard = Journal(system, journal._producer, shard)
        await of_shard.marker(1, "a")
        await of_shard.block(lines_of(shard), 1, GRANTS + 1)
    await caught_up(system, GRANTS + 1)
    return system


async def caught_up(settings: Settings, seq: int) -> None:
    async with running(settings) as projectors:
        for shard in range(settings.shards):
            for projector in projectors:
                await projector.put(CatchUp(shard))

        async def there() -> bool:
            return await rows(settings, "SELECT min(seq), max(seq) FROM cursors") == [(seq, seq)]

        await until(there, 30, f"seq {seq}")
