"""The read models in PostgreSQL, each as functions: `apply` for a worker; `load`, and then `finish` or
`finish_here`, for a build.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.projections import audit, ledger
from grabstream.projections.balances import users as balances
from grabstream.projections.cursors import Apply

Finish = Callable[[AsyncConnection[Any]], Awaitable[None]]


class ReadModel(NamedTuple):
    """`apply` adds events to complete tables. `load` adds events to tables without constraints, faster.
    `finish` computes the sums of loaded rows in PostgreSQL. `finish_here` does the same in less time, but may
    need up to 0.4 GB of memory, and block the event loop for seconds.

    All write in the caller's transaction, in the version that the connection uses. After `finish` or
    `finish_here`, the tables have the same rows as if `apply` had added the events.
    """

    name: str
    apply: Apply
    load: Apply
    finish: Finish
    finish_here: Finish


READ_MODELS: Final = {
    "ledger": ReadModel("ledger", ledger.apply, ledger.load, ledger.finish, ledger.finish_here),
    "balances": ReadModel("balances", balances.apply, balances.load, balances.finish, balances.finish),
    "audit": ReadModel("audit", audit.apply, audit.apply, audit.finish, audit.finish),
}
