"""A projection of your own: every unit that a user gets permanently is worth ten points; a return subtracts
them.

    grabstream follow points:PROJECTION            # from the first event on, then live, until Ctrl-C
    grabstream follow points:PROJECTION --rebuild  # after a change of the rule: raise `version` first
    psql … -c "SELECT * FROM loyalty.points ORDER BY points DESC"

docs/user-projections.md lists the rules for `apply`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream import Fact, GrabConfirmed, GrabGranted, GrabReturned, Projection

POINTS_PER_UNIT = 10

TABLES = "CREATE TABLE points (user_id text PRIMARY KEY, points bigint NOT NULL)"
ADD = """
    INSERT INTO points AS known (user_id, points)
    SELECT * FROM unnest(%s::text[], %s::bigint[])
    ON CONFLICT (user_id) DO UPDATE SET points = known.points + excluded.points
"""


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the points of these events, in the transaction that moves the cursor."""
    points: Counter[str] = Counter()
    for fact in facts:
        event = fact.event
        if isinstance(event, GrabGranted | GrabConfirmed):
            points[event.user] += POINTS_PER_UNIT * event.quantity
        elif isinstance(event, GrabReturned):
            points[event.user] -= POINTS_PER_UNIT * event.quantity
    if points:
        await connection.execute(ADD, (list(points), list(points.values())))


PROJECTION = Projection("points", schema="loyalty", tables=TABLES, apply=apply)
