"""The read models made once more, in temporary tables, and compared with those that are shown: row by row,
and view by view.

What is made is what a rebuild would make, by the same functions; what is compared stands in the snapshot of
the caller's transaction, so neither traffic nor how far the workers are makes a difference. Nobody else sees
the tables, and nothing stays of them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, sql

from grabstream.projections import versions
from grabstream.projections.checking.difference import TableDifference, compare
from grabstream.projections.cursors import Fact
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.projections.versions import Version

#: Tables of balances whose rows follow from the events of their own offer.
OF_AN_OFFER: Final = ("grabs_1", "payments_1")
#: The audit trail is compared byte for byte while the journal is read: it is not made once more.
MADE: Final = ("ledger", "balances")
FACTS_AT_ONCE: Final = 4_000

_primary_key = re.compile(r"ALTER TABLE (\w+)\s+ADD PRIMARY KEY \(([^)]+)\)")


class Anew:
    """Read models of one system, in the caller's transaction; that must be REPEATABLE READ."""

    def __init__(self, connection: AsyncConnection[Any], schema: str, made: Sequence[str] = MADE) -> None:
        self._connection = connection
        self._schema = schema
        self._made = made
        self._waiting: defaultdict[str, list[Fact]] = defaultdict(list)
        self._own = ""
        self.live: dict[str, Version] = {}
        #: Why one could not be made, in words: the journal leads to what PostgreSQL refuses.
        self.refused: dict[str, str] = {}

    async def begin(self) -> None:
        """Makes the tables."""
        found = await versions.versions(self._connection, self._schema)
        self.live = {one.projection: one for one in found if one.state == "live"}
        await self._connection.execute(
            "SELECT set_config('search_path', %s, true)", (f"pg_temp, {self._schema}",)
        )
        for name in self._made:
            definition = definition_of(name)
            for part in ("tables", "staging"):
                await self._connection.execute(definition.parts[part].encode())
        [self._own] = await (
            await self._connection.execute("SELECT pg_my_temp_schema()::regnamespace::text")
        ).fetchone() or [""]

    async def take(self, name: str, fact: Fact) -> None:
        """Adds an event to one of them; those of a shard come in their order."""
        waiting = self._waiting[name]
        waiting.append(fact)
        if len(waiting) >= FACTS_AT_ONCE:
            await self._load(name)

    async def _load(self, name: str) -> None:
        facts = self._waiting.pop(name, [])
        if facts and name not in self.refused:
            await self._attempt(name, READ_MODELS[name].load, facts)

    async def _attempt(self, name: str, function: Any, *arguments: Any) -> None:
        try:
            async with self._connection.transaction():
                await function(self._connection, *arguments)
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            self.refused[name] = (
                f"{name}: PostgreSQL refuses what the journal leads to: {str(error).splitlines()[0]}"
            )

    async def finish(self) -> None:
        """Adds up what was loaded."""
        await self._connection.execute("SET LOCAL work_mem = '64MB'")
        for name in self._made:
            await self._load(name)
            for function in (READ_MODELS[name].finish, _complete(name)):
                if name not in self.refused:
                    await self._attempt(name, function)

    async def differences(self, name: str) -> tuple[int, list[str]]:
        """Rows that were compared, and what differs, in words, a few rows of each table with a count of the
        others.
        """
        live = self.live[name]
        made = live._replace(schema=self._own, definition=definition_of(name).number)
        found = await compare(self._connection, definition_of(name), live, made, definition_of(name).tables)
        return sum(one.rows_new for one in found), [line for one in found for line in _in_words(one)]

    async def offer_differences(self, offer: str) -> list[str]:
        """What differs in the rows of one offer, all of whose events were taken, in words."""
        live, definition = self.live["balances"], definition_of("balances")
        made = live._replace(schema=self._own, definition=definition.number)
        found = await compare(self._connection, definition, live, made, OF_AN_OFFER, offer)
        return [line for one in found for line in _in_words(one)]

    def other_definition(self, name: str) -> str | None:
        """In words, that the live version is another release's, whose rows this one cannot make; None where
        it is this one's.
        """
        live, known = self.live[name].definition, definition_of(name).number
        return (
            None
            if live == known
            else f"its rows are those of definition {live}, this release knows {known}: use the other's "
            "verify"
        )

    async def views(self) -> tuple[int, list[str]]:
        """How many views there are, and those that do not show what their definition says."""
        problems: list[str] = []
        count = 0
        for name in PROJECTIONS:
            live = self.live[name]
            if self.other_definition(name) is not None:
                continue
            shown, by_version = (
                await _definitions(self._connection, self._schema),
                await _definitions(self._connection, live.schema),
            )
            async with self._connection.transaction(force_rollback=True):
                if name not in self._made:
                    await self._connection.execute(definition_of(name).parts["tables"].encode())
                await self._connection.execute(definition_of(name).parts["views"].encode())
                wanted = await _definitions(self._connection, self._own)
            for view, text in wanted.items():
                count += 1
                if by_version.get(view) != text:
                    problems.append(f"view {live.schema}.{view}: is not what the definition of {name} says")
                elif (what := await self._not_shown(view, live, shown.get(view))) is not None:
                    problems.append(f"view {self._schema}.{view}: {what}")
        return count, problems

    async def _not_shown(self, view: str, live: Version, shown: str | None) -> str | None:
        """Why the view that readers know is not the version's own."""
        if shown is None:
            return "is not there"
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
            [wanted] = (await _definitions(self._connection, self._own, "shown")).values()
        return None if wanted == shown else f"does not show {live.schema}.{view} as it is"


def _complete(name: str) -> Any:
    async def complete(connection: AsyncConnection[Any]) -> None:
        definition = definition_of(name)
        for table in definition.staging:
            await connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(table)))
        # What else is constrained holds for the rows that are shown: equal rows are within it.
        for table, key in _primary_key.findall(definition.parts["constraints"]):
            statement = sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})")
            columns = sql.SQL(", ").join(sql.Identifier(name.strip()) for name in key.split(","))
            await connection.execute(statement.format(sql.Identifier(table), columns))
        for table in definition.tables:
            await connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(table)))

    return complete


async def _definitions(connection: AsyncConnection[Any], schema: str, view: str = "") -> dict[str, str]:
    """The text of each view of a schema, without the schema's name, as PostgreSQL writes it when it reads
    what it wrote before: a view that an older release made was written so once more or less than ours.
    """
    found = await connection.execute(
        "SELECT c.relname, pg_get_viewdef(c.oid) FROM pg_class AS c WHERE c.relnamespace = %s::regnamespace "
        "AND c.relkind = 'v' "
        "AND (%s = '' OR c.relname = %s)",
        (sql.Identifier(schema).as_string(connection), view, view),
    )
    texts = {}
    for name, text in await found.fetchall():
        async with connection.transaction(force_rollback=True):
            await connection.execute(b"CREATE VIEW pg_temp.written_again AS " + text.encode())
            [again] = await (
                await connection.execute("SELECT pg_get_viewdef('pg_temp.written_again'::regclass)")
            ).fetchone() or [""]
        texts[name] = again.replace(f"{schema}.", "")
    return texts


def _in_words(difference: TableDifference) -> list[str]:
    """A line for each example, and one for the rows that are not told."""
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
            lines.append(f"{where}: the row is not there")
        elif example.get("only") == "old":
            lines.append(f"{where}: the row is there, and no event makes it")
        else:
            changed: Mapping[str, Sequence[Any]] = example["changed"]
            lines.append(
                f"{where}: "
                + ", ".join(
                    f"{name} is {is_}, the journal makes it {was}" for name, (is_, was) in changed.items()
                )
            )
    others = difference.missing + difference.extra + difference.rows_changed - len(lines)
    return [*lines, f"{_shown(difference.table)}: {others:,} more rows differ"] if others > 0 else lines


def _shown(table: str) -> str:
    return table.rpartition("_")[0]
