"""Versions of read models: a system with the same events in every shard, rebuilds within the test's process,
and digests of all rows.
"""

from typing import Any

import pytest
from psycopg import sql

from grabstream.connections.opening import where_of
from grabstream.projections.definitions import definition_of
from grabstream.projections.versions import Version, in_state
from grabstream.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.rebuilding.reading import open_rebuild_source
from grabstream.streams.rebuilding.rebuild import open_rebuild
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    running,
)

GRANTS = 40


async def digests(settings: Settings, version: Version) -> dict[str, Any]:
    """The number and an MD5 digest of the rows of each table of a version."""
    by_table = {}
    async with await open_books(settings) as books:
        for table in definition_of(version.projection).tables:
            name = sql.Identifier(version.schema, table)
            query = sql.SQL(
                "SELECT count(*), md5(string_agg(t::text, '' ORDER BY t::text)) FROM {} AS t"
            ).format(name)
            by_table[table] = await (await books.execute(query)).fetchone()
    return by_table


async def version_in(settings: Settings, projection: str, state: str = "live") -> Version:
    """The version of a read model that is in a state."""
    async with await open_books(settings) as books:
        version = await in_state(books, settings.schema_, projection, state)
    assert version is not None
    return version


async def rebuilt(settings: Settings, projection: str, source: str = "journal", **rest: Any) -> Version:
    """Rebuilds a read model in this process and switches to the new version, which it returns. Raises
    AssertionError when a row differs that its definition does not declare.
    """
    where = where_of(settings)
    async with (
        open_rebuild(where, projection, **rest) as work,
        open_rebuild_source(source, where) as events,
    ):
        new = await work.build(events)
        assert not [table for table in await work.difference(events, new) if table.undeclared]
        await work.switch(events, await work.agree(new), keep=True, patience_seconds=60)
    return await version_in(settings, projection)


def lines_of(shard: int, grants: int = GRANTS) -> list[bytes]:
    """The lines of a shard: an envelope, and grants of its parts."""
    lines = [opened(f"e{shard}", 1), *(granted(f"e{shard}", seq) for seq in range(2, grants + 2))]
    return [line.replace(b'"shard":%d' % SHARD, b'"shard":%d' % shard) for line in lines]


@pytest.fixture
async def booked(system: Settings, journal: JournalWriter) -> Settings:
    """A system with events in every shard, all of them applied to the read models."""
    for shard in range(system.shards):
        of_shard = JournalWriter(system, journal._producer, shard)
        await of_shard.marker(1, "a")
        await of_shard.block(lines_of(shard), 1, GRANTS + 1)
    await until_caught_up(system, GRANTS + 1)
    return system


async def until_caught_up(settings: Settings, seq: int) -> None:
    """Runs projectors until all cursors are at a seq."""
    async with running(settings) as projectors:
        for shard in range(settings.shards):
            for projector in projectors:
                await projector.put(CatchUp(shard))

        async def all_at_seq() -> bool:
            return await rows(settings, "SELECT min(seq), max(seq) FROM cursors") == [(seq, seq)]

        await until(all_at_seq, 30, f"seq {seq}")
