"""Many rows at once for PostgreSQL: COPY, and array literals for `unnest`.

psycopg converts each element of a list separately, which costs more than all other work for a row.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection


def text_array(values: Sequence[str]) -> str:
    """The literal of a `text[]`; pass it with a cast, `%s::text[]`."""
    inside = '","'.join(values)
    # Few values need escaping: payments, and their accounts.
    if "\\" in inside or inside.count('"') != 2 * (len(values) - 1):
        inside = '","'.join(value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return f'{{"{inside}"}}' if values else "{}"


def integer_array(values: Sequence[int]) -> str:
    """The literal of a `bigint[]`, or of a `numeric[]` for sums without a bound; pass it with a cast,
    `%s::bigint[]`.
    """
    # As JSON, in a seventh of the time of `str` for each.
    return f"{{{msgspec.json.encode(values)[1:-1].decode()}}}"


def in_order(keys: Sequence[str], *columns: Sequence[Any]) -> list[list[Any]]:
    """Columns of rows, `keys` first, with the rows sorted by their key. Rows of the same key stay in their
    order.
    """
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return [list(map(column.__getitem__, order)) for column in (keys, *columns)]


def update_by(
    table: str, keys: Sequence[str], sums: Sequence[str], replaced: Sequence[str], texts: Collection[str],
    more: Mapping[str, str] = {},
) -> bytes:  # fmt: skip
    """An UPDATE of many rows from one array for each column: `keys`, then `sums` (added), then `replaced`
    (set if not NULL).

    Columns are `bigint`, except keys and `texts`. `more` are other columns and their expressions, in which
    `t` is the row of the table and `c` the change. No name comes from input.
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
    """A text without tabs and newlines, such as JSON or a payment, as a field in the text format of COPY:
    only backslashes are escaped.
    """
    return value.replace("\\", "\\\\")


async def copy_rows(connection: AsyncConnection[Any], table: str, rows: Sequence[str]) -> None:
    """Copies lines in the text format of COPY into `table`, which also names the columns. No name comes from
    input.
    """
    if rows:
        async with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN".encode()) as copy:
            await copy.write("".join(rows))
