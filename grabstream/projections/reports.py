"""What the schema of a system has for people who ask in SQL: reports (views over several read models), the
functions `user_transfers` and `seqs_between`, comments on every view and column, and triggers that refuse
writes through views.

All of it is computed from `definitions/reports.sql`, the files of the functions and `dictionary.py` there.
`grabstream init` brings it up to date, and so does every switch of a read model.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from psycopg import AsyncConnection, sql
from psycopg.errors import (
    DependentObjectsStillExist,
    InvalidTableDefinition,
    UndefinedColumn,
    UndefinedTable,
)

from grabstream.projections.database.grants import Grant, give, grants_of
from grabstream.projections.definitions import sql_text
from grabstream.projections.definitions.dictionary import VIEWS

log = logging.getLogger(__name__)

_statement = re.compile(r"^CREATE OR REPLACE VIEW (\w+) AS.*?;$", re.MULTILINE | re.DOTALL)
#: A report that needs no counts of refusals, so that schemas of replays have it, too.
RESULTS_BY_WEEK: Final = "results_by_week"
#: The trigger on rows fires for no row if none matches, so that on the statement refuses, too.
_TRIGGERS: Final = {
    "read_only_rows": "INSTEAD OF INSERT OR UPDATE OR DELETE ON {} FOR EACH ROW",
    "read_only": "BEFORE INSERT OR UPDATE OR DELETE ON {} FOR EACH STATEMENT",
}


@cache
def reports() -> dict[str, str]:
    """The reports by name, in the order in which they are created: SQL that replaces them."""
    return {match[1]: match[0] for match in _statement.finditer(sql_text("reports"))}


def user_transfers() -> str:
    """SQL that makes or replaces the function `user_transfers` in the current schema, in a transaction."""
    return sql_text("user_transfers")


def functions() -> str:
    """SQL that makes or replaces all functions in the current schema, in a transaction."""
    return user_transfers() + sql_text("seqs_between")


def digest(text: str) -> str:
    """The digest under which `view_texts` has the text of views."""
    return hashlib.sha256(text.encode()).hexdigest()


async def record_text(connection: AsyncConnection[Any], schema: str, home: str, text: str) -> None:
    """Records that the views of the schema `home` have this text."""
    await connection.execute(
        sql.SQL(
            "INSERT INTO {} (schema, sha256) VALUES (%s, %s) ON CONFLICT (schema) DO UPDATE SET sha256 = "
            "excluded.sha256"
        ).format(sql.Identifier(schema, "view_texts")),
        (home, digest(text)),
    )


async def recorded_texts(connection: AsyncConnection[Any], schema: str) -> dict[str, str]:
    """The digest of the views of each schema, by its name."""
    rows = await connection.execute(
        sql.SQL("SELECT schema, sha256 FROM {}").format(sql.Identifier(schema, "view_texts"))
    )
    return dict(await rows.fetchall())


async def report_grants(connection: AsyncConnection[Any], schema: str) -> dict[str, list[Grant]]:
    """The grants on each report."""
    return {name: await grants_of(connection, schema, name) for name in reports()}


async def drop_reports(connection: AsyncConnection[Any], schema: str) -> None:
    """Drops the reports, so that a view that they read can be created again; raises psycopg's
    DependentObjectsStillExist.
    """
    for name in reversed(reports()):
        await connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(sql.Identifier(schema, name)))


async def renew_reports(
    connection: AsyncConnection[Any], schema: str, granted: Mapping[str, list[Grant]]
) -> None:
    """Creates missing reports, with `granted`, and replaces those whose text has changed, and the functions
    with them, in the caller's transaction. Then comments on all views, and makes them refuse writes.

    Reports that need a read model of a newer definition are left out until that is rebuilt.
    """
    [path] = await (await connection.execute("SELECT current_setting('search_path')")).fetchone() or [""]
    await connection.execute(
        "SELECT set_config('search_path', %s, false)", (sql.Identifier(schema).as_string(connection),)
    )
    text = "".join((functions(), *reports().values()))
    present = await _views(connection, schema) & reports().keys()
    changed = (await recorded_texts(connection, schema)).get(schema) != digest(text)
    if changed or len(present) < len(reports()):
        await connection.execute(functions().encode())
        try:
            async with connection.transaction():
                await _create_reports(connection, schema, granted)
                await record_text(connection, schema, schema, text)
        except (UndefinedColumn, UndefinedTable) as error:
            log.info("reports wait for `grabstream rebuild all`: %s", error.diag.message_primary)
        except DependentObjectsStillExist as error:
            log.warning(
                "reports stay as they are, since views of other programs depend on columns that change: %s",
                error.diag.message_detail,
            )
    await _refuse_writes(connection, schema)
    await describe(connection, schema)
    await connection.execute("SELECT set_config('search_path', %s, false)", (path,))


async def _create_reports(
    connection: AsyncConnection[Any], schema: str, granted: Mapping[str, list[Grant]]
) -> None:
    """Replaces the reports in place, so that views of other programs stay; if their columns change, drops
    them first.
    """
    try:
        async with connection.transaction():
            for statement in reports().values():
                await connection.execute(statement.encode())
    except InvalidTableDefinition:
        await drop_reports(connection, schema)
        for statement in reports().values():
            await connection.execute(statement.encode())
    for name in reports():
        await give(connection, schema, name, granted.get(name, []))


async def _views(connection: AsyncConnection[Any], schema: str) -> set[str]:
    rows = await connection.execute("SELECT viewname FROM pg_views WHERE schemaname = %s", (schema,))
    return {name for (name,) in await rows.fetchall()}


async def _refuse_writes(connection: AsyncConnection[Any], schema: str) -> None:
    rows = await connection.execute(
        "SELECT c.relname, array_agg(t.tgname::text) FROM pg_class AS c LEFT JOIN pg_trigger AS t ON "
        "t.tgrelid = c.oid "
        "WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'v' AND c.relname = ANY(%s) GROUP BY 1",
        (sql.Identifier(schema).as_string(connection), list(VIEWS)),
    )
    for view, triggers in await rows.fetchall():
        for trigger, event in _TRIGGERS.items():
            if trigger not in triggers:
                await connection.execute(
                    sql.SQL(f"CREATE TRIGGER {trigger} {event} EXECUTE FUNCTION {{}}()").format(
                        sql.Identifier(schema, view), sql.Identifier(schema, "refuse_write")
                    )
                )


async def describe(connection: AsyncConnection[Any], schema: str) -> None:
    """Comments on the views of a schema and on their columns, where they have other comments or none, in the
    caller's transaction.
    """
    rows = await connection.execute(
        "SELECT c.relname, a.attname, CASE WHEN a.attname IS NULL THEN obj_description(c.oid, 'pg_class') "
        "ELSE col_description(c.oid, a.attnum) END "
        "FROM pg_class AS c JOIN LATERAL (SELECT attname::text, attnum FROM pg_attribute WHERE attrelid = "
        "c.oid AND attnum > 0 UNION ALL SELECT NULL, 0) AS a ON true "
        "WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'v' AND c.relname = ANY(%s)",
        (sql.Identifier(schema).as_string(connection), list(VIEWS)),
    )
    statements = []
    for name, column, comment in await rows.fetchall():
        view = VIEWS[name]
        text = view.comment if column is None else view.comments.get(column)
        if text is not None and text != comment:
            kind = sql.SQL("VIEW") if column is None else sql.SQL("COLUMN")
            what = sql.Identifier(schema, name, *(() if column is None else (column,)))
            statements.append(sql.SQL("COMMENT ON {} {} IS {}").format(kind, what, sql.Literal(text)))
    if statements:
        await connection.execute(sql.SQL("; ").join(statements))
