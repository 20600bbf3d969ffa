"""The differences between two versions of a read model, row by row: counts, columns and examples. Declared
changes are counted separately.

Both versions are read in the caller's transaction, in which they must have the same cursors.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection, sql

from grabstream.projections.definitions import Definition
from grabstream.projections.versions import Version

EXAMPLES_MAX: Final = 3


class TableDifference(msgspec.Struct, kw_only=True):
    """The differences of one table. `missing` rows are only in the old version, `extra` rows only in the new
    one; `changed` has the number of rows that differ in each column.

    `declared` counts the differences in columns (and `*`: rows) that the definition declares as changed.
    `columns` are columns that only one version has. An example has the key of a row and, by column, (old,
    new).
    """

    table: str
    rows_old: int = 0
    rows_new: int = 0
    missing: int = 0
    extra: int = 0
    rows_changed: int = 0
    changed: dict[str, int] = {}
    declared: dict[str, int] = {}
    columns: dict[str, str] = {}
    examples: list[dict[str, Any]] = []

    @property
    def undeclared(self) -> bool:
        """Whether there is a difference that the definition does not declare."""
        return bool(self.missing or self.extra or self.rows_changed or self.columns)


async def compare(
    connection: AsyncConnection[Any],
    definition: Definition,
    old: Version,
    new: Version,
    tables: Sequence[str] | None = None,
    offer: str | None = None,
) -> list[TableDifference]:
    """Compares the tables, or all tables of both versions; with `offer`, only its rows. The result has every
    table, with or without differences, and views in place of their tables.
    """
    declared = definition.declared_since(old.definition)
    columns_old, columns_new = (
        await _columns(connection, old, definition),
        await _columns(connection, new, definition),
    )
    differences = []
    for table in sorted(columns_old.keys() | columns_new.keys() if tables is None else tables):
        keys = {name for name, in_key in columns_new.get(table, {}).items() if in_key}
        if table in columns_old and keys and keys <= columns_old[table].keys():
            both = _ComparedTable(table, old, new, columns_old[table], columns_new[table], declared, offer)
            differences.append(await _compare_table(connection, both))
        else:
            # Rows cannot be matched if the old table lacks the key of the new table.
            differences += [
                await _only_in(connection, table, version, old, declared)
                for version, columns in ((old, columns_old), (new, columns_new))
                if table in columns
            ]
    return differences


async def _columns(
    connection: AsyncConnection[Any], version: Version, definition: Definition
) -> dict[str, dict[str, bool]]:
    """The compared tables and views of a version: their columns in order, and whether each belongs to the
    key.
    """
    views = definition.compared_views
    rows = await connection.execute(
        "SELECT c.relname, a.attname, coalesce(a.attnum = ANY(i.indkey), false) FROM pg_class AS c "
        "JOIN pg_attribute AS a ON a.attrelid = c.oid LEFT JOIN pg_index AS i ON i.indrelid = c.oid AND "
        "i.indisprimary "
        "WHERE c.relnamespace = %s::regnamespace AND (c.relkind = 'r' OR c.relkind = 'v' AND c.relname = "
        "ANY(%s)) AND a.attnum > 0 AND NOT a.attisdropped "
        # Times of views are computed from their other columns, and views of older versions lack them.
        "AND NOT (c.relkind = 'v' AND right(a.attname, 5) = '_time') "
        "AND c.relname NOT IN ('projection_cursors', 'stopped_shards') ORDER BY c.relname, a.attnum",
        (sql.Identifier(version.schema).as_string(connection), list(views)),
    )
    tables: dict[str, dict[str, bool]] = {}
    for table, column, in_key in await rows.fetchall():
        tables.setdefault(table, {})[column] = in_key or (table in views and column in views[table].keys)
    for view in views.values():
        for table in view.tables:
            tables.pop(table, None)
    return tables


async def _only_in(
    connection: AsyncConnection[Any], table: str, version: Version, old: Version, declared: frozenset[str]
) -> TableDifference:
    """The differences of a table whose rows are in one version only: all are missing, or all are extra."""
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(version.schema, table))
    [rows] = await (await connection.execute(query)).fetchone() or [0]
    in_old = version.version == old.version
    counts = {"rows_old": rows} if in_old else {"rows_new": rows}
    if f"{table}.*" in declared:
        return TableDifference(table=table, declared={"*": rows}, **counts)
    undeclared = {"missing": rows} if in_old else {"extra": rows}
    return TableDifference(
        table=table, columns={"*": "only in the old" if in_old else "only in the new"}, **counts, **undeclared
    )


class _ComparedTable:
    """A table that both versions have: its columns, and SQL that pairs their rows, or those of an offer, by
    key.
    """

    def __init__(
        self, name: str, old: Version, new: Version, columns_old: Mapping[str, bool],
        columns_new: Mapping[str, bool], declared: frozenset[str], offer: str | None,
    ) -> None:  # fmt: skip
        self.name = name
        #: Whether rows may be missing or extra.
        self.is_declared = f"{name}.*" in declared
        may_change = {
            column
            for column in (*columns_old, *columns_new)
            if self.is_declared or f"{name}.{column}" in declared
        }
        self.keys = [column for column, in_key in columns_new.items() if in_key]
        shared = [column for column in columns_new if column in columns_old and column not in self.keys]
        self.compared = [column for column in shared if column not in may_change]
        self.declared = [column for column in shared if column in may_change]
        only = {column: "only in the old" for column in columns_old if column not in columns_new}
        only |= {column: "only in the new" for column in columns_new if column not in columns_old}
        self.only = {column: where for column, where in only.items() if column not in may_change}
        self.only_declared = sorted(may_change & only.keys())

        condition = sql.SQL("") if offer is None else sql.SQL(" WHERE offer = {}").format(sql.Literal(offer))
        self.sides = [
            sql.SQL("(SELECT * FROM {}{})").format(sql.Identifier(version.schema, name), condition)
            for version in (old, new)
        ]
        same_key = [sql.SQL("o.{0} = n.{0}").format(sql.Identifier(column)) for column in self.keys]
        on = sql.SQL(" AND ").join(same_key)
        self.pairs = sql.SQL("{} AS o FULL JOIN {} AS n ON {}").format(*self.sides, on)
        key = sql.Identifier(self.keys[0])
        self.is_missing, self.is_extra = (sql.SQL(f"{side}.{{}} IS NULL").format(key) for side in "no")
        differ = [_differs(column) for column in self.compared]
        self.is_changed = self.in_both(sql.SQL(" OR ").join(differ or [sql.SQL("false")]))

    def in_both(self, condition: sql.Composable) -> sql.Composable:
        """A condition on rows that both versions have."""
        return sql.SQL("(NOT {} AND NOT {} AND ({}))").format(self.is_missing, self.is_extra, condition)


def _differs(column: str) -> sql.Composable:
    return sql.SQL("o.{0} IS DISTINCT FROM n.{0}").format(sql.Identifier(column))


async def _compare_table(connection: AsyncConnection[Any], table: _ComparedTable) -> TableDifference:
    difference, surplus = await _counted(connection, table)
    if table.is_declared:
        if others := difference.missing + difference.extra:
            difference.declared["*"] = others
        difference.missing = difference.extra = 0
    if difference.missing or difference.extra or difference.rows_changed:
        difference.examples = await _examples(connection, table)
        if surplus:
            only, side = ("old", table.sides[0]) if surplus > 0 else ("new", table.sides[1])
            difference.examples += [
                {"key": dict(zip(table.keys, key, strict=True)), "only": only}
                for key in await _keys_twice(connection, side, table.keys)
            ]
    return difference


async def _counted(connection: AsyncConnection[Any], table: _ComparedTable) -> tuple[TableDifference, int]:
    """The numbers of rows that differ, and how many more rows with a duplicate key the old version has than
    the new one.
    """
    conditions = [table.is_missing, table.is_extra, table.is_changed]
    conditions += [table.in_both(_differs(column)) for column in (*table.compared, *table.declared)]
    counts = [sql.SQL("count(*) FILTER (WHERE {})").format(condition) for condition in conditions]
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(counts), table.pairs)
    row = await (await connection.execute(query)).fetchone()
    assert row is not None
    missing, extra, rows_changed, *by_column = row
    rows_old, rows_new = [await _count(connection, side) for side in table.sides]
    # A view may have a key twice: such rows pair with the row of the other side, so they are counted here.
    surplus = (rows_old - missing) - (rows_new - extra)
    changed = dict(zip((*table.compared, *table.declared), by_column, strict=True))
    difference = TableDifference(
        table=table.name, rows_old=rows_old, rows_new=rows_new, rows_changed=rows_changed,
        missing=missing + max(surplus, 0), extra=extra + max(-surplus, 0), columns=table.only,
        changed={column: changed[column] for column in table.compared if changed[column]},
        declared={column: changed[column] for column in table.declared if changed[column]} |
        dict.fromkeys(table.only_declared, rows_new),
    )  # fmt: skip
    return difference, surplus


async def _count(connection: AsyncConnection[Any], side: sql.Composable) -> int:
    [count] = await (
        await connection.execute(sql.SQL("SELECT count(*) FROM {} AS one").format(side))
    ).fetchone() or [0]
    return int(count)


async def _keys_twice(
    connection: AsyncConnection[Any], side: sql.Composable, keys: list[str]
) -> list[tuple[Any, ...]]:
    """The first keys that occur more than once, at most EXAMPLES_MAX."""
    columns = sql.SQL(", ").join(map(sql.Identifier, keys))
    query = sql.SQL("SELECT {0} FROM {1} AS one GROUP BY {0} HAVING count(*) > 1 ORDER BY {0} LIMIT {2}")
    rows = await connection.execute(query.format(columns, side, sql.Literal(EXAMPLES_MAX)))
    return await rows.fetchall()


async def _examples(connection: AsyncConnection[Any], table: _ComparedTable) -> list[dict[str, Any]]:
    """The first rows by key that differ, at most EXAMPLES_MAX: the key, and by column (old, new)."""
    wrong = [table.is_changed] if table.is_declared else [table.is_changed, table.is_missing, table.is_extra]
    by_key = [sql.SQL("coalesce(o.{0}, n.{0})").format(sql.Identifier(column)) for column in table.keys]
    pairs = [sql.SQL("o.{0}, n.{0}").format(sql.Identifier(column)) for column in table.compared]
    query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT {}").format(
        sql.SQL(", ").join([*by_key, table.is_missing, table.is_extra, *pairs]),
        table.pairs,
        sql.SQL(" OR ").join(wrong),
        sql.SQL(", ").join(by_key),
        sql.Literal(EXAMPLES_MAX),
    )
    examples = []
    for row in await (await connection.execute(query)).fetchall():
        count = len(table.keys)
        key, (is_missing, is_extra), values = row[:count], row[count : count + 2], row[count + 2 :]
        example: dict[str, Any] = {"key": dict(zip(table.keys, key, strict=True))}
        if is_missing or is_extra:
            example["only"] = "old" if is_missing else "new"
        else:
            pair = zip(table.compared, values[::2], values[1::2], strict=True)
            example["changed"] = {
                name: (_shown(before), _shown(after)) for name, before, after in pair if before != after
            }
        examples.append(example)
    return examples


def _shown(value: Any) -> Any:
    # Sums without a bound are `numeric` in SQL, but always integers.
    return value.hex() if isinstance(value, bytes) else int(value) if isinstance(value, Decimal) else value
