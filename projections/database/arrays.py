"""Rows for PostgreSQL, many at once: COPY, and array literals for `unnest`.

psycopg looks at every element of a list by itself, which costs more than all the rest of a row.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from psycopg import AsyncConnection


def text_array(values: Sequence[str]) -> str:
    """The literal of a `text[]`; pass it with a cast, `%s::text[]`."""
    inside = '","'.join(values)
    # Names of accounts, users and assets need no escaping by construction; one that does must still not
    # become two.
    if "\\" in inside or inside.count('"') != 2 * (len(values) - 1):
        inside = '","'.join(value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return f'{{"{inside}"}}' if values else "{}"


def integer_array(values: Iterable[int]) -> str:
    """The literal of a `bigint[]`, or of a `numeric[]` for sums without a bound; pass it with a cast,
    `%s::bigint[]`.
    """
    return f"{{{','.join(map(str, values))}}}"


def update_by(
    table: str, keys: Sequence[str], sums: Sequence[str], replaced: Sequence[str], texts: Collection[str],
    more: Mapping[str, str] = {},
) -> bytes:  # fmt: skip
    """An UPDATE of many rows from arrays, one a column: `keys`, then `sums` (added), then `replaced` (where
    not NULL).

    Columns are `bigint` but for keys and `texts`. `more` are columns set otherwise: in these expressions `t`
    is the table's row, `c` the change. All names are those of our own tables.
    """
    columns = [*keys, *sums, *replaced]
    arrays = ", ".join(f"%s::{'text' if name in keys or name in texts else 'bigint'}[]" for name in columns)
    changes = (
        {name: f"t.{name} + c.{name}" for name in sums}
        | {name: f"coalesce(c.{name}, t.{name})" for name in replaced}
        | {**more}
    )
    assignments = ", ".join(f"{name} = {value}" for name, value in changes.items())
    where = " AND ".join(f"t.{key} = c.{key}" for key in keys)
    changed = f"unnest({arrays}) AS c ({', '.join(columns)})"
    statement = f"UPDATE {table} AS t SET {assignments} FROM {changed} WHERE {where}"  # noqa: S608
    return statement.encode()


def copy_text(value: str) -> str:
    """A value as a field of COPY's text form. JSON has no raw tabs or newlines: a backslash is all that COPY
    would take for its own.
    """
    return value.replace("\\", "\\\\")


async def copy_rows(connection: AsyncConnection[Any], table: str, rows: Sequence[str]) -> None:
    """COPYs lines of COPY's text form into a table, named with its columns; the names are our own."""
    if rows:
        async with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN".encode()) as copy:
            await copy.write("".join(rows))
