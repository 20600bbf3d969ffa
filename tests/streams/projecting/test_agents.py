"""Faust's agents deliver records: in this test nothing else reads the journal, no watchdog restarts Faust,
and no projector is told to catch up a second time.
"""

import asyncio

from grabstream.ops.settings import Settings
from grabstream.streams.projecting import agents
from tests.support.projecting import (
    LINES,
    JournalWriter,
    journal,  # noqa: F401 - a fixture
    until_at_seq,
)


async def test_the_agents_deliver_records(system: Settings, journal: JournalWriter) -> None:
    """After the partitions were assigned and caught up, only the agents can deliver new records."""
    names = ("ledger", "balances", "audit")
    projectors = agents.make_projectors(
        system.kafka, system.prefix, system.shards, system.postgres, system.schema_, names
    )
    app = agents.build_app(system.kafka, system.prefix, system.shards, projectors)
    app.finalize()
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    running = asyncio.create_task(agents._run(app))
    try:
        await until_at_seq(system, 10)
        assigned_at = app.assigned_at
        for last in (11, 20, 30):
            await journal.block(LINES, {11: 11, 20: 12, 30: 21}[last], last)
            await until_at_seq(system, last)
        assert app.assigned_at == assigned_at, "partitions were assigned again, so this test proves nothing"
    finally:
        await agents._stop(app)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
