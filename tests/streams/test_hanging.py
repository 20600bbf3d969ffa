"""Hanging processes: a worker that takes over the partitions of a hanging one does not wait for its open
transaction, and a role that hangs in a worker does not take the partitions of others.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from psycopg import AsyncConnection

from grabstream.connections.opening import open_gate
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.verification.verifying import verify
from grabstream.projections.database.sessions import session_name
from grabstream.projections.versions import use_read_model
from grabstream.settings import Settings, child_environment
from grabstream.streams.clients import started
from grabstream.streams.projecting import agents
from grabstream.streams.projecting.projector import EXIT_UNKNOWN_ERROR, HANGS_MS_MAX, QUEUE_RECORDS_MAX
from grabstream.streams.projecting.watchdog import STALLED_SECONDS
from tests.conftest import until
from tests.support.command_line import env_of
from tests.support.projecting import (
    JournalWriter,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    until_at_seq,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize("where", ["between statements", "in a copy"])
async def test_rows_locked_by_a_hanging_process_are_freed(
    system: Settings, worker: Callable[..., Any], where: str
) -> None:
    """A connection with the name of a projector's session locks the rows of its cursors and sends nothing
    more.
    """
    hanging = await AsyncConnection.connect(
        system.postgres, application_name=session_name(system.schema_, "ledger")
    )
    backend = hanging.info.backend_pid
    try:
        await use_read_model(hanging, system.schema_, "ledger")
        if where == "between statements":
            await hanging.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (str(HANGS_MS_MAX),)
            )
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
        wrong = {
            check.name: check.problems for check in await verify(system, wait_seconds=60) if not check.passed
        }
        assert not wrong, wrong
        assert await rows(system, f"SELECT count(*) FROM pg_stat_activity WHERE pid = {backend}") == [(0,)]
    finally:
        await hanging.close()


async def test_waiting_for_locked_rows_does_not_restart_faust(
    system: Settings, journal: JournalWriter, worker: Callable[..., Any]
) -> None:
    """Another session locks the ledger's cursors for longer than the watchdog allows Faust to deliver
    nothing: the other read models continue, and the ledger continues afterwards.
    """
    lines = [opened("e", 1, total=100_000), *(granted("e", seq) for seq in range(2, 2 * QUEUE_RECORDS_MAX))]
    await journal.marker(1, "a")
    for seq in range(1, len(lines) + 1):
        await journal.block(lines, seq, seq)
    async with await AsyncConnection.connect(system.postgres) as holding:
        await use_read_model(holding, system.schema_, "ledger")
        await holding.execute("SELECT 1 FROM projection_cursors FOR UPDATE")
        projecting = worker(system, "project")
        await until_at_seq(system, len(lines), "balances", "audit")
        waits = 1 + int(STALLED_SECONDS * 1000 / HANGS_MS_MAX)  # each wait takes HANGS_MS_MAX
        await until(
            lambda: projecting.log.read_text().count("canceling statement due to lock timeout") >= waits,
            60,
            "waiting",
        )
        await holding.rollback()
    await until_at_seq(system, len(lines), "ledger")
    assert "Faust again" not in projecting.log.read_text()
    assert projecting.stop() == 0


#: A worker whose app of Faust is reported as stalled when a line comes, and then hangs when it is stopped.
HANGS_IN_STOPPING = """
import asyncio, sys
from grabstream.ops import main
from grabstream.streams.projecting import agents

async def stalled(*_):
    await asyncio.to_thread(sys.stdin.readline)
    return "a line came"

async def hang(app):
    await asyncio.Event().wait()

agents.until_stalled = stalled
agents.faust.App.stop = hang
agents.STOP_SECONDS = 0.1
sys.argv[1:] = ["worker", "--roles", "decide,project"]
main()
"""


async def test_a_worker_whose_app_does_not_stop_ends_and_leaves_its_consumer_group(system: Settings) -> None:
    """Otherwise the app would send heartbeats without end, and its partitions would have no reader."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HANGS_IN_STOPPING), stdin=PIPE, stdout=DEVNULL, stderr=PIPE,
        env=child_environment(**env_of(system), shards=str(system.shards)),
    )  # fmt: skip
    try:
        async with started(AIOKafkaAdminClient(bootstrap_servers=system.kafka)) as client:

            async def members() -> int:
                [response] = await client.describe_consumer_groups(
                    [agents.group_of(system.prefix, ["ledger", "balances", "audit"])]
                )
                return len(response.groups[0][5])

            assert process.stdin is not None
            await until(members, 60, "the group")
            async with asyncio.timeout(60):
                _, log = await process.communicate(b"\n")
            assert process.returncode == EXIT_UNKNOWN_ERROR
            assert b"Faust, within 0 s" in log
            assert b"stopping the others" in log

            async def is_empty() -> bool:
                return await members() == 0

            await until(is_empty, 30, "an empty group")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
