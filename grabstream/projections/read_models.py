"""The read models in PostgreSQL, each as functions: `apply` for a worker; `load`, and then `finish` or
`finish_here`, for a build.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from psycopg import AsyncConnection

from grabstream.projections import audit, ledger
from grabstream.projections.account_sums import AccountSums
from grabstream.projections.balances import users as balances
from grabstream.projections.cursors import Apply, Fact

Finish = Callable[[AsyncConnection[Any]], Awaitable[None]]
FinishHere = Callable[[AsyncConnection[Any], AccountSums | None], Awaitable[None]]


class Rows(Protocol):
    """Rows of events that are not written yet. They need less memory than the events."""

    def add(self, facts: Sequence[Fact]) -> None:
        """Makes the rows of some events."""

    async def copy(self, connection: AsyncConnection[Any]) -> None:
        """Writes the rows."""


class ReadModel(NamedTuple):
    """`apply` adds events to complete tables. `load` adds events faster, to tables without most indexes;
    where there are `rows`, it makes and writes these. `finish` computes the sums of loaded rows in
    PostgreSQL. `finish_here`, if there is one, does the same in less time, but may need up to 0.4 GB of
    memory, and block the event loop for seconds. It takes the sums of all loaded rows from a caller that has
    added them up; else it reads the rows.

    All write in the caller's transaction, in the version that the connection uses. After `finish` or
    `finish_here`, the tables have the same rows as if `apply` had added the events.
    """

    name: str
    apply: Apply
    load: Apply
    finish: Finish
    finish_here: FinishHere | None = None
    rows: Callable[[], Rows] | None = None


READ_MODELS: Final = {
    "ledger": ReadModel(
        "ledger", ledger.apply, ledger.load, ledger.finish, ledger.finish_here, ledger.TransferRows
    ),
    "balances": ReadModel("balances", balances.apply, balances.load, balances.finish),
    "audit": ReadModel("audit", audit.apply, audit.apply, audit.finish),
}
