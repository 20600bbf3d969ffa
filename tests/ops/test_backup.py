"""Executes the commands of docs/backup.md: after each loss, the restored books are right."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from grabstream.connections.opening import checked_database, open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.events import AnyEvent
from grabstream.models.offers import EnvelopeTerms
from grabstream.projections.tables import api_keys
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics, retention_ms
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import NIGHTLY, some_by_tier, until
from tests.support.backup_recipes import DECIDING, PROJECTING, assert_verified, run_recipe
from tests.support.losses import delete_topics, forget_last_audit_row
from tests.support.projecting import rows

RESTORES = 30 if NIGHTLY else 4


async def grab(settings: Settings, *users: str, opening: bool = False) -> None:
    async with open_gate(settings) as gate:
        if opening:
            terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=10_000, parts=1_000)
            await gate.decide(
                [Open(id="open", offer="e", terms=terms)], patience_ms=90_000, timeout_ms=90_000
            )
        answers = await gate.decide(
            [Grab(id=f"g-{user}", offer="e", user=user) for user in users],
            patience_ms=90_000,
            timeout_ms=90_000,
        )
        assert {answer.outcome for answer in answers} == {"granted"}


@pytest.mark.long
@pytest.mark.parametrize("how", ["restore", pytest.param("anew", marks=pytest.mark.nightly)])
async def test_lost_postgresql_is_restored(
    system: Settings, worker: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    """With or without a backup, the books then have the events after the backup, and those decided while
    PostgreSQL was away.
    """
    worker(system, DECIDING)
    projecting = worker(system, PROJECTING)
    await grab(system, *(f"a{number}" for number in range(50)), opening=True)
    await assert_verified(system)
    if how == "restore":
        async with checked_database(system) as connection:
            await api_keys.create(connection, "shop", ["grab"], bytes(32), None)
        await asyncio.to_thread(run_recipe, "backup", system, tmp_path)
    await grab(system, *(f"b{number}" for number in range(50)))
    await assert_verified(system)
    books = await rows(system, "SELECT * FROM accounts ORDER BY account, asset")
    assert projecting.stop() == 0
    await asyncio.to_thread(run_recipe, how, system, tmp_path)
    before = await rows(system, "SELECT coalesce(max(seq), 0) FROM cursors WHERE projection = 'ledger'")
    assert before == [(51 if how == "restore" else 0,)]
    kept = await rows(system, "SELECT name, sha256 FROM api_keys")
    assert kept == ([("shop", bytes(32))] if how == "restore" else [])
    worker(system, PROJECTING)
    await assert_verified(system)
    assert await rows(system, "SELECT * FROM accounts ORDER BY account, asset") == books
    await grab(system, "after")
    await assert_verified(system)


@pytest.mark.nightly
async def test_restore_works_while_refusals_are_written(
    system: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    """Deciders and gates write samples and counts of refusals before, between and after the steps of the
    restore.
    """
    deciding, projecting = worker(system, DECIDING), worker(system, PROJECTING)
    await grab(system, *(f"a{number}" for number in range(50)), opening=True)
    await assert_verified(system)
    assert projecting.stop() == 0
    await asyncio.to_thread(run_recipe, "backup", system, tmp_path)
    refused = 0

    async def crowd() -> None:
        nonlocal refused
        async with open_gate(system) as gate:
            while True:
                again = [
                    Grab(id=f"r{refused}-{number}", offer="e", user=f"a{number}") for number in range(50)
                ]
                assert {answer.outcome for answer in await gate.decide(again, patience_ms=30_000)} == {
                    "already_taken"
                }
                refused += len(again)
                # As many a second as a gate keeps, and time for the others of this machine.
                await asyncio.sleep(0.02)

    refusing = asyncio.create_task(crowd())
    try:
        for _ in range(RESTORES):
            before = refused
            await until(lambda before=before: refused > before or refusing.done(), 30, "refusals")
            await asyncio.to_thread(run_recipe, "restore", system, tmp_path)
            for table in ("demand", "refusals_1"):
                await until(
                    lambda table=table: refusing.done() or _has_rows(system, table), 30, f"rows of {table}"
                )
            assert not refusing.done(), refusing.result()
    finally:
        refusing.cancel()
        await asyncio.gather(refusing, return_exceptions=True)
    assert deciding.process.poll() is None
    worker(system, PROJECTING)
    await assert_verified(system)


async def _has_rows(settings: Settings, table: str) -> bool:
    """Whether refusals were written since the restore: the backup has none."""
    return await rows(settings, f"SELECT EXISTS (SELECT FROM {table})") == [(True,)]


@pytest.mark.every_change("one loss of Redis")
async def test_lost_redis_is_rebuilt_without_a_command(system: Settings, worker: Callable[..., Any]) -> None:
    """Redis needs no backup."""
    worker(system, DECIDING)
    worker(system, PROJECTING)
    await grab(system, *(f"a{number}" for number in range(50)), opening=True)
    redis = open_redis(system)
    try:
        keys = [key async for key in redis.scan_iter(match=f"{system.prefix}:*", count=1_000)]
        for key in keys:
            await redis.unlink(key)
    finally:
        await redis.aclose()
    await grab(system, "after")
    await assert_verified(system)


@pytest.mark.long
async def test_everything_is_restored_into_new_servers(
    system: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    """New servers have nothing of it: the books come from the backup, the journal from the books, Redis from
    the journal.
    """
    workers = [worker(system, DECIDING), worker(system, PROJECTING)]
    await grab(system, *(f"a{number}" for number in range(50)), opening=True)
    await assert_verified(system)
    await asyncio.to_thread(run_recipe, "backup", system, tmp_path)
    books = await rows(system, "SELECT * FROM accounts ORDER BY account, asset")
    assert [one.stop() for one in workers] == [0, 0]
    await take_down(system)
    await until(lambda: gone(system), 30, "the topics' end")
    await asyncio.to_thread(run_recipe, "everything", system, tmp_path)
    worker(system, PROJECTING)
    assert await rows(system, "SELECT * FROM accounts ORDER BY account, asset") == books
    worker(system, DECIDING)
    await grab(system, "after")
    await assert_verified(system)
    assert await rows(system, "SELECT count(*) FROM grabs") == [(51,)]


async def gone(settings: Settings) -> bool:
    """Whether all topics are gone."""
    async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka)) as client:
        return not set(retention_ms(Topics(settings.prefix))) & set(await client.list_topics())


@pytest.mark.long
@pytest.mark.parametrize("how", some_by_tier(["journal-with-loss", "journal"], 2))
async def test_lost_journal_is_restored_from_the_audit_trail(
    system: Settings, worker: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    """A ledger that has more events than the audit trail starts again from the beginning."""
    workers = [worker(system, DECIDING), worker(system, PROJECTING)]
    await grab(system, *(f"a{number}" for number in range(50)), opening=True)
    await assert_verified(system)
    assert [one.stop() for one in workers] == [0, 0]
    topics = Topics(system.prefix)
    await delete_topics(system, topics.journal, topics.events)
    lost: Sequence[AnyEvent] = ()
    if how == "journal-with-loss":
        _, lost = await forget_last_audit_row(system)
    await asyncio.to_thread(run_recipe, how, system, tmp_path)
    worker(system, DECIDING)
    worker(system, PROJECTING)
    await grab(system, "after")
    await assert_verified(system)
    grabbed = await rows(system, "SELECT count(*) FROM grabs")
    assert grabbed == [(51 - len(lost),)]
