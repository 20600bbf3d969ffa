"""The read models in PostgreSQL, each as three functions: `apply` for a worker, `load` and `finish` for a
build.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.projections import audit, ledger
from grabstream.projections.balances import users as balances
from grabstream.projections.cursors import Apply


class ReadModel(NamedTuple):
    """`apply` adds events to complete tables. `load` adds events to tables without constraints, faster.
    `finish` computes the sums of loaded rows.

    All three write in the caller's transaction, in the version that the connection uses. After `finish`, the
    tables have the same rows as if `apply` had added the events.
    """

    name: str
    apply: Apply
    load: Apply
    finish: Callable[[AsyncConnection[Any]], Awaitable[None]]


READ_MODELS: Final = {
    "ledger": ReadModel("ledger", ledger.apply, ledger.load, ledger.finish),
    "balances": ReadModel("balances", balances.apply, balances.load, balances.finish),
    "audit": ReadModel("audit", audit.apply, audit.apply, audit.finish),
}
