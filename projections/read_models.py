"""The read models in PostgreSQL, each as three functions: what the worker applies, and what a build loads and
finishes.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.projections import audit, ledger
from grabstream.projections.balances import users as balances
from grabstream.projections.cursors import Fact

Apply = Callable[[AsyncConnection[Any], Sequence[Fact]], Awaitable[None]]


class ReadModel(NamedTuple):
    """`apply` adds events to complete tables · `load` adds them to bare ones, at bulk speed · `finish` adds
    up what was loaded.

    All in the caller's transaction, in the version that the connection uses. After `finish`, the tables hold
    what `apply` would have made of the same events.
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
