"""Read models of a replay: a complete set of tables and views in a separate schema, which no worker writes.

Rows, and the cursors of all projections, move in one transaction, so a stopped replay resumes where it was.
The table `replay` records the source of the schema. Views that cannot be exact for the request are renamed to
`<name>_partial`.
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
from grabstream.projections import cursors
from grabstream.projections.cursors import Fact
from grabstream.projections.database.locks import LockTaken, lock_or_raise, release
from grabstream.projections.database.merging import plan_by_keys
from grabstream.projections.database.migrate import drop_statement, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.projections.reports import describe
from grabstream.projections.versions import create_flat, may_be_version
from grabstream.streams.follower import Chunk, Follower, Group
from grabstream.streams.history.chunks import Point
from grabstream.streams.replaying.selection import Wanted
from grabstream.streams.replaying.sinks import ReplayRefused, events_in

log = logging.getLogger(__name__)

#: How long the removal of a schema waits for sessions that use it, such as a dump; otherwise the next call
#: removes it.
DROP_LOCK_MS: Final = 2_000
is_schema: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}\Z").match

# Only a session that has declared to replay this schema may move its cursors. A worker that was given the
# schema by mistake is refused.
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
# The columns of an offer in a selection by user: its terms and state, not what other users took.
_OFFERS_OF_USERS: Final = (
    "CREATE VIEW offers AS SELECT offer, shard, kind, issuer, funding, asset, total, units, title, state, "
    "opened_at, opens_at, closes_at, "
    "closed_at, retired_at, reason, seed_sha256, seed, terms, opened_time, opens_time, closes_time, "
    "closed_time, retired_time, campaign, campaign_timezone, total_amount, "
    "known_timezone FROM offers_partial"
)
_BALANCES_OF_USERS: Final = "CREATE VIEW balances AS SELECT * FROM balances_partial WHERE user_id IN ({})"


class ReplayDefinition(NamedTuple):
    """The source of a replay; only `until` may be later in a later call."""

    prefix: str
    source: str
    shards: tuple[int, ...]
    wanted: Wanted
    until: Mapping[int, Point]

    def fixed(self) -> dict[str, Any]:
        """The part that cannot be changed later, for JSON."""
        return {
            "prefix": self.prefix, "source": self.source, "shards": list(self.shards),
            "offers": sorted(self.wanted.offers),
            "users": sorted(self.wanted.users),
            "definitions": {name: definition_of(name).number for name in PROJECTIONS},
        }  # fmt: skip

    def bounds(self) -> dict[str, list[int | None]]:
        """The points at which it ends, by shard, for JSON."""
        return {str(shard): [point.seq, point.at] for shard, point in self.until.items()}


def partial_views(definition: ReplayDefinition, shards: int) -> list[str]:
    """Names of the views that cannot be exact; `shards` is their number in the system.

    Limits are counted for the present time, and across a campaign; accounts and balances, across shards.
    (There is no demand, because refusals are not events.)
    """
    wanted, whole = definition.wanted, len(definition.shards) == shards
    names = set()
    if definition.until or not wanted.everything or not whole:
        names.add("limits")
    if wanted.offers or not whole:
        names |= {"accounts", "balances"}
    if wanted.users:
        names |= {"accounts", "offers", "waiting", "fairness", "flows", "revenue", "results_by_week"}
    return sorted(names)


def what_users_get(definition: ReplayDefinition, shards: int) -> str | None:
    """The effect of a selection by users on views that keep their name; None without one."""
    if not definition.wanted.users:
        return None
    balances = (
        "there is no balances, because a balance is of all offers and shards"
        if "balances" in partial_views(definition, shards)
        else "balances has these users only"
    )
    return (
        "Of the users alone: offers has the terms and the state of an offer, not what was taken of it; "
        f"{balances}."
    )


class SchemaSink:
    """Applies events to the read models of a schema, which the connection uses; `open_schema` makes it. Rows,
    and the cursors of all of them, move in one transaction. `positions` are the cursors, of all the same.
    """

    def __init__(self, connection: AsyncConnection[Any], positions: dict[int, Cursor]) -> None:
        self.positions = positions
        self._connection = connection
        self._follower = Follower(self._save)

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        """Takes events, and returns how many; commits when enough are waiting."""
        await self._follower.take(chunk._replace(facts=facts))
        return events_in(facts)

    async def flush(self) -> None:
        """Commits; raises psycopg's errors if the database refuses."""
        await self._follower.flush()

    async def _save(self, group: Group) -> None:
        moves, facts = group.moves, group.facts
        async with self._connection.transaction():
            for name, model in READ_MODELS.items():
                await cursors.write(self._connection, name, moves, facts, model.apply)
        self.positions.update((shard, after) for shard, (_, after) in moves.items())

    async def grabs(self, users: Sequence[str]) -> list[tuple[str, str]]:
        """The grabs of these users that the schema already has."""
        rows = await self._connection.execute(
            "SELECT offer, grab FROM grabs WHERE user_id = ANY(%s)", (list(users),)
        )
        return [(offer, grab) for offer, grab in await rows.fetchall()]


@asynccontextmanager
async def open_schema(
    postgres: str,
    schema: str,
    system: str,
    shards: int,
    definition: ReplayDefinition,
    temporary: bool = False,
) -> AsyncIterator[SchemaSink]:
    """A sink for the schema, which is created if it does not exist, and resumed if it does. `system` is the
    schema of the live read models.

    The schema is locked until the end; `temporary_schema` locks a `temporary` one. Raises ReplayRefused if
    the schema contains something else, was made from something else, or is being written.
    """
    async with await connect(postgres, system) as connection:
        if not temporary:
            try:
                await lock_or_raise(connection, _lock(schema), f"replay into {schema}")
            except LockTaken as held:
                raise ReplayRefused(f"schema {schema} is being written by another replay: {held}") from None
        exists = await check_schema(connection, schema, system, definition)
        await connection.execute("SELECT set_config('grabstream.replay', %s, false)", (schema,))
        # If PostgreSQL loses a commit in a crash, it loses the cursors as well.
        await connection.execute("SET synchronous_commit = off")
        if not exists:
            await _make(connection, schema, shards, definition)
        await use_schema(connection, schema)
        await plan_by_keys(connection)
        await connection.execute("UPDATE replay SET until = %s, at = now()", (_json(definition.bounds()),))
        await connection.execute("UPDATE replay SET temporary = %s", (temporary,))
        if exists and "limits" not in partial_views(definition, shards):
            # It was bounded before, and continues to the end now.
            await connection.execute("ALTER VIEW IF EXISTS limits_partial RENAME TO limits")
        yield SchemaSink(connection, await cursors.load(connection, "audit"))


async def check_schema(
    connection: AsyncConnection[Any], schema: str, system: str, definition: ReplayDefinition
) -> bool:
    """Whether the schema exists and contains a replay that this call can resume; raises ReplayRefused if it
    contains anything else.
    """
    if schema == system or schema in ("public", "information_schema") or schema.startswith("pg_"):
        raise ReplayRefused(f"schema {schema} cannot be used for replays: name another")
    if may_be_version(system, schema):
        raise ReplayRefused(f"schema {schema} is named like the system's read models: name another")
    kept = await read_definition(connection, schema)
    if kept is None:
        rows = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
        if await rows.fetchone():
            raise ReplayRefused(
                f"schema {schema} exists and contains no replay: name another, or remove it with "
                f"`{drop_statement(schema)}`"
            )
        return False
    fixed, until = kept
    remove = f"name another schema, or remove this one with `{drop_statement(schema)}`"
    if fixed != definition.fixed():
        changed = ", ".join(
            f"{name} {fixed.get(name)}"
            for name, value in definition.fixed().items()
            if fixed.get(name) != value
        )
        raise ReplayRefused(f"schema {schema} contains another replay, made with {changed}: {remove}")
    for shard in definition.shards:
        old, new = until.get(str(shard)), definition.bounds().get(str(shard))
        if new is not None and (
            old is None
            or [value is None for value in old] != [value is None for value in new]
            or _less(new, old)
        ):
            raise ReplayRefused(
                f"schema {schema} contains a replay that ends later than this one in shard {shard}: {remove}"
            )
    return True


def _less(new: list[int | None], old: list[int | None]) -> bool:
    return any(
        new_value is not None and old_value is not None and new_value < old_value
        for new_value, old_value in zip(new, old, strict=True)
    )


async def read_definition(
    connection: AsyncConnection[Any], schema: str
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The source and end of the replay in a schema; None if the schema contains none."""
    if not (
        await (
            await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.replay",))
        ).fetchone()
        or (False,)
    )[0]:
        return None
    rows = await connection.execute(
        sql.SQL("SELECT definition, until FROM {}").format(sql.Identifier(schema, "replay"))
    )
    row = await rows.fetchone()
    return (row[0], row[1]) if row else None


@asynccontextmanager
async def temporary_schema(postgres: str, system: str) -> AsyncIterator[str]:
    """The name of an unused schema, to be opened as a temporary one; the schema is removed at the end, also
    after an error.

    Temporary schemas of processes that were killed are removed first.
    """
    start = f"{system}__at_"
    schema = start + secrets.token_hex(4)
    # A separate connection, because the writing one may be cancelled in the middle.
    async with await connect(postgres, system) as connection:
        await connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{DROP_LOCK_MS}ms",))
        await _drop_leftovers(connection, start)
        await lock_or_raise(connection, _lock(schema), f"at in {schema}")
        try:
            yield schema
        finally:
            await _drop(connection, schema)


async def _drop_leftovers(connection: AsyncConnection[Any], start: str) -> None:
    rows = await connection.execute(
        "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", (start,)
    )
    for (schema,) in await rows.fetchall():
        with suppress(LockTaken):
            await lock_or_raise(connection, _lock(schema), f"at removes {schema}")
            try:
                # Checked under the lock: no process creates or keeps the schema now.
                if await _is_temporary(connection, schema):
                    await _drop(connection, schema)
            finally:
                await release(connection, _lock(schema))


async def _drop(connection: AsyncConnection[Any], schema: str) -> None:
    try:
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    except psycopg.errors.LockNotAvailable:
        log.warning("schema %s is in use by another session; the next `at` removes it", schema)


async def _is_temporary(connection: AsyncConnection[Any], schema: str) -> bool:
    if await read_definition(connection, schema) is None:
        return False
    query = sql.SQL("SELECT temporary FROM {}").format(sql.Identifier(schema, "replay"))
    return bool((await (await connection.execute(query)).fetchone() or (False,))[0])


def _lock(schema: str) -> str:
    """The name of the lock on a schema that is being written, or that is removed afterwards."""
    return f"grabstream-replay-{schema}"


async def _make(
    connection: AsyncConnection[Any], schema: str, shards: int, definition: ReplayDefinition
) -> None:
    async with connection.transaction():
        await create_flat(connection, schema, shards)
        await connection.execute(_GUARD)
        await describe(connection, schema)
        await connection.execute(
            "INSERT INTO replay (definition, until) VALUES (%s, %s)",
            (_json(definition.fixed()), _json(definition.bounds())),
        )
        users, partial = definition.wanted.users, partial_views(definition, shards)
        # For users, these views are created again below: exact, in a smaller form.
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
