"""Grants on views: read before a view is dropped, and given again after it is created."""

from typing import Any, NamedTuple

from psycopg import AsyncConnection, sql


class Grant(NamedTuple):
    """A privilege that a role other than the owner has: the role as SQL, and a word of PostgreSQL."""

    role: str
    privilege: str
    with_option: bool


async def grants_of(connection: AsyncConnection[Any], schema: str, view: str) -> list[Grant]:
    """The grants on a view; none if it does not exist."""
    rows = await connection.execute(
        "SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, privilege_type, "
        "is_grantable "
        "FROM pg_class, aclexplode(relacl) WHERE oid = to_regclass(%s) AND grantee <> relowner",
        (sql.Identifier(schema, view).as_string(connection),),
    )
    return [Grant(*row) for row in await rows.fetchall()]


async def give(connection: AsyncConnection[Any], schema: str, view: str, grants: list[Grant]) -> None:
    """Gives grants on a view."""
    for grant in grants:
        # regrole quotes names of roles; privileges are words of PostgreSQL.
        option = " WITH GRANT OPTION" if grant.with_option else ""
        await connection.execute(
            sql.SQL(f"GRANT {grant.privilege} ON {{}} TO {grant.role}{option}").format(
                sql.Identifier(schema, view)
            )
        )
