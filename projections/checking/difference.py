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
    table, with or without differences, and views in place of the tables that they stand for.
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
            differences.append(
                await _compare_table(
                    connection, table, old, new, columns_old[table], columns_new[table], declared, offer
                )
            )
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


async def _compare_table(
    connection: AsyncConnection[Any],
    table: str,
    old: Version,
    new: Version,
    columns_old: Mapping[str, bool],
    columns_new: Mapping[str, bool],
    declared: frozenset[str],
    offer: str | None,
) -> TableDifference:
    whole = f"{table}.*" in declared
    keys = [name for name, in_key in columns_new.items() if in_key]
    shared = [name for name in columns_new if name in columns_old and name not in keys]
    declared_shared = [name for name in shared if whole or f"{table}.{name}" in declared]
    others = [name for name in shared if name not in declared_shared]
    only = {name: "only in the old" for name in columns_old if name not in columns_new}
    only |= {name: "only in the new" for name in columns_new if name not in columns_old}
    declared_only = {name for name in only if whole or f"{table}.{name}" in declared}

    of_offer = sql.SQL("") if offer is None else sql.SQL(" WHERE offer = {}").format(sql.Literal(offer))
    sides = [
        sql.SQL("(SELECT * FROM {}{})").format(sql.Identifier(version.schema, table), of_offer)
        for version in (old, new)
    ]
    joined = sql.SQL("{} AS o FULL JOIN {} AS n ON {}").format(*sides, _all(keys, "="))
    key = sql.Identifier(keys[0])
    both = sql.SQL("o.{0} IS NOT NULL AND n.{0} IS NOT NULL").format(key)
    differs = [
        sql.SQL("o.{0} IS DISTINCT FROM n.{0}").format(sql.Identifier(name))
        for name in (*declared_shared, *others)
    ]
    wrong = sql.SQL(" OR ").join(differs[len(declared_shared) :]) if others else sql.SQL("false")
    counts = [
        sql.SQL("count(*) FILTER (WHERE n.{} IS NULL)").format(key),
        sql.SQL("count(*) FILTER (WHERE o.{} IS NULL)").format(key),
        sql.SQL("count(*) FILTER (WHERE {} AND ({}))").format(both, wrong),
        *(sql.SQL("count(*) FILTER (WHERE {} AND {})").format(both, condition) for condition in differs),
    ]
    row = await (
        await connection.execute(sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(counts), joined))
    ).fetchone()
    assert row is not None
    missing, extra, rows_changed, *by_column = row
    rows_old, rows_new = [await _count(connection, side) for side in sides]
    # A view may have a key twice: such rows pair with the row of the other side, so they are counted here.
    surplus = (rows_old - missing) - (rows_new - extra)
    missing, extra = missing + max(surplus, 0), extra + max(-surplus, 0)
    counted = dict(zip((*declared_shared, *others), by_column, strict=True))
    difference = TableDifference(
        table=table, rows_old=rows_old, rows_new=rows_new, rows_changed=rows_changed,
        changed={name: counted[name] for name in others if counted[name]},
        declared={name: counted[name] for name in declared_shared if counted[name]} |
        dict.fromkeys(sorted(declared_only), rows_new), columns={name: where for name, where in only.items()
        if name not in declared_only},
    )  # fmt: skip
    if whole and missing + extra:
        difference.declared["*"] = missing + extra
    elif not whole:
        difference.missing, difference.extra = missing, extra
    if difference.missing or difference.extra or rows_changed:
        rows_wrong = sql.SQL("({} AND ({}))").format(both, wrong)
        if not whole:
            rows_wrong += sql.SQL(" OR o.{0} IS NULL OR n.{0} IS NULL").format(key)
        difference.examples = await _examples(connection, joined, keys, others, rows_wrong)
        if surplus:
            only_in, side = ("old", sides[0]) if surplus > 0 else ("new", sides[1])
            difference.examples += [
                {"key": dict(zip(keys, key, strict=True)), "only": only_in}
                for key in await _keys_twice(connection, side, keys)
            ]
    return difference


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


def _all(keys: list[str], operator: str) -> sql.Composable:
    return sql.SQL(" AND ").join(
        sql.SQL(f"o.{{0}} {operator} n.{{0}}").format(sql.Identifier(name)) for name in keys
    )


async def _examples(
    connection: AsyncConnection[Any],
    joined: sql.Composable,
    keys: list[str],
    columns: list[str],
    where: sql.Composable,
) -> list[dict[str, Any]]:
    """The first rows by key that differ, at most EXAMPLES_MAX: the key, and by column (old, new)."""
    by_key = [sql.SQL("coalesce(o.{0}, n.{0})").format(sql.Identifier(name)) for name in keys]
    pairs = [sql.SQL("o.{0}, n.{0}").format(sql.Identifier(name)) for name in columns]
    presence = sql.SQL("o.{0} IS NOT NULL, n.{0} IS NOT NULL").format(sql.Identifier(keys[0]))
    query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT {}").format(
        sql.SQL(", ").join([*by_key, presence, *pairs]),
        joined,
        where,
        sql.SQL(", ").join(by_key),
        sql.Literal(EXAMPLES_MAX),
    )
    examples = []
    for row in await (await connection.execute(query)).fetchall():
        key, (in_old, in_new), values = row[: len(keys)], row[len(keys) : len(keys) + 2], row[len(keys) + 2 :]
        example: dict[str, Any] = {"key": dict(zip(keys, key, strict=True))}
        if in_old and in_new:
            pair = zip(columns, values[::2], values[1::2], strict=True)
            example["changed"] = {
                name: (_shown(before), _shown(after)) for name, before, after in pair if before != after
            }
        else:
            example["only"] = "old" if in_old else "new"
        examples.append(example)
    return examples


def _shown(value: Any) -> Any:
    # Sums without a bound are `numeric` in SQL, but always integers.
    return value.hex() if isinstance(value, bytes) else int(value) if isinstance(value, Decimal) else value
