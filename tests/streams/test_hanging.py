"""A worker that hangs with a read model's transaction open: whoever takes its partitions over does not wait for it."""

from collections.abc import Callable
from typing import Any

import pytest
from psycopg import AsyncConnection

from models.commands import Grab, Open
from models.offers import EnvelopeTerms
from ops.connections import open_gate
from ops.settings import Settings
from ops.verification import verify
from projections.versions import use_read_model
from streams.projector import HANGS_MS_MAX
from tests.streams.test_projections import rows


@pytest.mark.parametrize("where", ["between statements", "in a copy"])
async def test_rows_of_a_hanging_process_are_freed(system: Settings, worker: Callable[..., Any], where: str) -> None:
    """A connection that is called as a projector's own, holds its rows, and says nothing more."""
    hanging = await AsyncConnection.connect(system.postgres, application_name=f"{system.schema_}.ledger")
    backend = hanging.info.backend_pid
    try:
        await use_read_model(hanging, system.schema_, "ledger")
        if where == "between statements":
            await hanging.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (str(HANGS_MS_MAX),))
        await hanging.commit()
        await hanging.execute("SELECT 1 FROM projection_cursors FOR UPDATE")
        if where == "in a copy":
            hanging.pgconn.send_query(b"CREATE TEMPORARY TABLE t (a int); COPY t FROM STDIN")
        worker(system)
        terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=900, parts=9)
        async with open_gate(system) as gate:
            opened = await gate.decide([Open(id="o", offer="e", terms=terms)], patience_ms=30_000)
            granted = await gate.decide([Grab(id="g", offer="e", user="u")], patience_ms=10_000)
        assert [answer.outcome for answer in (*opened, *granted)] == ["opened", "granted"]
        wrong = {check.name: check.problems for check in await verify(system, wait_seconds=60) if not check.passed}
        assert not wrong, wrong
        assert await rows(system, f"SELECT count(*) FROM pg_stat_activity WHERE pid = {backend}") == [(0,)]
    finally:
        await hanging.close()
