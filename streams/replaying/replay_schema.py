"""Read models of a replay: a complete set of tables and views in a schema of their own, that no worker goes
on with.

Rows, and the cursors of all projections, move in one transaction, so that a replay which was stopped goes on
where it was. The schema says what it was made from in its table `replay`. Views that cannot be exact for what
was asked for are renamed to `<name>_partial`.
"""

import logging
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import msgspec
import psycopg
from psycopg import AsyncConnection, sql

from grabstream.models.journal import Cursor
from grabstream.projections import audit, cursors, ledger
from grabstream.projections.balances import users as balances
from grabstream.projections.database.locks import Held, hold, release
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.versions import create_flat, may_be_version
from grabstream.streams.history.chunks import Point
from grabstream.streams.replaying.selection import Wanted
from grabstream.streams.replaying.sinks import ReplayRefused, RowSink

log = logging.getLogger(__name__)

#: How long the removal of a schema waits for others that look into it, such as a dump: the next call removes
#: it.
DROP_LOCK_MS: Final = 2_000
is_schema: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}\Z").match
_APPLY: Final = {"ledger": ledger.apply, "balances": balances.apply, "audit": audit.apply}

# Only a session that says it replays this schema moves its cursors; a worker that was given the schema by
# mistake is stopped.
_GUARD: Final = """
CREATE TABLE replay (
    definition jsonb NOT NULL, until jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    temporary boolean NOT NULL DEFAULT false
);
CREATE FUNCTION only_a_replay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(current_setting('grabstream.replay', true), '') <> TG_TABLE_SCHEMA THEN
        RAISE EXCEPTION
            'schema % holds a bounded replay, which no worker goes on with: '
            'set GRAB_SCHEMA to the system''s own',
            TG_TABLE_SCHEMA;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER only_a_replay AFTER INSERT OR UPDATE ON projection_cursors
    FOR EACH STATEMENT EXECUTE FUNCTION only_a_replay();
"""
# What a user's slice knows of an offer: what was said of it, not what others took.
_OFFERS_OF_USERS: Final = (
    "CREATE VIEW offers AS SELECT offer, shard, kind, issuer, funding, asset, total, units, title, state, "
    "opened_at, opens_at, closes_at, "
    "closed_at, retired_at, reason, seed_sha256, seed, terms FROM offers_partial"
)
_BALANCES_OF_USERS: Final = "CREATE VIEW balances AS SELECT * FROM balances_partial WHERE user_id IN ({})"


class Definition(NamedTuple):
    """What a replay is made from; only `until` may be moved on later."""

    prefix: str
    source: str
    shards: tuple[int, ...]
    wanted: Wanted
    until: Mapping[int, Point]

    def fixed(self) -> dict[str, Any]:
        """What cannot be changed later, for JSON."""
        return {
            "prefix": self.prefix, "source": self.source, "shards": list(self.shards),
            "offers": sorted(self.wanted.offers),
            "users": sorted(self.wanted.users),
            "definitions": {name: definition_of(name).number for name in PROJECTIONS},
        }  # fmt: skip

    def bounds(self) -> dict[str, list[int | None]]:
        """The points up to which it goes, by shard, for JSON."""
        return {str(shard): [point.seq, point.at] for shard, point in self.until.items()}


def partial_views(definition: Definition, shards: int) -> list[str]:
    """Names of the views that cannot be exact; `shards` is how many the system has.

    Limits are counted for now, and across a campaign; accounts and balances, across shards. (Demand there is
    none: refusals are no events.)
    """
    wanted, whole = definition.wanted, len(definition.shards) == shards
    names = set()
    if definition.until or not wanted.everything or not whole:
        names.add("limits")
    if wanted.offers or not whole:
        names |= {"accounts", "balances"}
    if wanted.users:
        names |= {"accounts", "offers", "waiting"}
    return sorted(names)


class SchemaSink(RowSink):
    """Applies events to the read models of a schema. Made by `open_schema`."""

    def __init__(self, connection: AsyncConnection[Any], schema: str, positions: dict[int, Cursor]) -> None:
        async def use(projection: str) -> None:
            await use_projection(connection, schema, projection)

        super().__init__(connection, _APPLY, use, positions)

    async def grabs(self, users: Sequence[str]) -> list[tuple[str, str]]:
        """The grabs of these users that are there already."""
        found = await self._connection.execute(
            "SELECT offer, grab FROM grabs WHERE user_id = ANY(%s)", (list(users),)
        )
        return [(offer, grab) for offer, grab in await found.fetchall()]


async def use_projection(connection: AsyncConnection[Any], schema: str, projection: str) -> None:
    """Makes unqualified names mean those of a projection's tables in a schema: the only place that says where
    they are.
    """
    await use_schema(connection, schema)


@asynccontextmanager
async def open_schema(
    postgres: str, schema: str, system: str, shards: int, definition: Definition, temporary: bool = False
) -> AsyncIterator[SchemaSink]:
    """The schema, made if it is not there, at the position it was left at. `system` is the schema of the live
    read models.

    Nobody else writes or removes it until the end; of a `temporary` one, `temporary_schema` sees to that.
    Raises Refused when the schema is something else, or was made from something else, or is being written.
    """
    async with await connect(postgres, system) as connection:
        if not temporary:
            try:
                await hold(connection, _lock(schema), f"replay into {schema}")
            except Held as held:
                raise ReplayRefused(f"schema {schema} is being written by another replay: {held}") from None
        known = await check_schema(connection, schema, system, definition)
        await connection.execute("SELECT set_config('grabstream.replay', %s, false)", (schema,))
        # What PostgreSQL forgets in a crash it forgets together with the cursors.
        await connection.execute("SET synchronous_commit = off")
        if not known:
            await _make(connection, schema, shards, definition)
        await use_schema(connection, schema)
        await connection.execute("UPDATE replay SET until = %s, at = now()", (_json(definition.bounds()),))
        # One of an older release has no such column, and is none that may go.
        if temporary or (known and await _is_temporary(connection, schema)):
            await connection.execute("UPDATE replay SET temporary = %s", (temporary,))
        if known and "limits" not in partial_views(definition, shards):
            # It was bounded before, and goes on to the end now.
            await connection.execute("ALTER VIEW IF EXISTS limits_partial RENAME TO limits")
        yield SchemaSink(connection, schema, await cursors.load(connection, "audit"))


async def check_schema(
    connection: AsyncConnection[Any], schema: str, system: str, definition: Definition
) -> bool:
    """Whether the schema is there already, as a replay that this one may go on with; raises Refused when it
    is anything else.
    """
    if schema == system or schema in ("public", "information_schema") or schema.startswith("pg_"):
        raise ReplayRefused(f"schema {schema} is not for replays: name another")
    if may_be_version(system, schema):
        raise ReplayRefused(f"schema {schema} is named as the system's own read models are: name another")
    kept = await read_definition(connection, schema)
    if kept is None:
        found = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
        if await found.fetchone():
            raise ReplayRefused(
                f"schema {schema} is there and holds no replay: name another, or remove it with `DROP SCHEMA "
                f"{schema} CASCADE`"
            )
        return False
    fixed, until = kept
    remove = f"name another schema, or remove this one with `DROP SCHEMA {schema} CASCADE`"
    if fixed != definition.fixed():
        # One of a release before says nothing of definitions: its tables are others.
        known = {"definitions": "of an older release"} | fixed
        changed = ", ".join(
            f"{name} {known.get(name)}"
            for name, value in definition.fixed().items()
            if known.get(name) != value
        )
        raise ReplayRefused(f"schema {schema} holds another replay, made with {changed}: {remove}")
    for shard in definition.shards:
        old, new = until.get(str(shard)), definition.bounds().get(str(shard))
        if new is not None and (
            old is None
            or [value is None for value in old] != [value is None for value in new]
            or _less(new, old)
        ):
            raise ReplayRefused(
                f"schema {schema} holds a replay that goes beyond this one in shard {shard}: {remove}"
            )
    return True


def _less(new: list[int | None], old: list[int | None]) -> bool:
    return any(
        mine is not None and known is not None and mine < known for mine, known in zip(new, old, strict=True)
    )


async def read_definition(
    connection: AsyncConnection[Any], schema: str
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What the replay in a schema was made from, and up to where; None when the schema holds none."""
    if not (
        await (
            await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.replay",))
        ).fetchone()
        or (False,)
    )[0]:
        return None
    found = await connection.execute(
        sql.SQL("SELECT definition, until FROM {}").format(sql.Identifier(schema, "replay"))
    )
    row = await found.fetchone()
    return (row[0], row[1]) if row else None


@asynccontextmanager
async def temporary_schema(postgres: str, system: str) -> AsyncIterator[str]:
    """The name of a schema that nobody has, to be opened as a temporary one; it is removed at the end,
    whatever happens.

    What is left of such schemas by processes that were killed is removed first.
    """
    start = f"{system}__at_"
    schema = start + secrets.token_hex(4)
    # A connection of its own: the one that writes may be cancelled in the middle.
    async with await connect(postgres, system) as connection:
        await connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{DROP_LOCK_MS}ms",))
        await _drop_left_behind(connection, start)
        await hold(connection, _lock(schema), f"at in {schema}")
        try:
            yield schema
        finally:
            await _drop(connection, schema)


async def _drop_left_behind(connection: AsyncConnection[Any], start: str) -> None:
    found = await connection.execute(
        "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", (start,)
    )
    for (schema,) in await found.fetchall():
        with suppress(Held):
            await hold(connection, _lock(schema), f"at removes {schema}")
            try:
                # Looked at behind the lock: who has made it, or keeps it, is not about it now.
                if await _is_temporary(connection, schema):
                    await _drop(connection, schema)
            finally:
                await release(connection, _lock(schema))


async def _drop(connection: AsyncConnection[Any], schema: str) -> None:
    try:
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    except psycopg.errors.LockNotAvailable:
        log.warning("schema %s is looked at by another session; the next `at` removes it", schema)


async def _is_temporary(connection: AsyncConnection[Any], schema: str) -> bool:
    if await read_definition(connection, schema) is None:
        return False
    query = sql.SQL("SELECT coalesce((to_jsonb(r) ->> 'temporary')::boolean, false) FROM {} AS r").format(
        sql.Identifier(schema, "replay")
    )
    return bool((await (await connection.execute(query)).fetchone() or (False,))[0])


def _lock(schema: str) -> str:
    """The name of the lock that who writes a schema holds, or who looks into one that is removed
    afterwards.
    """
    return f"grabstream-replay-{schema}"


async def _make(connection: AsyncConnection[Any], schema: str, shards: int, definition: Definition) -> None:
    async with connection.transaction():
        await create_flat(connection, schema, shards)
        await connection.execute(_GUARD)
        await connection.execute(
            "INSERT INTO replay (definition, until) VALUES (%s, %s)",
            (_json(definition.fixed()), _json(definition.bounds())),
        )
        users, partial = definition.wanted.users, partial_views(definition, shards)
        # Those of users are made anew below: exact, in a smaller form.
        for view in sorted({*partial, *(("balances",) if users else ())}):
            names = sql.Identifier(schema, view), sql.Identifier(f"{view}_partial")
            await connection.execute(sql.SQL("ALTER VIEW {} RENAME TO {}").format(*names))
        if users:
            await connection.execute(_OFFERS_OF_USERS.encode())
        if users and "balances" not in partial:
            names_of_users = sql.SQL(", ").join(map(sql.Literal, users))
            await connection.execute(sql.SQL(_BALANCES_OF_USERS).format(names_of_users))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
