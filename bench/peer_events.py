"""Grants recorded with the library `eventsourcing` in PostgreSQL, and projected to a table of balances with
its `ProjectionRunner`. Runs in its own environment, where that library is installed.

`python peer_events.py append|project` reads {"count": …, "offers": …} from standard input, and writes JSON:
null after `append`, {"seconds", "cpu_seconds", "server_seconds"} after `project`. The settings of the library
come by the environment.
`project` reads all events into a view that did not exist, as the first time and as a rebuild do.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.postgres import PostgresTrackingRecorder
from eventsourcing.projection import Projection, ProjectionRunner
from psycopg.sql import SQL, Identifier

SECONDS_MAX = 1_800
#: Events that one call of `save` records.
SAVED = 1_000


class PeerOffer(Aggregate):
    """An offer, whose grants are its events."""

    @event("Granted")
    def grant(self, user: str, amount: int) -> None:
        """Records a grant."""


class Offers(Application):
    """The offers."""


class Balances(PostgresTrackingRecorder):
    """The balance of each user, and the position of the events applied, in one transaction per event."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        table = Identifier(self.datastore.schema), Identifier("balances")
        self.sql_create_statements.append(
            SQL("CREATE TABLE IF NOT EXISTS {}.{} (user_id text PRIMARY KEY, amount bigint NOT NULL)").format(
                *table
            )
        )
        self._credit = SQL(
            "INSERT INTO {}.{} AS balance VALUES (%s, %s) "
            "ON CONFLICT (user_id) DO UPDATE SET amount = balance.amount + excluded.amount"
        ).format(*table)

    def apply(self, credited: Any, tracking: Any) -> None:
        """Credits a grant, if there is one, and moves the tracking."""
        with self.datastore.transaction(commit=True) as cursor:
            self._insert_tracking(cursor, tracking)
            if credited is not None:
                cursor.execute(self._credit, (credited.user, credited.amount), prepare=True)


class BalancesProjection(Projection[Balances]):
    """Grants → balances."""

    name = "balances"

    def process_event(self, domain_event: Any, tracking: Any) -> None:
        """Applies one event."""
        self.view.apply(domain_event if isinstance(domain_event, PeerOffer.Granted) else None, tracking)


def append(count: int, offers: int) -> None:
    """Records offers and `count` grants, each to another user."""
    application = Offers()
    for number in range(offers):
        offer = PeerOffer()
        for index in range(number, count, offers):
            offer.grant(f"u{index:031d}", 100)
            if len(offer.pending_events) == SAVED:
                application.save(offer)
        application.save(offer)
    application.close()


def project(count: int, offers: int) -> dict[str, float]:
    """Projects all events to a new view."""
    began, cpu_began = time.perf_counter(), time.process_time()
    with ProjectionRunner(
        application_class=Offers, projection_class=BalancesProjection, view_class=Balances
    ) as runner:
        runner.wait(count + offers, timeout=SECONDS_MAX)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        with runner.view.datastore.transaction() as cursor:
            cursor.execute("SELECT count(*) AS rows, sum(amount) AS total FROM balances")
            row = cursor.fetchone()
            cursor.execute(
                "SELECT pid FROM pg_stat_activity "
                "WHERE application_name = current_setting('application_name')"
            )
            pids = [found["pid"] for found in cursor.fetchall()]
        server = sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9
    if row is None or (row["rows"], row["total"]) != (count, 100 * count):
        raise RuntimeError(f"{count} grants became {row}")
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "server_seconds": server}


if __name__ == "__main__":
    plan = json.load(sys.stdin)
    print(json.dumps({"append": append, "project": project}[sys.argv[1]](**plan)))
