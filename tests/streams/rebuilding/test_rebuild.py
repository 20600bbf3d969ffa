"""Rebuilds of read models: the same rows from the journal, from blocks of other sizes, and from the audit
trail; after an interruption; refused when undeclared rows differ; switched and undone while readers read.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from psycopg import AsyncConnection, IsolationLevel, sql

from grabstream.connections.opening import where_of
from grabstream.projections.account_sums import AccountSums
from grabstream.projections.cursors import load
from grabstream.projections.database.sessions import session_name
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import Version, use_version, versions
from grabstream.settings import Settings, child_environment, load_settings
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.rebuilding import rebuild
from grabstream.streams.rebuilding.loading import distribute, in_processes
from grabstream.streams.rebuilding.reading import open_rebuild_source
from grabstream.streams.rebuilding.rebuild import RebuildProgress, RebuildStopped, open_rebuild
from grabstream.streams.rebuilding.switching import Busy, older_snapshots_gone
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import as_role, make_system, until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    journal,  # noqa: F401 - a fixture
    rows,
    running,
    until_at_seq,
)
from tests.support.random_history import project, random_history
from tests.support.rebuilding import (
    GRANTS,
    booked,  # noqa: F401 - a fixture
    digests,
    lines_of,
    rebuilt,
    version_in,
)
from tests.support.runs import as_runs


@pytest.mark.long
async def test_rebuilds_from_either_source_make_the_live_rows(system: Settings, prefix: str) -> None:
    history = random_history(20261122, 3_000)
    lines = as_runs(history.lines)
    await project(system, history, random.Random(3), lines)
    live = {
        projection: await digests(system, await version_in(system, projection)) for projection in PROJECTIONS
    }
    assert all(count for tables in live.values() for count, _ in tables.values())
    for projection in PROJECTIONS:
        for source in ("journal",) if projection == "audit" else ("journal", "audit"):
            new = await rebuilt(system, projection, source)
            assert new.source == source
            assert await digests(system, new) == live[projection], (projection, source)
    async with await open_books(system) as books:
        assert len(await load(books, "ledger")) == system.shards
        assert {version.version for version in await versions(books, system.schema_, "ledger")} == {2, 3}
    # A second system with blocks of other sizes: the same rows.
    again = system.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        await project(again, history, random.Random(4), lines)
        for projection in PROJECTIONS:
            assert await digests(again, await rebuilt(again, projection)) == live[projection], projection
    finally:
        await take_down(again)


async def damage_ledger(settings: Settings, statement: str, *values: Any) -> None:
    """Changes rows of the live ledger by hand."""
    async with await open_books(settings) as books:
        await use_version(books, settings.schema_, await version_in(settings, "ledger"))
        assert (await books.execute(statement.encode(), values)).rowcount > 0


@pytest.mark.every_change("one rebuild that finds differences")
async def test_a_rebuild_with_differences_is_refused_accepted_and_undone(booked: Settings) -> None:
    await damage_ledger(booked, "UPDATE accounts_1 SET posted = posted + 7 WHERE account = 'wallet:u3'")
    await damage_ledger(booked, "DELETE FROM transfer_runs_1 WHERE (shard, seq) = (2, 9)")
    query = "SELECT posted FROM accounts WHERE account = 'wallet:u3'"
    [(wrong,)] = await rows(booked, query)
    refused = grabstream("rebuild", "ledger", "--json", **env_of(booked))
    assert refused.returncode == 1, refused.stderr
    difference = {table["table"]: table for table in json.loads(refused.stdout)["difference"]}
    assert difference["accounts_1"]["changed"] == {"posted": 1}
    [example] = difference["accounts_1"]["examples"]
    assert example == {
        "key": {"account": "wallet:u3", "asset": "CNY"},
        "changed": {"posted": [wrong, wrong - 7]},
    }
    transfers = difference["transfers"]
    assert (transfers["missing"], transfers["extra"], transfers["rows_changed"]) == (0, 1, 0)
    assert transfers["examples"] == [{"key": {"shard": 2, "seq": 9, "leg": 0}, "only": "new"}]
    assert await rows(booked, query) == [(wrong,)]
    shown = grabstream("rebuild", "ledger", **env_of(booked))
    assert shown.returncode == 1
    assert "--accept" in shown.stdout
    assert f"posted: {wrong} → {wrong - 7}" in shown.stdout.replace("\n", " ")
    plan = grabstream("rebuild", "ledger", "--dry-run", **env_of(booked))
    assert f"continue {booked.schema_}_ledger_2 (following)" in plan.stdout.replace("\n", " ")
    accepted = grabstream("rebuild", "ledger", "--accept", **env_of(booked))
    assert accepted.returncode == 0, accepted.stderr
    assert await rows(booked, query) == [(wrong - 7,)]
    everything = grabstream("rebuild", "undo", "all", **env_of(booked))
    assert (everything.returncode, "balances has no previous version" in everything.stderr) == (1, True)
    planned = grabstream("rebuild", "undo", "ledger", "--dry-run", **env_of(booked))
    assert f"would show {booked.schema_}_ledger_1 (definition 1) again" in planned.stdout.replace("\n", " ")
    assert await rows(booked, query) == [(wrong - 7,)]
    undone = grabstream("rebuild", "undo", "ledger", "--json", **env_of(booked))
    assert undone.returncode == 0
    new = json.loads(undone.stdout)["new"]
    assert (new["version"], new["state"]) == (1, "live")
    assert await rows(booked, query) == [(wrong,)]
    assert grabstream("rebuild", "undo", "ledger", **env_of(booked)).returncode == 0
    assert await rows(booked, query) == [(wrong - 7,)]
    planned = grabstream("rebuild", "drop", "ledger", "previous", "--dry-run", **env_of(booked))
    assert f"would drop {booked.schema_}_ledger_1" in planned.stdout
    dropped = grabstream("rebuild", "drop", "ledger", "previous", **env_of(booked))
    assert f"dropped {booked.schema_}_ledger_1" in dropped.stdout
    for words in ((), ("--dry-run",)):
        assert grabstream("rebuild", "undo", "ledger", *words, **env_of(booked)).returncode == 1
    assert [version.state for version in await all_versions(booked, "ledger")] == ["live"]
    # The previous version is kept until the next switch, whether that switch keeps a version or not.
    for words in ((), ("--no-keep",)):
        assert grabstream("rebuild", "ledger", *words, **env_of(booked)).returncode == 0
    assert [version.state for version in await all_versions(booked, "ledger")] == ["live"]


@pytest.mark.long
async def test_a_rebuild_in_steps_shows_nothing_before_its_switch(booked: Settings) -> None:
    """`compare` and `switch` need a complete version that `build` has made. A switch compares again, and is
    refused while rows differ; it reads what the build has read.
    """
    before = await version_in(booked, "ledger")
    for words in (("compare", "ledger"), ("switch", "ledger"), ("switch", "ledger", "--dry-run")):
        refused = grabstream("rebuild", *words, **env_of(booked))
        assert (refused.returncode, "`grabstream rebuild build ledger`" in refused.stderr) == (1, True)
    killed = grabstream("rebuild", "build", "ledger", **env_of(booked), fail_at="rebuild.committed:3")
    assert killed.returncode == -signal.SIGKILL
    refused = grabstream("rebuild", "compare", "ledger", **env_of(booked))
    assert (refused.returncode, "ledger_2 is not complete" in refused.stderr) == (1, True)
    built = grabstream("rebuild", "build", "ledger", "--from", "audit", "--json", **env_of(booked))
    result = json.loads(built.stdout)
    assert (result["new"]["version"], result["new"]["state"], result["difference"]) == (2, "building", [])
    compared = json.loads(grabstream("rebuild", "compare", "ledger", "--json", **env_of(booked)).stdout)
    assert {one["table"] for one in compared["difference"] if one["rows_new"]} >= {"accounts_1", "transfers"}
    assert (compared["refused"], compared["new"]["source"]) == (False, "audit")
    await damage_ledger(booked, "UPDATE accounts_1 SET posted = posted + 7 WHERE account = 'wallet:u3'")
    for verb in ("compare", "switch"):
        refused = grabstream("rebuild", verb, "ledger", "--json", **env_of(booked))
        result = json.loads(refused.stdout)
        assert (refused.returncode, "rows of accounts_1 differ" in result["done"]) == (1, True)
    assert await version_in(booked, "ledger") == before
    planned = grabstream("rebuild", "switch", "ledger", "--dry-run", **env_of(booked))
    assert f"switch to {booked.schema_}_ledger_2" in planned.stdout.replace("\n", " ")
    assert await version_in(booked, "ledger") == before
    switched = grabstream("rebuild", "switch", "ledger", "--accept", "--json", **env_of(booked))
    assert switched.returncode == 0, switched.stderr
    live = await version_in(booked, "ledger")
    assert (live.version, live.source) == (2, "audit")
    assert json.loads(switched.stdout)["new"] == live._replace(phase="agreed")._asdict()
    assert grabstream("rebuild", "build", "ledger", **env_of(booked)).returncode == 0
    words = ("rebuild", "drop", "ledger", "previous", "unfinished")
    dropped = json.loads(grabstream(*words, "--json", **env_of(booked)).stdout)
    assert dropped["done"] == f"dropped {booked.schema_}_ledger_1, {booked.schema_}_ledger_3"
    assert [version.state for version in await all_versions(booked, "ledger")] == ["live"]
    assert grabstream("rebuild", "drop", "ledger", **env_of(booked)).returncode == 2


async def all_versions(settings: Settings, projection: str) -> list[Version]:
    async with await open_books(settings) as books:
        return await versions(books, settings.schema_, projection)


@pytest.mark.long
async def test_undo_applies_newer_events_to_the_previous_version_first(
    booked: Settings, journal: JournalWriter
) -> None:
    """Workers write only the live version of a definition. `rebuild undo` first applies the newer events
    to the previous version.
    """
    async with running(booked, "ledger") as [ledger]:
        await ledger.put(CatchUp(0))
        new = await rebuilt(booked, "ledger")
        of_shard = JournalWriter(booked, journal._producer, 0)
        await of_shard.block(lines_of(0, GRANTS + 5), GRANTS + 2, GRANTS + 6)
        await ledger.put(of_shard.records[-1])
        query = "SELECT seq FROM cursors WHERE (projection, shard) = ('ledger', 0)"
        await until(lambda: _is(booked, query, [(GRANTS + 6,)]), 30, "the new version's cursor")
        old = await version_in(booked, "ledger", "previous")
        assert await rows(booked, f"SELECT count(*) FROM {new.schema}.transfers WHERE shard = 0") == [
            (GRANTS + 6,)
        ]
        assert await rows(booked, f"SELECT count(*) FROM {old.schema}.transfers WHERE shard = 0") == [
            (GRANTS + 1,)
        ]
        assert grabstream("rebuild", "undo", "ledger", **env_of(booked)).returncode == 0
        assert (await version_in(booked, "ledger")).schema == old.schema
        assert await rows(booked, "SELECT count(*) FROM transfers WHERE shard = 0") == [(GRANTS + 6,)]
        await of_shard.block(lines_of(0, GRANTS + 8), GRANTS + 7, GRANTS + 9)
        await ledger.put(of_shard.records[-1])
        await until(lambda: _is(booked, query, [(GRANTS + 9,)]), 30, "the old version's cursor")
    assert await rows(booked, f"SELECT count(*) FROM {new.schema}.transfers WHERE shard = 0") == [
        (GRANTS + 6,)
    ]


async def _is(settings: Settings, query: str, expected: list[Any]) -> bool:
    return await rows(settings, query) == expected


@pytest.mark.long
@pytest.mark.parametrize("step", ["rebuild.committed:3", "rebuild.finished"])
async def test_a_killed_rebuild_continues(booked: Settings, step: str) -> None:
    """kill -9 between two commits of the load, and after it: the same command ends with the same rows."""
    before = await digests(booked, await version_in(booked, "balances"))
    killed = grabstream("rebuild", "balances", **env_of(booked), fail_at=step)
    assert killed.returncode == -signal.SIGKILL
    begun = await version_in(booked, "balances", "building")
    assert begun.phase == ("loading" if step.startswith("rebuild.committed") else "following")
    loaded = await rows(booked, f"SELECT count(*) FROM {begun.schema}.projection_cursors WHERE seq > 0")
    assert loaded == [(3 if begun.phase == "loading" else booked.shards,)]
    shown = grabstream("status", "--json", **env_of(booked))
    versions_shown = json.loads(shown.stdout)["versions"]
    [building] = [version for version in versions_shown if version["state"] == "building"]
    assert (building["schema"], building["phase"], building["events"]) == (
        begun.schema,
        begun.phase,
        loaded[0][0] * (GRANTS + 1),
    )
    assert grabstream("rebuild", "balances", **env_of(booked)).returncode == 0
    live = await version_in(booked, "balances")
    assert live.version == begun.version
    assert await digests(booked, live) == before


@pytest.mark.long
async def test_an_interrupted_rebuild_continues(booked: Settings) -> None:
    """A cancellation between two commits of the load, and Ctrl-C while it waits for the live cursors."""
    before = await digests(booked, await version_in(booked, "ledger"))
    task: asyncio.Task[Any] | None = None
    seen: list[RebuildProgress] = []

    def stop_soon(progress: RebuildProgress) -> None:
        seen.append(progress)
        if progress.done >= 4 * (GRANTS + 1) and task is not None:
            task.cancel()

    task = asyncio.create_task(rebuilt(booked, "ledger", report=stop_soon))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [progress.phase for progress in seen] == ["loading"] * 4
    assert (seen[0].done, seen[0].total) == (GRANTS + 1, booked.shards * (GRANTS + 1))
    begun = await version_in(booked, "ledger", "building")
    assert begun.phase == "loading"
    async with await open_books(booked) as books, books.transaction():
        live = await version_in(booked, "ledger")
        await books.execute(f"SELECT 1 FROM {live.schema}.projection_cursors FOR UPDATE".encode())
        process = subprocess.Popen(
            [sys.executable, "-m", "grabstream.ops.cli", "rebuild", "ledger"],
            env=child_environment(**env_of(booked)),
            stderr=subprocess.PIPE,
            text=True,
        )
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"

        async def waiting() -> bool:
            async with await open_books(booked) as others:
                locking = f'%{live.schema}"."projection_cursors" %FOR UPDATE%'
                return (await (await others.execute(waits, (locking,))).fetchone() or [0])[0] == 1

        await until(waiting, 30, "the wait of the rebuild for the cursors")
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode == 130, errors
        assert "repeat the command to continue" in errors
    assert (await version_in(booked, "ledger", "building")).phase == "following"
    assert grabstream("rebuild", "ledger", **env_of(booked)).returncode == 0
    assert await digests(booked, await version_in(booked, "ledger")) == before


@pytest.mark.long
async def test_only_a_build_that_continues_reads_its_transfers_back(
    booked: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that loads all events adds up while it does; the accounts are the same."""
    reads = 0

    async def counted(sums: AccountSums, connection: AsyncConnection[Any]) -> None:
        nonlocal reads
        reads += 1
        await read(sums, connection)

    read = AccountSums.read
    monkeypatch.setattr(AccountSums, "read", counted)
    before = await digests(booked, await version_in(booked, "ledger"))
    assert await digests(booked, await rebuilt(booked, "ledger")) == before
    assert reads == 0
    task: asyncio.Task[Any] | None = None

    def stop(progress: RebuildProgress) -> None:
        if task is not None:
            task.cancel()

    task = asyncio.create_task(rebuilt(booked, "ledger", report=stop))
    with pytest.raises(asyncio.CancelledError):
        await task
    begun = await version_in(booked, "ledger", "building")
    assert begun.phase == "loading"
    live = await rebuilt(booked, "ledger")
    assert (live.version, reads) == (begun.version, 1)
    assert await digests(booked, live) == before


@pytest.mark.long
async def test_a_second_rebuild_of_a_projection_is_refused(booked: Settings) -> None:
    async with open_rebuild(where_of(booked), "ledger"):
        done = grabstream("rebuild", "ledger", **env_of(booked))
        assert done.returncode == 1
        assert "another rebuild of ledger is running" in done.stderr
        assert grabstream("rebuild", "audit", **env_of(booked)).returncode == 0


@pytest.mark.long
async def test_a_switch_waits_for_open_transactions_of_readers(booked: Settings) -> None:
    """An open transaction that has read a view sees the same version until it ends; the switch waits for it,
    and other readers do not wait.
    """
    async with await open_books(booked) as reader, await AsyncConnection.connect(booked.postgres) as snapshot:
        async with reader.transaction():
            await reader.execute("SELECT count(*) FROM transfers")
            refused = grabstream("rebuild", "ledger", "--patience", "0", **env_of(booked))
            assert refused.returncode == 1
            assert "repeat the command to try again" in refused.stderr
            assert await rows(booked, "SELECT count(*) FROM accounts WHERE account LIKE 'offer:%'") == [
                (booked.shards,)
            ]
        # This session has read no view, but its snapshot is older than the rows of the new version.
        await snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await snapshot.execute("SELECT 1")
        refused = grabstream("rebuild", "ledger", "--patience", "0", **env_of(booked))
        assert refused.returncode == 1
        assert "older snapshot" in refused.stderr
        [count] = await (
            await snapshot.execute(f"SELECT count(*) FROM {booked.schema_}.transfers".encode())
        ).fetchone() or [0]
        assert count == booked.shards * (GRANTS + 1)
    assert grabstream("rebuild", "ledger", **env_of(booked)).returncode == 0


@pytest.mark.long
async def test_after_an_interrupted_switch_the_new_version_may_be_ahead(
    booked: Settings, journal: JournalWriter
) -> None:
    """A switch brings the new version to the journal's end, while the live one may lag. If readers stop it,
    `compare` says which version is ahead, and `switch` shows it.
    """
    of_shard = JournalWriter(booked, journal._producer, 0)
    await of_shard.block(lines_of(0, GRANTS + 5), GRANTS + 2, GRANTS + 6)
    async with await open_books(booked) as reader, reader.transaction():
        await reader.execute("SELECT count(*) FROM transfers")
        stopped = grabstream("rebuild", "ledger", "--patience", "0", **env_of(booked))
        assert (stopped.returncode, "repeat the command" in stopped.stderr) == (1, True)
    compared = grabstream("rebuild", "compare", "ledger", **env_of(booked))
    words = " ".join(compared.stderr.split())
    assert compared.returncode == 1
    assert f"shard 0: the new version is ahead, at seq {GRANTS + 6}" in words
    assert "`grabstream rebuild switch ledger`" in words
    assert grabstream("rebuild", "switch", "ledger", **env_of(booked)).returncode == 0
    assert (await version_in(booked, "ledger")).version == 2


@pytest.mark.long
async def test_a_switch_waits_for_snapshots_of_other_roles(booked: Settings, servers: Settings) -> None:
    """A switch by a role that is not a superuser waits for a snapshot of another role, and continues when the
    snapshot ends.
    """
    [(privileged,)] = await rows(
        booked,
        "SELECT rolsuper OR EXISTS (SELECT FROM pg_auth_members WHERE member = pg_roles.oid) FROM pg_roles "
        "WHERE rolname = user",
    )
    assert not privileged
    admin, live = load_settings().postgres, await version_in(booked, "ledger")
    postgres = await as_role(admin, "reader", f"{booked.schema_}_reader", booked.schema_)
    try:
        async with await AsyncConnection.connect(postgres) as reader:
            await reader.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            await reader.execute("SELECT 1")
            refused = await asyncio.to_thread(
                grabstream, "rebuild", "ledger", "--patience", "0", **env_of(booked)
            )
            assert refused.returncode == 1
            assert f"pid {reader.info.backend_pid}, {booked.schema_}_reader" in refused.stderr
            count = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(booked.schema_, "transfers"))
            assert await (await reader.execute(count)).fetchone() == (booked.shards * (GRANTS + 1),)
            await reader.commit()
            await reader.execute("SELECT 1")
            waiting = asyncio.create_task(
                asyncio.to_thread(grabstream, "rebuild", "ledger", "--no-keep", **env_of(booked))
            )
            # The switch holds the cursors of the live version while it waits for the snapshot.
            locked = (
                "SELECT count(*) > 0 FROM pg_locks WHERE granted AND mode = 'RowShareLock' "
                f"AND relation = '{live.schema}.projection_cursors'::regclass"
            )
            await until(lambda: _is(booked, locked, [(True,)]), 60, "the wait of the switch")
            assert await (await reader.execute(count)).fetchone() == (booked.shards * (GRANTS + 1),)
            await reader.commit()
            assert (await waiting).returncode == 0
            assert await (await reader.execute(count)).fetchone() == (booked.shards * (GRANTS + 1),)
    finally:
        async with await AsyncConnection.connect(admin, autocommit=True) as connection:
            role = sql.Identifier(f"{booked.schema_}_reader")
            await connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            await connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.mark.long
async def test_a_wait_for_an_older_snapshot_ends_with_the_snapshot(booked: Settings) -> None:
    """The waiting session has an open transaction, as in a switch. It does not wait for a worker that waits
    for its locks.
    """
    async with (
        await open_books(booked) as us,
        await AsyncConnection.connect(booked.postgres) as reader,
        await open_books(booked) as worker,
    ):
        await reader.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        await reader.execute("SELECT 1")
        async with us.transaction():
            await us.execute("SELECT 1 FROM read_models FOR UPDATE")
            waits = asyncio.create_task(worker.execute("UPDATE read_models SET phase = phase"))
            blocked = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
            await until(
                lambda: _is(booked, blocked % worker.info.backend_pid, [(1,)]), 10, "the wait of the worker"
            )
            with pytest.raises(Busy, match=f"pid {reader.info.backend_pid},"):
                await older_snapshots_gone(us, booked.schema_, 0.2)
            gone = asyncio.create_task(older_snapshots_gone(us, booked.schema_, 20))
            await reader.execute("SELECT 1")  # another statement of the same snapshot
            assert not (await asyncio.wait({gone}, timeout=0.5))[0]
            await reader.rollback()
            await gone
        await waits


@pytest.mark.long
async def test_a_rebuild_refuses_a_journal_that_lost_records_and_reads_the_audit_trail(
    booked: Settings,
) -> None:
    """The message names the shard and where its journal ends, and the live version is unchanged."""
    elsewhere = where_of(booked)._replace(journal=f"{booked.prefix}.events")
    async with (
        open_rebuild(elsewhere, "ledger") as work,
        open_rebuild_source("journal", elsewhere) as source,
    ):
        with pytest.raises(RebuildStopped, match=r"shard 0: .*ends"):
            await work.build(source)
    await damage_ledger(booked, "UPDATE accounts_1 SET posted = 1 WHERE account = 'wallet:u3'")
    assert grabstream("rebuild", "ledger", "--from", "audit", "--accept", **env_of(booked)).returncode == 0
    assert not await rows(booked, "SELECT asset FROM accounts GROUP BY asset HAVING sum(posted) <> 0")


@pytest.mark.long
async def test_an_idle_worker_writes_the_new_version_after_a_switch(
    booked: Settings, journal: JournalWriter, worker: Callable[..., Any]
) -> None:  # fmt: skip
    """The version that the worker wrote last does not exist any more when the next event arrives."""
    idle = worker(booked, "project")

    async def connected() -> bool:
        names = ", ".join(f"'{session_name(booked.schema_, name)}'" for name in ("ledger", "balances"))
        return bool(
            await rows(
                booked,
                f"SELECT 1 FROM pg_stat_activity WHERE application_name IN ({names}) HAVING count(*) = 2",
            )
        )

    await until(connected, 30, "the worker")
    for projection in ("ledger", "balances"):
        done = await asyncio.to_thread(grabstream, "rebuild", projection, "--no-keep", **env_of(booked))
        assert done.returncode == 0, done.stderr
    await journal.block(lines_of(SHARD, GRANTS + 1), GRANTS + 2, GRANTS + 2)
    await until_at_seq(booked, GRANTS + 2)
    assert idle.process.poll() is None
    assert idle.stop() == 0


def test_deal_gives_processes_about_equal_numbers_of_events() -> None:
    assert distribute({0: 5, 1: 9, 2: 4, 3: 1}, 2) == [[1, 3], [0, 2]]
    assert distribute({0: 5}, 4) == [[0]]


@pytest.mark.long
async def test_a_rebuild_with_several_processes_makes_the_same_rows(
    booked: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process loads some of the shards, where the first events show that it is worth starting them. If
    one of them cannot read its shard, the rebuild ends with its reason, and the other processes end.
    """
    started: list[int] = []

    async def counted(*arguments: Any) -> None:
        started.append(len(arguments[3]))
        await in_processes(*arguments)

    monkeypatch.setattr(rebuild, "in_processes", counted)
    monkeypatch.setattr(rebuild, "SAMPLE_EVENTS", 1)
    before = await digests(booked, await version_in(booked, "balances"))
    assert await digests(booked, await rebuilt(booked, "balances", jobs=2)) == before
    assert started == []
    monkeypatch.setattr(rebuild, "PROCESSES_SECONDS_MIN", 0)
    assert await digests(booked, await rebuilt(booked, "balances", jobs=2)) == before
    assert started == [2]
    ledger = await version_in(booked, "ledger")
    async with await open_books(booked) as books:
        await books.execute(
            f"UPDATE {ledger.schema}.projection_cursors SET next_offset = next_offset + 9 WHERE shard = "
            "2".encode()
        )
    with pytest.raises(RebuildStopped, match="shard 2: it ends at offset 2, the live read model is at 11"):
        await rebuilt(booked, "ledger", jobs=2)
    async with await open_books(booked) as books:
        await books.execute(
            f"UPDATE {ledger.schema}.projection_cursors SET next_offset = next_offset - 9 WHERE shard = "
            "2".encode()
        )
    assert await digests(booked, await rebuilt(booked, "ledger", jobs=2)) == await digests(booked, ledger)


@pytest.mark.every_change("one rebuild of everything")
async def test_rebuild_all_rebuilds_every_read_model(booked: Settings) -> None:
    """`--dry-run` and `status` also name a definition that differs from the live one."""
    expected = {name: (await version_in(booked, name)).version + 1 for name in PROJECTIONS}
    done = grabstream("rebuild", "all", "--json", "--no-keep", **env_of(booked))
    assert done.returncode == 0, done.stderr
    reported = {rebuild["projection"]: rebuild["new"]["version"] for rebuild in json.loads(done.stdout)}
    assert reported == expected
    for projection in PROJECTIONS:
        existing = [version.version for version in await all_versions(booked, projection)]
        assert existing == [expected[projection]]
    plan = subprocess.run(
        [sys.executable, "-m", "tests.streams.rebuilding.changed", "rebuild", "balances", "--dry-run"],
        env=child_environment(**env_of(booked)), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "of definition 2 from the journal" in plan.stdout.replace("\n", " ")
    assert "offers_1.title may differ" in plan.stdout.replace("\n", " ")
    shown = subprocess.run(
        [sys.executable, "-m", "tests.streams.rebuilding.changed", "status", "--json"],
        env=child_environment(**env_of(booked)), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert shown.returncode == 1
    assert json.loads(shown.stdout)["waiting"] == {"balances": 2}


@pytest.mark.long
async def test_a_rebuild_refuses_a_live_version_of_another_history(booked: Settings) -> None:
    """The live cursor has another hash at the same seq: from either source, the rebuild compares and switches
    nothing. With the right hash it succeeds.
    """
    ledger = await version_in(booked, "ledger")
    table = f"{ledger.schema}.projection_cursors"
    [(head,)] = await rows(booked, f"SELECT head FROM {table} WHERE shard = 1")
    async with await open_books(booked) as books:
        await books.execute(f"UPDATE {table} SET head = %s WHERE shard = 1".encode(), (b"\x01" * 32,))
        for source, reason in (("journal", "different histories"), ("audit", "another history")):
            with pytest.raises(RebuildStopped, match=f"shard 1.*{reason}"):
                await rebuilt(booked, "ledger", source)
        await books.execute(f"UPDATE {table} SET head = %s WHERE shard = 1".encode(), (head,))
    assert (await version_in(booked, "ledger")).schema == ledger.schema
    assert await digests(booked, await rebuilt(booked, "ledger")) == await digests(booked, ledger)
