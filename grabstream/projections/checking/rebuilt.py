"""The read models, rebuilt in temporary tables and compared with the live versions row by row and view by
view.

The functions of a rebuild make the tables. The comparison reads the snapshot of the caller's transaction, so
traffic and the progress of workers do not change its result. Only this connection sees the tables, and they
end with it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, sql

from grabstream.models.bounds import counted
from grabstream.projections import versions
from grabstream.projections.checking.difference import TableDifference, compare
from grabstream.projections.cursors import Fact
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.projections.versions import Version

#: Tables of balances whose rows follow from the events of their own offer.
OFFER_TABLES: Final = ("grabs_1", "payments_1")
#: The read models that are rebuilt. The audit trail is compared with the journal byte for byte instead.
REBUILT: Final = ("ledger", "balances")
FACTS_AT_ONCE: Final = 4_000

_function = re.compile(r"^CREATE OR REPLACE FUNCTION (\w+)\(", re.MULTILINE)
_primary_key = re.compile(r"ALTER TABLE (\w+)\s+ADD PRIMARY KEY \(([^)]+)\)")


class RebuiltModels:
    """Rebuilt read models of one system, in the caller's transaction, which must be REPEATABLE READ."""

    def __init__(
        self, connection: AsyncConnection[Any], schema: str, rebuilt: Sequence[str] = REBUILT
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._rebuilt = rebuilt
        self._pending: defaultdict[str, list[Fact]] = defaultdict(list)
        self._temporary_schema = ""
        self.live: dict[str, Version] = {}
        #: projection → why it could not be rebuilt: PostgreSQL refused the rows that follow from the journal.
        self.refused: dict[str, str] = {}

    async def begin(self) -> None:
        """Creates the tables."""
        all_versions = await versions.versions(self._connection, self._schema)
        self.live = {version.projection: version for version in all_versions if version.state == "live"}
        await self._connection.execute(
            "SELECT set_config('search_path', %s, true)", (f"pg_temp, {self._schema}",)
        )
        for name in self._rebuilt:
            definition = definition_of(name)
            for part in ("tables", "staging"):
                await self._connection.execute(definition.parts[part].encode())
        [self._temporary_schema] = await (
            await self._connection.execute("SELECT pg_my_temp_schema()::regnamespace::text")
        ).fetchone() or [""]

    async def take(self, name: str, fact: Fact) -> None:
        """Adds an event to a read model. Events of a shard must be added in order."""
        pending = self._pending[name]
        pending.append(fact)
        if len(pending) >= FACTS_AT_ONCE:
            await self._load(name)

    async def _load(self, name: str) -> None:
        facts = self._pending.pop(name, [])
        if facts and name not in self.refused:
            await self._attempt(name, READ_MODELS[name].load, facts)

    async def _attempt(self, name: str, function: Any, *arguments: Any) -> None:
        try:
            async with self._connection.transaction():
                await function(self._connection, *arguments)
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            self.refused[name] = (
                f"{name}: PostgreSQL refuses the rows that follow from the journal: "
                f"{str(error).splitlines()[0]}"
            )

    async def finish(self) -> None:
        """Loads the pending events and computes the sums."""
        await self._connection.execute("SET LOCAL work_mem = '64MB'")
        for name in self._rebuilt:
            await self._load(name)
            for function in (READ_MODELS[name].finish, _complete(name)):
                if name not in self.refused:
                    await self._attempt(name, function)

    async def differences(self, name: str) -> tuple[int, list[str]]:
        """The number of compared rows, and the differences as text: a few rows of each table, and the number
        of the other rows.
        """
        live, definition = self.live[name], definition_of(name)
        rebuilt = live._replace(schema=self._temporary_schema, definition=definition.number)
        async with self._connection.transaction(force_rollback=True):
            if definition.compared_views:
                await self._connection.execute(_views_text(definition.parts["views"]).encode())
            tables = await compare(self._connection, definition, live, rebuilt, definition.compared)
        lines = [line for table in tables for line in _difference_lines(table)]
        return sum(table.rows_new for table in tables), lines

    async def offer_differences(self, offer: str) -> list[str]:
        """The differences in the rows of one offer as text. All events of the offer must have been added."""
        live, definition = self.live["balances"], definition_of("balances")
        rebuilt = live._replace(schema=self._temporary_schema, definition=definition.number)
        tables = await compare(self._connection, definition, live, rebuilt, OFFER_TABLES, offer)
        return [line for table in tables for line in _difference_lines(table)]

    def other_definition(self, name: str) -> str | None:
        """A message if the live version has a definition of another release, whose rows this release cannot
        rebuild; else None.
        """
        live, known = self.live[name].definition, definition_of(name).number
        return (
            None
            if live == known
            else f"its rows have definition {live}, this release has definition {known}: run `verify` "
            "of the other release"
        )

    async def views(self) -> tuple[int, list[str]]:
        """The number of views, and a message for each view that differs from its definition."""
        problems: list[str] = []
        count = 0
        for name in PROJECTIONS:
            live = self.live[name]
            if self.other_definition(name) is not None:
                continue
            in_main, in_version = (
                await _definitions(self._connection, self._schema),
                await _definitions(self._connection, live.schema),
            )
            async with self._connection.transaction(force_rollback=True):
                if name not in self._rebuilt:
                    await self._connection.execute(definition_of(name).parts["tables"].encode())
                await self._connection.execute(_views_text(definition_of(name).parts["views"]).encode())
                expected = await _definitions(self._connection, self._temporary_schema)
            for view, text in expected.items():
                count += 1
                if in_version.get(view) != text:
                    problems.append(f"view {live.schema}.{view}: differs from the definition of {name}")
                elif (problem := await self._problem_of(view, live, in_main.get(view))) is not None:
                    problems.append(f"view {self._schema}.{view}: {problem}")
        return count, problems

    async def _problem_of(self, view: str, live: Version, in_main: str | None) -> str | None:
        """Why the view of the main schema does not show the view of the live version; None if it does."""
        if in_main is None:
            return "is missing"
        async with self._connection.transaction(force_rollback=True):
            columns = await (
                await self._connection.execute(
                    "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY "
                    "attnum",
                    (sql.Identifier(live.schema, view).as_string(self._connection),),
                )
            ).fetchall()
            names = sql.SQL(", ").join(sql.Identifier(name) for (name,) in columns)
            home = sql.Identifier(live.schema, view)
            await self._connection.execute(
                sql.SQL("CREATE VIEW pg_temp.shown AS SELECT {} FROM {}").format(names, home)
            )
            [expected] = (await _definitions(self._connection, self._temporary_schema, "shown")).values()
        return None if expected == in_main else f"does not show {live.schema}.{view} as it is"


def _views_text(views: str) -> str:
    """The text of views and functions for the temporary schema: PostgreSQL does not look for functions there,
    unless they are called by its name.
    """
    for name in set(_function.findall(views)):
        views = re.sub(rf"\b{name}\(", f"pg_temp.{name}(", views)
    return views


def _complete(name: str) -> Any:
    async def complete(connection: AsyncConnection[Any]) -> None:
        definition = definition_of(name)
        for table in definition.staging:
            await connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(table)))
        # The live rows satisfy the other constraints, so equal rows do, too.
        for table, key in _primary_key.findall(definition.parts["constraints"]):
            statement = sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})")
            columns = sql.SQL(", ").join(sql.Identifier(name.strip()) for name in key.split(","))
            await connection.execute(statement.format(sql.Identifier(table), columns))
        for table in definition.tables:
            await connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(table)))

    return complete


async def _definitions(connection: AsyncConnection[Any], schema: str, view: str = "") -> dict[str, str]:
    """The text of each view of a schema without the name of the schema. PostgreSQL formats the text of a view
    again when a view is created from it, so each text is formatted once more here: else a view of an older
    release could differ only because it was formatted more or less often.
    """
    rows = await connection.execute(
        "SELECT c.relname, pg_get_viewdef(c.oid) FROM pg_class AS c WHERE c.relnamespace = %s::regnamespace "
        "AND c.relkind = 'v' "
        "AND (%s = '' OR c.relname = %s)",
        (sql.Identifier(schema).as_string(connection), view, view),
    )
    texts = {}
    for name, text in await rows.fetchall():
        async with connection.transaction(force_rollback=True):
            await connection.execute(b"CREATE VIEW pg_temp.formatted AS " + text.encode())
            [formatted] = await (
                await connection.execute("SELECT pg_get_viewdef('pg_temp.formatted'::regclass)")
            ).fetchone() or [""]
        texts[name] = formatted.replace(f"{schema}.", "").replace("pg_temp.", "")
    return texts


def _difference_lines(difference: TableDifference) -> list[str]:
    """A line for each example, and one line with the number of other rows that differ."""
    if difference.columns:
        return [
            f"{_shown(difference.table)}: column {name} is {where} of the two"
            for name, where in difference.columns.items()
        ]
    lines = []
    for example in difference.examples:
        where = (
            f"{_shown(difference.table)} "
            f"({', '.join(f'{name} {value}' for name, value in example['key'].items())})"
        )
        if example.get("only") == "new":
            lines.append(f"{where}: the row is missing")
        elif example.get("only") == "old":
            lines.append(f"{where}: the row exists, but no event creates it")
        else:
            changed: Mapping[str, Sequence[Any]] = example["changed"]
            lines.append(
                f"{where}: "
                + ", ".join(
                    f"{name} is {live}, the journal makes it {rebuilt}"
                    for name, (live, rebuilt) in changed.items()
                )
            )
    others = difference.missing + difference.extra + difference.rows_changed - len(lines)
    more = f"{_shown(difference.table)}: {counted(others, 'further rows')} with differences"
    return [*lines, more] if others > 0 else lines


def _shown(table: str) -> str:
    return table.removesuffix("_1")
