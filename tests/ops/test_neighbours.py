"""Systems that share Redis, Kafka and PostgreSQL under names that begin alike: what is done to one does not
affect the others.
"""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_redis
from grabstream.projections.database.system import schemas_of
from grabstream.settings import Settings, is_cluster
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.services import LocalServices, free_ports
from tests.ops.neighbours import systems
from tests.support.backup_recipes import run_recipe
from tests.support.projecting import rows


async def sequences(settings: Settings) -> list[Any]:
    query = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = '{}' ORDER BY 1"
    return await rows(settings, query.format(settings.schema_))


@pytest.mark.long
async def test_backup_and_restore_concern_one_system_only(servers: Settings, tmp_path: Path) -> None:
    async with systems(servers, 3) as (first, *others):
        finding = "INSERT INTO findings (kind, shard, subject, what) VALUES ('keys', 0, '{}', 'w')"
        for settings in (first, *others):
            async with await open_books(settings) as books:
                await books.execute(finding.format("a").encode())
        await asyncio.to_thread(run_recipe, "backup", first, tmp_path)
        listed = subprocess.run(
            ["pg_restore", "--list", tmp_path / "kept" / "books.dump"],
            check=True,
            capture_output=True,
            text=True,
        )
        own = [line.split()[5] for line in listed.stdout.splitlines() if line.split()[3:4] == ["SCHEMA"]]
        async with await open_books(first) as books:
            assert sorted(own) == sorted(await schemas_of(books, first.schema_))
        # Its own, and one each for ledger, balances, audit and events.
        assert len(own) == 5
        for settings in (first, *others):
            async with await open_books(settings) as books:
                await books.execute(finding.format("b").encode())
        before = [
            (await sequences(one), await rows(one, "TABLE findings"), await rows(one, "TABLE system"))
            for one in others
        ]
        for how in ("restore", "anew"):
            await asyncio.to_thread(run_recipe, how, first, tmp_path)
            assert [
                (await sequences(one), await rows(one, "TABLE findings"), await rows(one, "TABLE system"))
                for one in others
            ] == before
            assert await rows(first, "SELECT subject FROM findings ORDER BY id") == (
                [("a",)] if how == "restore" else []
            )


async def test_channels_differ_between_databases_of_one_redis(system: Settings) -> None:
    """Channels belong to the server, not to a database, so a prefix has different channels in each
    database.
    """
    if is_cluster(system.redis_url):
        pytest.skip("a cluster has one database")
    other = system.model_copy(update={"redis_url": system.redis_url.rpartition("/")[0] + "/1"})
    mine, theirs = (key_space(one).shard(0) for one in (system, other))
    assert mine.channel != theirs.channel
    assert mine.state == theirs.state
    redis = open_redis(other)
    try:
        async with redis.pubsub() as listening:
            await listening.subscribe(theirs.channel)
            publishing = open_redis(system)
            assert await publishing.publish(theirs.channel, "1 1") == 1
            assert await publishing.publish(mine.channel, "1 1") == 0
            await publishing.aclose()
    finally:
        await redis.aclose()


@pytest.mark.long
def test_down_remove_keeps_servers_in_a_directory_with_a_similar_name(tmp_path: Path) -> None:
    sets = []
    try:
        for name in ("s", "s_b"):
            sets.append(LocalServices(tmp_path / name, *free_ports(4)))
            for server in (sets[-1].redis, sets[-1].postgres):
                server.start()
        first, second = sets
        kept = second.postgres.data
        assert kept != first.postgres.data
        first.remove()
        assert not first.directory.exists()
        assert not first.postgres.data.exists()
        assert kept.exists()
        assert {name for name, pid in second.status().items() if pid is not None} == {"redis", "postgres"}
        assert second.redis.ready()
        assert second.postgres.ready()
    finally:
        for one in sets:
            one.remove()
