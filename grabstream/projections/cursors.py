"""Cursors: the position of a projection in each shard, written in the transaction that writes its rows."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql

from grabstream.models.events import AnyEvent, encode_event
from grabstream.models.journal import Cursor
from grabstream.models.runs import AnyRun, singles
from grabstream.models.transfers import Transfers, transfers_of
from grabstream.models.upcasting import NEWER

# PostgreSQL promises no order in which a statement locks its rows. So of two workers that both take some
# shards for theirs, as when partitions move, one may meet a deadlock: its transaction is rolled back and
# repeated. Locking the rows in an order of ours first would make each of these statements a fifth slower.
_ADVANCE: Final = (
    b"UPDATE projection_cursors AS c SET seq = n.seq, head = n.head, next_offset = n.next_offset, "
    b"term = n.term, owner = n.owner, moved_at = now() "
    b"FROM unnest(%s::integer[], %s::bigint[], %s::bytea[], %s::bigint[], %s::bigint[], %s::text[], "
    b"%s::bigint[], %s::bigint[]) AS n (shard, seq, head, next_offset, term, owner, old_seq, old_offset) "
    b"WHERE c.projection = %s AND c.shard = n.shard AND c.seq = n.old_seq AND c.next_offset = n.old_offset "
    b"AND c.frozen = %s RETURNING c.shard"
)


class CursorMoved(Exception):
    """Another process has moved the cursor and written its rows. The caller must not commit its own rows; it
    must read the cursor again.
    """


class Fact(NamedTuple):
    """An event as a projection gets it: its line in the journal, the hash of the chain after it, its decoded
    form, and its transfers. Grants and holds are runs, unless `single_facts` divided them.
    """

    line: bytes
    hash: bytes
    event: AnyEvent | AnyRun
    transfers: Transfers


#: Writes what facts lead to, in the caller's transaction.
Apply = Callable[[AsyncConnection[Any], Sequence[Fact]], Awaitable[None]]

#: Makes a Fact from a tuple, in half the time of its constructor.
_fact = partial(tuple.__new__, Fact)


class _NotComputed(tuple[Any, ...]):
    """In place of the transfers of a fact whose reader asked for none. Using it raises. An empty tuple would
    look as if no money had moved.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the transfers of these facts were not computed")

    __len__ = __bool__ = __getitem__ = __iter__  # type: ignore[assignment]


NOT_COMPUTED: Final = _NotComputed()


def facts_without_transfers(
    lines: Iterable[bytes], hashes: Iterable[bytes], events: Sequence[AnyEvent | AnyRun]
) -> list[Fact]:
    """A fact for each line of a block; its transfers are NOT_COMPUTED, which is a tenth less work."""
    none = repeat(NOT_COMPUTED, len(events))
    return list(map(_fact, zip(lines, hashes, events, none, strict=True)))


def facts_of(
    lines: Iterable[bytes], hashes: Iterable[bytes], events: Sequence[AnyEvent | AnyRun]
) -> list[Fact]:
    """A fact for each line of a block, with its transfers."""
    return list(map(_fact, zip(lines, hashes, events, map(transfers_of, events), strict=True)))


def are_consecutive(shard: int, seq: int, events: Iterable[AnyEvent | AnyRun]) -> bool:
    """Whether events belong to a shard and are consecutive from the one after `seq`, by their texts."""
    for event in events:
        if event.seq != seq + 1 or event.shard != shard:
            return False
        seq = event.last_seq
    return True


def single_facts(facts: Sequence[Fact]) -> Sequence[Fact]:
    """The same facts, with one for each grab of a run: its event alone, as `grab.events` has it, in its own
    line, and the hash after the run.
    """
    if not any(isinstance(fact.event, AnyRun) for fact in facts):
        return facts
    return [single for fact in facts for single in _singles(fact)]


def _singles(fact: Fact) -> Iterable[Fact]:
    if not isinstance(fact.event, AnyRun):
        return (fact,)
    return (Fact(encode_event(one), fact.hash, one, transfers_of(one)) for one in singles(fact.event))


async def load(connection: AsyncConnection[Any], projection: str) -> dict[int, Cursor]:
    """The cursor of every shard."""
    return (await load_all(connection, [projection]))[projection]


async def load_all(
    connection: AsyncConnection[Any], projections: Sequence[str]
) -> dict[str, dict[int, Cursor]]:
    """The cursors of every shard, by projection."""
    rows = await connection.execute(
        "SELECT projection, shard, seq, head, next_offset, term, owner FROM projection_cursors "
        "WHERE projection = ANY(%s)",
        (list(projections),),
    )
    loaded: dict[str, dict[int, Cursor]] = {projection: {} for projection in projections}
    for projection, shard, seq, head, offset, term, owner in await rows.fetchall():
        loaded[projection][shard] = Cursor(seq, bytes(head), offset, term, owner)
    return loaded


class VersionPositions(NamedTuple):
    """The next offset of a version in each shard, and the shards at which it has stopped."""

    offsets: dict[int, int]
    stopped: set[int]


async def positions(
    connection: AsyncConnection[Any], schemas: Mapping[str, str]
) -> dict[str, VersionPositions]:
    """The positions of projections, given the schemas of their versions."""
    found = {projection: VersionPositions({}, set()) for projection in schemas}
    if not found:
        return found
    schema_query = sql.SQL(
        "SELECT projection, shard, next_offset FROM {cursors} UNION ALL "
        "SELECT projection, shard, NULL FROM {stops}"
    )
    query = sql.SQL(" UNION ALL ").join(
        schema_query.format(
            cursors=sql.Identifier(schema, "projection_cursors"),
            stops=sql.Identifier(schema, "stopped_shards"),
        )
        for schema in schemas.values()
    )
    rows = await connection.execute(query)
    for projection, shard, offset in await rows.fetchall():
        if projection not in found:
            continue
        if offset is None:
            found[projection].stopped.add(shard)
        else:
            found[projection].offsets[shard] = offset
    return found


class Stop(NamedTuple):
    """A shard at which a projection has stopped: the cursor, the reason, and the time."""

    projection: str
    shard: int
    seq: int
    journal_offset: int
    reason: str
    stopped_at: datetime

    @property
    def newer(self) -> bool:
        """Whether it stopped at an event that a newer grabstream wrote. Only the first line of the reason
        counts: in later lines, PostgreSQL quotes values of rows.
        """
        return NEWER in self.reason.partition("\n")[0]


async def stops(connection: AsyncConnection[Any]) -> list[Stop]:
    """All stops of projections, the oldest first."""
    rows = await connection.execute(
        "SELECT projection, shard, seq, journal_offset, reason, stopped_at FROM stopped_shards ORDER BY "
        "stopped_at, projection, shard"
    )
    return [Stop(*row) for row in await rows.fetchall()]


async def stopped(connection: AsyncConnection[Any], projection: str) -> set[int]:
    """The shards at which a projection has stopped."""
    rows = await connection.execute("SELECT shard FROM stopped_shards WHERE projection = %s", (projection,))
    return {shard for (shard,) in await rows.fetchall()}


async def write(
    connection: AsyncConnection[Any],
    projection: str,
    moves: Mapping[int, tuple[Cursor, Cursor]],
    facts: Sequence[Fact],
    apply: Apply,
    frozen: bool = False,
) -> None:
    """Moves cursors and applies the facts between them, in the caller's transaction; raises like `advance`,
    which runs first, so that no two processes apply the same facts.
    """
    await advance(connection, projection, moves, frozen)
    if facts:
        await apply(connection, facts)


async def advance(
    connection: AsyncConnection[Any],
    projection: str,
    moves: Mapping[int, tuple[Cursor, Cursor]],
    frozen: bool = False,
) -> None:
    """Moves cursors: `moves` has (expected, next) for each shard. Raises CursorMoved when a cursor is not as
    expected, or `frozen` is not that of the version.

    Workers write versions that are not frozen. Only a switch back to an earlier version writes a frozen one.
    """
    shards = sorted(moves)
    olds, news = zip(*map(moves.__getitem__, shards), strict=True)
    columns = *zip(*news, strict=True), [old.seq for old in olds], [old.next_offset for old in olds]
    done = await connection.execute(_ADVANCE, (shards, *map(list, columns), projection, frozen))
    if done.rowcount != len(shards):
        moved = {shard for (shard,) in await done.fetchall()}
        shard = next(shard for shard in shards if shard not in moved)
        old, _ = moves[shard]
        raise CursorMoved(
            f"{projection}, shard {shard}: the cursor is no longer at seq {old.seq}, offset "
            f"{old.next_offset} of this version"
        )


async def stop(
    connection: AsyncConnection[Any], projection: str, shard: int, cursor: Cursor, reason: str
) -> None:
    """Records that a projection stopped at a shard, with its cursor and the reason, for `status` and
    operators.
    """
    await connection.execute(
        "INSERT INTO stopped_shards (projection, shard, seq, journal_offset, reason) VALUES (%s, %s, %s, %s, "
        "%s) "
        "ON CONFLICT (projection, shard) DO NOTHING",
        (projection, shard, cursor.seq, cursor.next_offset, reason),
    )


async def read_from_beginning(
    connection: AsyncConnection[Any], projection: str, shard: int, cursor: Cursor
) -> None:
    """Sets the offset of a cursor to 0, so that the projection searches for its seq and hash from the
    beginning of the journal. Its rows stay.
    """
    done = await connection.execute(
        "UPDATE projection_cursors SET next_offset = 0, term = 0, owner = '' WHERE projection = %s AND shard "
        "= %s AND seq = %s",
        (projection, shard, cursor.seq),
    )
    if done.rowcount != 1:
        raise CursorMoved(f"{projection}, shard {shard}: the cursor moves")


async def resume(connection: AsyncConnection[Any], projection: str, shard: int) -> bool:
    """Lets a stopped projection try again; running workers notice it within seconds. Returns whether it was
    stopped.
    """
    done = await connection.execute(
        "DELETE FROM stopped_shards WHERE projection = %s AND shard = %s", (projection, shard)
    )
    return done.rowcount == 1


async def retry_newer(connection: AsyncConnection[Any], projection: str) -> None:
    """Removes the stops at events that a newer grabstream wrote (`Stop.newer`): this process may be of that
    release. If it is not, it stops there again.
    """
    await connection.execute(
        "DELETE FROM stopped_shards WHERE projection = %s AND strpos(split_part(reason, E'\\n', 1), %s) > 0",
        (projection, NEWER),
    )
