"""Cursors: how far a projection is in each shard, kept in the transaction that writes its rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from grabstream.models.events import AnyEvent
from grabstream.models.journal import Cursor
from grabstream.models.transfers import Transfer, transfers_of
from grabstream.models.upcasting import NEWER


class CursorMoved(Exception):
    """Another process has moved the cursor: its rows are written, ours must not be. Read the cursor again."""


class Fact(NamedTuple):
    """An accepted event: its text as journaled, the chain's hash behind it, its decoded form, and the
    transfers it is.
    """

    line: bytes
    hash: bytes
    event: AnyEvent
    transfers: tuple[Transfer, ...]


#: Makes a Fact of a tuple, in half the time that its constructor takes.
_fact = partial(tuple.__new__, Fact)


def facts_of(lines: Iterable[bytes], hashes: Iterable[bytes], events: Sequence[AnyEvent]) -> list[Fact]:
    """A fact for each event of a block, with the transfers it is."""
    return list(map(_fact, zip(lines, hashes, events, map(transfers_of, events), strict=True)))


async def load(connection: AsyncConnection[Any], projection: str) -> dict[int, Cursor]:
    """The cursor of every shard."""
    found = await connection.execute(
        "SELECT shard, seq, head, next_offset, term, owner FROM projection_cursors WHERE projection = %s",
        (projection,),
    )
    return {
        shard: Cursor(seq, bytes(head), offset, term, owner)
        for shard, seq, head, offset, term, owner in await found.fetchall()
    }


class Stop(NamedTuple):
    """A projection that has stopped at a shard: its cursor there, why, and since when."""

    projection: str
    shard: int
    seq: int
    journal_offset: int
    reason: str
    stopped_at: datetime

    @property
    def newer(self) -> bool:
        """Whether it stopped at an event that a newer grabstream wrote. Only the first line is ours:
        PostgreSQL quotes rows in others.
        """
        return NEWER in self.reason.partition("\n")[0]


async def stops(connection: AsyncConnection[Any]) -> list[Stop]:
    """Where projections have stopped, the first stop first."""
    found = await connection.execute(
        "SELECT projection, shard, seq, journal_offset, reason, stopped_at FROM stopped_shards ORDER BY "
        "stopped_at, projection, shard"
    )
    return [Stop(*row) for row in await found.fetchall()]


async def stopped(connection: AsyncConnection[Any], projection: str) -> set[int]:
    """The shards at which a projection has stopped."""
    found = await connection.execute("SELECT shard FROM stopped_shards WHERE projection = %s", (projection,))
    return {shard for (shard,) in await found.fetchall()}


async def advance(
    connection: AsyncConnection[Any],
    projection: str,
    moves: Mapping[int, tuple[Cursor, Cursor]],
    frozen: bool = False,
) -> None:
    """Moves cursors from what we believed to what follows; raises CursorMoved when one was elsewhere, or this
    version is not ours now.

    Workers write versions that are not frozen; only who brings one back writes a frozen one.
    """
    for shard in sorted(moves):
        old, new = moves[shard]
        done = await connection.execute(
            "UPDATE projection_cursors SET seq = %s, head = %s, next_offset = %s, term = %s, owner = %s, "
            "moved_at = now() "
            "WHERE projection = %s AND shard = %s AND seq = %s AND next_offset = %s AND frozen = %s",
            (
                new.seq,
                new.head,
                new.next_offset,
                new.term,
                new.owner,
                projection,
                shard,
                old.seq,
                old.next_offset,
                frozen,
            ),
        )
        if done.rowcount != 1:
            raise CursorMoved(
                f"{projection}, shard {shard}: the cursor is no longer at seq {old.seq}, offset "
                f"{old.next_offset} of this version"
            )


async def stop(
    connection: AsyncConnection[Any], projection: str, shard: int, cursor: Cursor, reason: str
) -> None:
    """Writes down that a projection stopped at a shard, where and why, for `status` and for whoever mends
    it.
    """
    await connection.execute(
        "INSERT INTO stopped_shards (projection, shard, seq, journal_offset, reason) VALUES (%s, %s, %s, %s, "
        "%s) "
        "ON CONFLICT (projection, shard) DO NOTHING",
        (projection, shard, cursor.seq, cursor.next_offset, reason),
    )


async def read_anew(connection: AsyncConnection[Any], projection: str, shard: int, cursor: Cursor) -> None:
    """Lets a projection look for its seq and hash in the journal from the beginning: its rows stay, its
    offset was wrong.
    """
    done = await connection.execute(
        "UPDATE projection_cursors SET next_offset = 0, term = 0, owner = '' WHERE projection = %s AND shard "
        "= %s AND seq = %s",
        (projection, shard, cursor.seq),
    )
    if done.rowcount != 1:
        raise CursorMoved(f"{projection}, shard {shard}: the cursor moves")


async def let_go_on(connection: AsyncConnection[Any], projection: str, shard: int) -> bool:
    """A stopped projection may try again; running workers see it within seconds. Returns whether it had
    stopped.
    """
    done = await connection.execute(
        "DELETE FROM stopped_shards WHERE projection = %s AND shard = %s", (projection, shard)
    )
    return done.rowcount == 1


async def retry_newer(connection: AsyncConnection[Any], projection: str) -> None:
    """Takes back the stops at events that a newer grabstream wrote (`Stop.newer`): this process may be it. If
    not, it stops there again.
    """
    await connection.execute(
        "DELETE FROM stopped_shards WHERE projection = %s AND strpos(split_part(reason, E'\\n', 1), %s) > 0",
        (projection, NEWER),
    )
