"""Grants: those on a view, read before it is dropped, and restored after it is created; and those of a
version of a read model, for the version that takes its place.
"""

from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql


class Grant(NamedTuple):
    """A privilege that a role other than the owner has: the role as SQL, and a word of PostgreSQL."""

    role: str
    privilege: str
    with_option: bool


#: The fields of a Grant, from a row of `aclexplode`. regrole quotes names of roles.
_FIELDS: Final = sql.SQL(
    "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, privilege_type, is_grantable"
)


async def grants_of(connection: AsyncConnection[Any], schema: str, view: str) -> list[Grant]:
    """The grants on a view; none if it does not exist."""
    rows = await connection.execute(
        sql.SQL(
            "SELECT {} FROM pg_class, aclexplode(relacl) WHERE oid = to_regclass(%s) AND grantee <> relowner"
        ).format(_FIELDS),
        (sql.Identifier(schema, view).as_string(connection),),
    )
    return [Grant(*row) for row in await rows.fetchall()]


async def give(connection: AsyncConnection[Any], schema: str, view: str, grants: list[Grant]) -> None:
    """Gives grants on a view."""
    for grant in grants:
        await _give(connection, "TABLE", sql.Identifier(schema, view), grant)


async def pass_on(connection: AsyncConnection[Any], from_schema: str, to_schema: str) -> None:
    """Gives the grants on a schema and on its tables, views and sequences for those of the same names in
    another schema.
    """
    rows = await connection.execute(
        sql.SQL(
            "SELECT kind, name, {} FROM ("
            "SELECT 'SCHEMA' AS kind, '' AS name, nspowner AS owner, nspacl AS rights FROM pg_namespace "
            "WHERE nspname = %(from)s UNION ALL "
            "SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, relname, relowner, relacl "
            "FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(from)s) "
            "AND relname IN (SELECT relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace "
            "WHERE nspname = %(to)s)) AS named, aclexplode(rights) WHERE grantee <> owner"
        ).format(_FIELDS),
        {"from": from_schema, "to": to_schema},
    )
    for kind, name, *grant in await rows.fetchall():
        of = sql.Identifier(to_schema, name) if name else sql.Identifier(to_schema)
        await _give(connection, kind, of, Grant(*grant))


async def _give(connection: AsyncConnection[Any], kind: str, of: sql.Identifier, grant: Grant) -> None:
    option = " WITH GRANT OPTION" if grant.with_option else ""
    await connection.execute(
        sql.SQL(f"GRANT {grant.privilege} ON {kind} {{}} TO {grant.role}{option}").format(of)
    )
