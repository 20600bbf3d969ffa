"""Time zones that PostgreSQL does not know: it may have an older list of them than Python. The views then
use UTC (`known_zone` in `definitions/balances.sql`).
"""

from collections.abc import Iterable
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import InvalidParameterValue


async def unknown_zones(connection: AsyncConnection[Any], zones: Iterable[str]) -> list[str]:
    """Those of the time zones that PostgreSQL does not know."""
    unknown = []
    for zone in sorted(set(zones)):
        try:
            async with connection.transaction():
                await connection.execute("SELECT now() AT TIME ZONE %s", (zone,))
        except InvalidParameterValue:
            unknown.append(zone)
    return unknown
