"""Read models rebuilt: the same rows from the journal, from blocks cut elsewhere, and from the audit trail;
cut off at any moment; refused where rows differ that were not meant to; shown and put back while readers
read.
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

from grabstream.ops.commands.rebuild.read_models import where_of
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.settings import Settings, child_environment, load_settings
from grabstream.projections.cursors import load
from grabstream.projections.database.sessions import session_name
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import Version, use_version, versions
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.rebuilding.loading import deal
from grabstream.streams.rebuilding.rebuild import RebuildProgress, RebuildRefused, open_rebuild, open_source
from grabstream.streams.rebuilding.switching import Busy, older_snapshots_gone
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


async def test_the_same_rows_live_rebuilt_from_audit_and_from_blocks_cut_elsewhere(
    system: Settings, prefix: str
) -> None:
    history = random_history(20261122, 3_000)
    await project(system, history, random.Random(3))
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
        assert {one.version for one in await versions(books, system.schema_, "ledger")} == {3, 4}
    # The rebuilt versions are what workers write from here on, all of them in their complete form.
    again = system.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        await project(again, history, random.Random(4))
        for projection in PROJECTIONS:
            assert await digests(again, await rebuilt(again, projection)) == live[projection], projection
    finally:
        await take_down(again)


async def damaged(settings: Settings, statement: str, *values: Any) -> None:
    """Changes rows of the live ledger, as no program of ours does."""
    async with await open_books(settings) as books:
        await use_version(books, settings.schema_, await version_in(settings, "ledger"))
        assert (await books.execute(statement.encode(), values)).rowcount > 0


async def test_differences_refuse_accept_and_undo(booked: Settings) -> None:
    await damaged(booked, "UPDATE accounts_1 SET posted = posted + 7 WHERE account = 'wallet:u3'")
    await damaged(booked, "DELETE FROM transfers_1 WHERE (shard, seq) = (2, 9)")
    query = "SELECT posted FROM accounts WHERE account = 'wallet:u3'"
    [(wrong,)] = await rows(booked, query)
    refused = grabstream("rebuild", "ledger", "--json", **env_of(booked))
    assert refused.returncode == 1, refused.stderr
    found = {one["table"]: one for one in json.loads(refused.stdout)["difference"]}
    assert found["accounts_1"]["changed"] == {"posted": 1}
    [example] = found["accounts_1"]["examples"]
    assert example == {
        "key": {"account": "wallet:u3", "asset": "CNY"},
        "changed": {"posted": [wrong, wrong - 7]},
    }
    assert (
        found["transfers_1"]["missing"],
        found["transfers_1"]["extra"],
        found["transfers_1"]["rows_changed"],
    ) == (0, 1, 0)
    assert found["transfers_1"]["examples"] == [{"key": {"shard": 2, "seq": 9, "leg": 0}, "only": "new"}]
    assert await rows(booked, query) == [(wrong,)]
    shown = grabstream("rebuild", "ledger", **env_of(booked))
    assert shown.returncode == 1
    assert "--accept" in shown.stdout
    assert f"posted: {wrong} → {wrong - 7}" in shown.stdout.replace("\n", " ")
    plan = grabstream("rebuild", "ledger", "--dry-run", **env_of(booked))
    assert f"go on with {booked.schema_}_ledger_3 (following)" in plan.stdout.replace("\n", " ")
    accepted = grabstream("rebuild", "ledger", "--accept", **env_of(booked))
    assert accepted.returncode == 0, accepted.stderr
    assert await rows(booked, query) == [(wrong - 7,)]
    everything = grabstream("rebuild", "all", "--undo", **env_of(booked))
    assert (everything.returncode, "balances has no previous version" in everything.stderr) == (1, True)
    planned = grabstream("rebuild", "ledger", "--undo", "--dry-run", **env_of(booked))
    assert f"would show {booked.schema_}_ledger_2 (definition 2) again" in planned.stdout.replace("\n", " ")
    assert await rows(booked, query) == [(wrong - 7,)]
    undone = grabstream("rebuild", "ledger", "--undo", "--json", **env_of(booked))
    assert undone.returncode == 0
    new = json.loads(undone.stdout)["new"]
    assert (new["version"], new["state"]) == (2, "live")
    assert await rows(booked, query) == [(wrong,)]
    assert grabstream("rebuild", "ledger", "--undo", **env_of(booked)).returncode == 0
    assert await rows(booked, query) == [(wrong - 7,)]
    planned = grabstream("rebuild", "ledger", "--drop-previous", "--dry-run", **env_of(booked))
    assert f"would drop {booked.schema_}_ledger_2" in planned.stdout
    dropped = grabstream("rebuild", "ledger", "--drop-previous", **env_of(booked))
    assert f"dropped {booked.schema_}_ledger_2" in dropped.stdout
    for words in (("--undo",), ("--undo", "--dry-run")):
        assert grabstream("rebuild", "ledger", *words, **env_of(booked)).returncode == 1
    assert [one.state for one in await all_versions(booked, "ledger")] == ["live"]
    # What is kept is kept until the next switch, whether that one keeps something or not.
    for words in ((), ("--no-keep",)):
        assert grabstream("rebuild", "ledger", *words, **env_of(booked)).returncode == 0
    assert [one.state for one in await all_versions(booked, "ledger")] == ["live"]


async def all_versions(settings: Settings, projection: str) -> list[Version]:
    async with await open_books(settings) as books:
        return await versions(books, settings.schema_, projection)


async def test_what_is_undone_has_the_events_that_came_meanwhile(
    booked: Settings, journal: JournalWriter
) -> None:
    """Of two versions of one definition workers write the live one; going back brings the other up to it
    first.
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
        assert await rows(booked, f"SELECT count(*) FROM {new.schema}.transfers_1 WHERE shard = 0") == [
            (GRANTS + 6,)
        ]
        assert await rows(booked, f"SELECT count(*) FROM {old.schema}.transfers_1 WHERE shard = 0") == [
            (GRANTS + 1,)
        ]
        assert grabstream("rebuild", "ledger", "--undo", **env_of(booked)).returncode == 0
        assert (await version_in(booked, "ledger")).schema == old.schema
        assert await rows(booked, "SELECT count(*) FROM transfers WHERE shard = 0") == [(GRANTS + 6,)]
        await of_shard.block(lines_of(0, GRANTS + 8), GRANTS + 7, GRANTS + 9)
        await ledger.put(of_shard.records[-1])
        await until(lambda: _is(booked, query, [(GRANTS + 9,)]), 30, "the old version's cursor")
    assert await rows(booked, f"SELECT count(*) FROM {new.schema}.transfers_1 WHERE shard = 0") == [
        (GRANTS + 6,)
    ]


async def _is(settings: Settings, query: str, expected: list[Any]) -> bool:
    return await rows(settings, query) == expected


@pytest.mark.parametrize("step", ["rebuild.committed:3", "rebuild.finished"])
async def test_killed_in_the_middle_it_goes_on(booked: Settings, step: str) -> None:
    """kill -9 between two commits of a load, and after the sums: the same command ends with the same rows."""
    before = await digests(booked, await version_in(booked, "balances"))
    killed = grabstream("rebuild", "balances", **env_of(booked), fail_at=step)
    assert killed.returncode == -signal.SIGKILL
    begun = await version_in(booked, "balances", "building")
    assert begun.phase == ("loading" if step.startswith("rebuild.committed") else "following")
    loaded = await rows(booked, f"SELECT count(*) FROM {begun.schema}.projection_cursors WHERE seq > 0")
    assert loaded == [(3 if begun.phase == "loading" else booked.shards,)]
    shown = grabstream("status", "--json", **env_of(booked))
    [building] = [one for one in json.loads(shown.stdout)["versions"] if one["state"] == "building"]
    assert (building["schema"], building["phase"], building["events"]) == (
        begun.schema,
        begun.phase,
        loaded[0][0] * (GRANTS + 1),
    )
    assert grabstream("rebuild", "balances", **env_of(booked)).returncode == 0
    live = await version_in(booked, "balances")
    assert live.version == begun.version
    assert await digests(booked, live) == before


async def test_stopped_in_the_middle_it_goes_on(booked: Settings) -> None:
    """A cancellation between two commits of the load, and Ctrl-C while the live cursors are awaited."""
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
    assert [progress.step for progress in seen] == ["loading"] * 4
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
                found = await others.execute(waits, (f'%{live.schema}"."projection_cursors" %FOR UPDATE%',))
                return (await found.fetchone() or [0])[0] == 1

        await until(waiting, 30, "the rebuild's wait for the cursors")
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode == 130, errors
        assert "goes on from there" in errors
    assert (await version_in(booked, "ledger", "building")).phase == "following"
    assert grabstream("rebuild", "ledger", **env_of(booked)).returncode == 0
    assert await digests(booked, await version_in(booked, "ledger")) == before


async def test_one_rebuild_of_a_projection_at_a_time(booked: Settings) -> None:
    async with open_rebuild(where_of(booked), "ledger"):
        done = grabstream("rebuild", "ledger", **env_of(booked))
        assert done.returncode == 1
        assert "another rebuild of ledger is running" in done.stderr
        assert grabstream("rebuild", "audit", **env_of(booked)).returncode == 0


async def test_a_reader_that_holds_the_views_is_waited_for(booked: Settings) -> None:
    """An open transaction that has read a view keeps seeing what it saw; others are not held up; the switch
    comes when it ends.
    """
    async with await open_books(booked) as reader, await AsyncConnection.connect(booked.postgres) as snapshot:
        async with reader.transaction():
            await reader.execute("SELECT count(*) FROM transfers")
            refused = grabstream("rebuild", "ledger", "--patience", "0", **env_of(booked))
            assert refused.returncode == 1
            assert "the same command tries again" in refused.stderr
            assert await rows(booked, "SELECT count(*) FROM accounts WHERE account LIKE 'offer:%'") == [
                (booked.shards,)
            ]
        # Another one has read nothing of ours, but its snapshot is older than the rows of the new version.
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


async def test_readers_of_any_role_keep_what_they_saw(booked: Settings, servers: Settings) -> None:
    """A switch by a role that is no superuser waits for a snapshot of another role, and is done when that one
    lets go.
    """
    [(privileged,)] = await rows(
        booked,
        "SELECT rolsuper OR EXISTS (SELECT FROM pg_auth_members WHERE member = pg_roles.oid) FROM pg_roles "
        "WHERE rolname = user",
    )
    assert not privileged
    admin = load_settings().postgres
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
            await asyncio.sleep(1)  # whether it waits already or not, it may not be done before the reader is
            assert await (await reader.execute(count)).fetchone() == (booked.shards * (GRANTS + 1),)
            await reader.commit()
            assert (await waiting).returncode == 0
            assert await (await reader.execute(count)).fetchone() == (booked.shards * (GRANTS + 1),)
    finally:
        async with await AsyncConnection.connect(admin, autocommit=True) as connection:
            role = sql.Identifier(f"{booked.schema_}_reader")
            await connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            await connection.execute(sql.SQL("DROP ROLE {}").format(role))


async def test_a_snapshot_that_goes_while_it_is_waited_for(booked: Settings) -> None:
    """In one transaction of the one who waits, as in a switch; and a worker that waits for us is not waited
    for.
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
                lambda: _is(booked, blocked % worker.info.backend_pid, [(1,)]), 10, "the worker's wait"
            )
            with pytest.raises(Busy, match=f"pid {reader.info.backend_pid},"):
                await older_snapshots_gone(us, booked.schema_, 0.2)
            gone = asyncio.create_task(older_snapshots_gone(us, booked.schema_, 20))
            await reader.execute("SELECT 1")  # another statement of the same snapshot
            assert not (await asyncio.wait({gone}, timeout=0.5))[0]
            await reader.rollback()
            await gone
        await waits


async def test_a_journal_that_lost_records_is_refused_and_the_audit_trail_has_them(booked: Settings) -> None:
    """What the journal cannot give any more is said, and the live version is left alone."""
    elsewhere = where_of(booked)._replace(journal=f"{booked.prefix}.events")
    async with (
        open_rebuild(elsewhere, "ledger") as work,
        open_source(
            "journal", elsewhere.kafka, elsewhere.journal, elsewhere.postgres, elsewhere.schema
        ) as source,
    ):
        with pytest.raises(RebuildRefused, match=r"shard 0: .*ends"):
            await work.build(source)
    await damaged(booked, "UPDATE accounts_1 SET posted = 1 WHERE account = 'wallet:u3'")
    assert grabstream("rebuild", "ledger", "--from", "audit", "--accept", **env_of(booked)).returncode == 0
    assert not await rows(booked, "SELECT asset FROM accounts GROUP BY asset HAVING sum(posted) <> 0")


async def test_a_worker_that_was_idle_meanwhile_goes_on_with_the_new_version(
    booked: Settings, journal: JournalWriter, worker: Callable[..., Any]
) -> None:  # fmt: skip
    """The version that it wrote last is gone when the next event comes."""
    at_work = worker(booked, "project")

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
    assert at_work.process.poll() is None
    assert at_work.stop() == 0


def test_shards_are_dealt_out_evenly() -> None:
    assert deal({0: 5, 1: 9, 2: 4, 3: 1}, 2) == [[1, 3], [0, 2]]
    assert deal({0: 5}, 4) == [[0]]


async def test_processes_load_the_same_rows(booked: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards dealt out to processes; what one of them cannot read is said, and the others are ended."""
    monkeypatch.setattr("grabstream.streams.rebuilding.rebuild.PROCESSES_EVENTS_MIN", 1)
    before = await digests(booked, await version_in(booked, "balances"))
    new = await rebuilt(booked, "balances", jobs=2)
    assert await digests(booked, new) == before
    ledger = await version_in(booked, "ledger")
    async with await open_books(booked) as books:
        await books.execute(
            f"UPDATE {ledger.schema}.projection_cursors SET next_offset = next_offset + 9 WHERE shard = "
            "2".encode()
        )
    with pytest.raises(RebuildRefused, match="shard 2: it ends at offset 2, the live read model is at 11"):
        await rebuilt(booked, "ledger", jobs=2)
    async with await open_books(booked) as books:
        await books.execute(
            f"UPDATE {ledger.schema}.projection_cursors SET next_offset = next_offset - 9 WHERE shard = "
            "2".encode()
        )
    assert await digests(booked, await rebuilt(booked, "ledger", jobs=2)) == await digests(booked, ledger)


async def test_all_read_models_one_after_the_other(booked: Settings) -> None:
    """And a definition that is not the live one's is said beforehand."""
    expected = {name: (await version_in(booked, name)).version + 1 for name in PROJECTIONS}
    done = grabstream("rebuild", "all", "--json", "--no-keep", **env_of(booked))
    assert done.returncode == 0, done.stderr
    assert {one["projection"]: one["new"]["version"] for one in json.loads(done.stdout)} == expected
    for projection in PROJECTIONS:
        assert [one.version for one in await all_versions(booked, projection)] == [expected[projection]]
    plan = subprocess.run(
        [sys.executable, "-m", "tests.streams.rebuilding.changed", "rebuild", "balances", "--dry-run"],
        env=child_environment(**env_of(booked)), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "of definition 3 from the journal" in plan.stdout.replace("\n", " ")
    assert "offers_1.title may differ" in plan.stdout.replace("\n", " ")
    shown = subprocess.run(
        [sys.executable, "-m", "tests.streams.rebuilding.changed", "status", "--json"],
        env=child_environment(**env_of(booked)), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 1
    assert json.loads(shown.stdout)["waiting"] == {"balances": 3}


async def test_a_live_version_of_another_history_is_refused(booked: Settings) -> None:
    """At the same seq with another hash, nothing is compared or shown, whatever is read; with the right hash
    all is well.
    """
    ledger = await version_in(booked, "ledger")
    table = f"{ledger.schema}.projection_cursors"
    [(head,)] = await rows(booked, f"SELECT head FROM {table} WHERE shard = 1")
    async with await open_books(booked) as books:
        await books.execute(f"UPDATE {table} SET head = %s WHERE shard = 1".encode(), (b"\x01" * 32,))
        for source, reason in (("journal", "different histories"), ("audit", "another history")):
            with pytest.raises(RebuildRefused, match=f"shard 1.*{reason}"):
                await rebuilt(booked, "ledger", source)
        await books.execute(f"UPDATE {table} SET head = %s WHERE shard = 1".encode(), (head,))
    assert (await version_in(booked, "ledger")).schema == ledger.schema
    assert await digests(booked, await rebuilt(booked, "ledger")) == await digests(booked, ledger)
