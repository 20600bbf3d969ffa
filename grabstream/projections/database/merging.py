"""Writing rows by their keys: MERGE that adds to rows of a table, and inserts those that it lacks; and the
plans of such statements.
"""

from collections.abc import Sequence
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.errors import UniqueViolation

#: How often rows of others may come first. Each time, all rows that they have committed are updated next.
RACES_MAX: Final = 100
_PLANS: Final = (
    b"SELECT set_config(name, value, %s) FROM (VALUES ('plan_cache_mode', 'force_generic_plan'), "
    b"('enable_seqscan', 'off'), ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'), ('jit', 'off')) "
    b"AS settings (name, value)"
)


async def plan_by_keys(connection: AsyncConnection[Any], local: bool = False) -> None:
    """Makes the statements of a session (with `local`, of its transaction) find rows by their keys.

    The planner prefers to scan a table while it is empty, when most plans are made, and these are kept while
    it grows; and for certain lengths of arrays. Plans without a scan look expensive to it where a table has
    no index, which must not trigger their compilation.
    """
    await connection.execute(_PLANS, (local,))


def merge_of(table: str, keys: Sequence[str], sums: Sequence[str]) -> bytes:
    """The MERGE from one array for each column, `keys` (text), then `sums` (numeric, added). No name comes
    from input.
    """
    columns = [*keys, *sums]
    arrays = ", ".join(f"%s::{'text' if name in keys else 'numeric'}[]" for name in columns)
    return (
        f"MERGE INTO {table} AS t USING unnest({arrays}) AS c ({', '.join(columns)}) "  # noqa: S608
        f"ON {' AND '.join(f't.{key} = c.{key}' for key in keys)} "
        f"WHEN MATCHED THEN UPDATE SET {', '.join(f'{name} = t.{name} + c.{name}' for name in sums)} "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(columns)}) "
        f"VALUES ({', '.join(f'c.{name}' for name in columns)})"
    ).encode()


async def merge(connection: AsyncConnection[Any], statement: bytes, arrays: Sequence[str]) -> None:
    """Executes a MERGE of `merge_of` in the caller's transaction. Rows must be sorted by their keys, so that
    two transactions rarely deadlock.

    Raises psycopg.errors.CheckViolation like an UPDATE, or for an inserted row: unlike an upsert, it does not
    test the change alone against a CHECK of a row that exists.
    """
    for _ in range(RACES_MAX):
        try:
            async with connection.transaction():
                await connection.execute(statement, arrays)
            return
        except UniqueViolation:
            # Another transaction has inserted a row meanwhile, which a new statement sees.
            continue
    await connection.execute(statement, arrays)
