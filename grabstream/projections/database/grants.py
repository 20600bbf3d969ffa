"""Grants: those on a view, read before it is dropped, and restored after it is created; and those of a
version of a read model, for the version that takes its place.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql


class Grant(NamedTuple):
    """A privilege that a role other than the owner has: the role as SQL, and a word of PostgreSQL. `column`
    is None for a privilege on all columns.
    """

    role: str
    privilege: str
    with_option: bool
    column: str | None = None


#: The fields of a Grant, from a row of `aclexplode` and a column. regrole quotes names of roles.
_FIELDS: Final = sql.SQL(
    "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, privilege_type, is_grantable, attname"
)
#: The rights on tables, views and sequences, whole (`attname` is NULL) and on their columns.
_RELATIONS: Final = sql.SQL(
    "pg_class AS c, LATERAL (SELECT relacl AS rights, NULL::text AS attname UNION ALL "
    "SELECT attacl, attname FROM pg_attribute WHERE attrelid = c.oid AND NOT attisdropped) AS of_relation, "
    "aclexplode(rights)"
)


async def grants_of(connection: AsyncConnection[Any], schema: str, view: str) -> list[Grant]:
    """The grants on a view and its columns; none if it does not exist."""
    rows = await connection.execute(
        sql.SQL("SELECT {} FROM {} WHERE c.oid = to_regclass(%s) AND grantee <> relowner").format(
            _FIELDS, _RELATIONS
        ),
        (sql.Identifier(schema, view).as_string(connection),),
    )
    return [Grant(*row) for row in await rows.fetchall()]


async def give(
    connection: AsyncConnection[Any], schema: str, view: str, grants: Iterable[Grant], kind: str = "TABLE"
) -> None:
    """Gives grants on a view or another relation; not those on columns that it does not have."""
    name = sql.Identifier(schema, view)
    rows = await connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND NOT attisdropped",
        (name.as_string(connection),),
    )
    columns = {None, *(column for (column,) in await rows.fetchall())}
    for grant in grants:
        if grant.column in columns:
            await _give(connection, kind, name, grant)


async def pass_on(connection: AsyncConnection[Any], from_schema: str, to_schema: str) -> None:
    """Gives the grants on a schema and on its tables, views and sequences, and on their columns, for those of
    the same names in another schema.
    """
    rows = await connection.execute(
        sql.SQL(
            "SELECT {} FROM pg_namespace, LATERAL (SELECT NULL AS attname) AS whole, aclexplode(nspacl) "
            "WHERE nspname = %s AND grantee <> nspowner"
        ).format(_FIELDS),
        (from_schema,),
    )
    for row in await rows.fetchall():
        await _give(connection, "SCHEMA", sql.Identifier(to_schema), Grant(*row))
    rows = await connection.execute(
        sql.SQL(
            "SELECT relname, CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, {} FROM {} "
            "WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(from)s) "
            "AND relname IN (SELECT relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace "
            "WHERE nspname = %(to)s) AND grantee <> relowner"
        ).format(_FIELDS, _RELATIONS),
        {"from": from_schema, "to": to_schema},
    )
    granted: dict[tuple[str, str], list[Grant]] = {}
    for name, kind, *grant in await rows.fetchall():
        granted.setdefault((name, kind), []).append(Grant(*grant))
    for (name, kind), grants in granted.items():
        await give(connection, to_schema, name, grants, kind)


async def _give(connection: AsyncConnection[Any], kind: str, of: sql.Identifier, grant: Grant) -> None:
    option = " WITH GRANT OPTION" if grant.with_option else ""
    column = sql.SQL("({})").format(sql.Identifier(grant.column)) if grant.column else sql.SQL("")
    await connection.execute(
        sql.SQL(f"GRANT {grant.privilege} {{}} ON {kind} {{}} TO {grant.role}{option}").format(column, of)
    )
