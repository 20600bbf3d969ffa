"""The transaction in which a user projection writes: rows and cursor, or nothing. `apply` is the user's code.

1. Mark the cursors, which locks them. A deferred constraint refuses every COMMIT while they are marked.
2. `apply` writes rows.
3. Check that `apply` has not changed the transaction, `search_path` or role.
4. Move the cursors, by qualified names, and unmark them.

Whatever `apply` does, its rows are not committed without step 4, and the session writes in no other
transaction.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.pq import TransactionStatus

from grabstream.models.journal import Cursor
from grabstream.projections.cursors import Apply, CursorMoved, Fact, single_facts

#: `frozen` marks a cursor while the transaction is open; other transactions never see the mark.
_GUARD: Final = """
CREATE OR REPLACE FUNCTION only_with_its_cursor() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    marked boolean;
BEGIN
    EXECUTE format('SELECT frozen FROM %I.projection_cursors WHERE projection = $1 AND shard = $2',
        TG_TABLE_SCHEMA)
        INTO marked USING NEW.projection, NEW.shard;
    -- A cursor that is gone has not moved either.
    IF marked IS DISTINCT FROM false THEN
        RAISE EXCEPTION 'rows of % are committed with their cursor only', NEW.projection
            USING ERRCODE = 'GS001';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER only_with_its_cursor AFTER UPDATE ON projection_cursors
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.frozen) EXECUTE FUNCTION only_with_its_cursor();
"""
_COMMITTED: Final = "GS001"
_STATE: Final = (
    "SELECT pg_current_xact_id()::text, current_setting('search_path'), current_user::text, "
    "session_user::text"
)


class Misbehaves(Exception):
    """`apply` did something that could commit rows without their cursor; the text states what. Everything has
    been rolled back.
    """


class _SessionState(NamedTuple):
    transaction: str
    search_path: str
    role: str
    user: str


async def guard(connection: AsyncConnection[Any], schema: str) -> None:
    """Adds the trigger that refuses a COMMIT without the cursor to a projection's schema, which the
    connection uses; does nothing if it exists.
    """
    triggers = await connection.execute(
        "SELECT 1 FROM pg_trigger WHERE tgrelid = %s::regclass AND tgname = 'only_with_its_cursor'",
        (sql.Identifier(schema, "projection_cursors").as_string(connection),),
    )
    if await triggers.fetchone() is None:
        await connection.execute(_GUARD.encode())


async def only_read(connection: AsyncConnection[Any]) -> None:
    """Makes the session read only, except in transactions that psycopg begins for us."""
    await connection.set_read_only(False)
    await connection.execute("SET default_transaction_read_only = on")


async def write(
    connection: AsyncConnection[Any], name: str, schema: str, moves: Mapping[int, tuple[Cursor, Cursor]],
    facts: Sequence[Fact],
    apply: Apply,
) -> None:  # fmt: skip
    """Writes the facts by `apply`, and moves the cursors of the projection `name`. Raises CursorMoved,
    Misbehaves, and errors of PostgreSQL and `apply`; then nothing is written.
    """
    async with connection.transaction():
        await _mark(connection, name, schema, moves)
        if facts:
            before = await _state(connection)
            await _apply(connection, single_facts(facts), apply)
            _compare(before, await _state(connection))
        await _move(connection, name, schema, moves)


async def _mark(
    connection: AsyncConnection[Any], name: str, schema: str, moves: Mapping[int, tuple[Cursor, Cursor]]
) -> None:
    query = sql.SQL(
        "UPDATE {} SET frozen = true WHERE projection = %s AND shard = %s AND seq = %s AND next_offset = %s "
        "AND NOT frozen"
    ).format(sql.Identifier(schema, "projection_cursors"))
    for shard in sorted(moves):
        old, _ = moves[shard]
        if (await connection.execute(query, (name, shard, old.seq, old.next_offset))).rowcount != 1:
            raise CursorMoved(
                f"{name}, shard {shard}: the cursor is no longer at seq {old.seq}, offset {old.next_offset} "
                "of this version"
            )


async def _apply(connection: AsyncConnection[Any], facts: Sequence[Fact], apply: Apply) -> None:
    try:
        await apply(connection, facts)
    except psycopg.Error as error:
        what = _what_was_refused(error)
        if what is None:
            raise
        raise Misbehaves(f"its `apply` {what} ({str(error).splitlines()[0]})") from error
    status = connection.info.transaction_status
    if status == TransactionStatus.UNKNOWN:
        raise psycopg.OperationalError("the connection was lost while `apply` wrote")
    if status != TransactionStatus.INTRANS:
        raise Misbehaves(f"its `apply` {_ENDINGS[status]}")


_ENDINGS: Final = {
    TransactionStatus.IDLE: "ended the transaction",
    TransactionStatus.INERROR: "continued after PostgreSQL had refused a statement: its earlier rows "
    "are lost",
    TransactionStatus.ACTIVE: "left a statement running",
}


def _what_was_refused(error: psycopg.Error) -> str | None:
    """What `apply` did, if that is the cause of the error; else None."""
    if error.diag.sqlstate == _COMMITTED:
        return "ended the transaction, or checked constraints, before its cursor moved"
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return "ended the transaction, and wrote after it"
    if isinstance(error, psycopg.errors.ObjectInUse) and "projection_cursors" in str(error):
        return "changed the table of its cursors"
    if error.diag.sqlstate is None and "forbidden within a Transaction" in str(error):
        return "ended the transaction"
    return None


async def _state(connection: AsyncConnection[Any]) -> _SessionState:
    row = await (await connection.execute(_STATE)).fetchone()
    assert row is not None
    return _SessionState(*row)


def _compare(before: _SessionState, after: _SessionState) -> None:
    if after.transaction != before.transaction:
        raise Misbehaves("its `apply` ended the transaction, and began another one")
    if after.search_path != before.search_path:
        raise Misbehaves(
            f"its `apply` changed search_path from {before.search_path!r} to {after.search_path!r}"
        )
    if (after.role, after.user) != (before.role, before.user):
        raise Misbehaves(f"its `apply` changed the role from {before.role} to {after.role}")


async def _move(
    connection: AsyncConnection[Any], name: str, schema: str, moves: Mapping[int, tuple[Cursor, Cursor]]
) -> None:
    query = sql.SQL(
        "UPDATE {} SET seq = %s, head = %s, next_offset = %s, term = %s, owner = %s, moved_at = now(), "
        "frozen = false "
        "WHERE projection = %s AND shard = %s AND seq = %s AND head = %s AND next_offset = %s AND frozen"
    ).format(sql.Identifier(schema, "projection_cursors"))
    for shard in sorted(moves):
        old, new = moves[shard]
        values = (
            new.seq,
            new.head,
            new.next_offset,
            new.term,
            new.owner,
            name,
            shard,
            old.seq,
            old.head,
            old.next_offset,
        )
        try:
            moved = (await connection.execute(query, values)).rowcount
        except psycopg.errors.UndefinedTable:
            moved = 0
        if moved != 1:
            raise Misbehaves(f"its `apply` changed or removed its own cursor of shard {shard}")
