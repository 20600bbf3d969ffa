"""Systems that share Redis, Kafka and PostgreSQL under names that begin alike: whatever is done to one, the others do not notice it."""

import asyncio
import secrets
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from models.commands import Grab, Open
from models.offers import StockTerms
from ops.connections import key_space, open_gate, open_redis
from ops.diagnosis.examination import examine
from ops.making import make_system
from ops.rehearsal.run import open_books
from ops.rehearsal.stage import take_down
from ops.services import LocalServices, free_ports
from ops.settings import Settings
from ops.verification import verify
from tests.conftest import Worker, until
from tests.ops.test_backup import carry_out
from tests.ops.test_cli import grabstream, of
from tests.streams.test_projections import rows

#: What prefixes and schemas begin with, and how they go on: like a pattern of the other, a topic, a version of a read model, a moment.
NAMES = (("", ""), ("_b", "_b"), (".journal", "_balances"), ("-b", "__at_"))
GRABS_A_STEP = 20


@asynccontextmanager
async def systems(servers: Settings, count: int) -> AsyncIterator[list[Settings]]:
    """So many systems with few shards."""
    start = f"test{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        made = []
        for prefix, schema in NAMES[:count]:
            settings = servers.model_copy(update={"prefix": start + prefix, "schema_": start + schema, "shards": 2})
            await make_system(settings)
            stack.push_async_callback(take_down, settings)
            made.append(settings)
        yield made


async def sequences(settings: Settings) -> list[Any]:
    query = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = '{}' ORDER BY 1"
    return await rows(settings, query.format(settings.schema_))


async def test_a_backup_has_one_system_and_its_restore_touches_no_other(servers: Settings, tmp_path: Path) -> None:
    async with systems(servers, 3) as (first, *others):
        finding = "INSERT INTO findings (kind, shard, subject, what) VALUES ('keys', 0, '{}', 'w')"
        for settings in (first, *others):
            async with await open_books(settings) as books:
                await books.execute(finding.format("a").encode())
        await asyncio.to_thread(carry_out, "backup", first, tmp_path)
        listed = subprocess.run(["pg_restore", "--list", tmp_path / "kept" / "books.dump"], check=True, capture_output=True, text=True)
        own = [line.split()[5] for line in listed.stdout.splitlines() if line.split()[3:4] == ["SCHEMA"]]
        names = ("", "_audit_1", "_balances_1", "_balances_2", "_events_1", "_ledger_1")
        assert sorted(own) == sorted(f"{first.schema_}{name}" for name in names if f"{first.schema_}{name}" in own)
        assert len(own) == 5
        for settings in (first, *others):
            async with await open_books(settings) as books:
                await books.execute(finding.format("b").encode())
        before = [(await sequences(one), await rows(one, "TABLE findings"), await rows(one, "TABLE system")) for one in others]
        for how in ("restore", "anew"):
            await asyncio.to_thread(carry_out, how, first, tmp_path)
            assert [(await sequences(one), await rows(one, "TABLE findings"), await rows(one, "TABLE system")) for one in others] == before
            assert await rows(first, "SELECT subject FROM findings ORDER BY id") == ([("a",)] if how == "restore" else [])


class Crowd:
    """Grabs in a system without an end, and counts the answers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.outcomes: Counter[str] = Counter()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with open_gate(self.settings) as gate:
            terms = StockTerms(issuer="shop", total=1_000_000)
            opened = [Open(id=f"open-{n}", offer=f"o{n}", terms=terms) for n in range(4)]
            await gate.decide(opened, patience_ms=60_000, timeout_ms=60_000)
            for step in range(1_000_000):
                grabs = [Grab(id=f"g{step}-{n}", offer=f"o{n % 4}" if n else "none", user=f"u{n}") for n in range(GRABS_A_STEP + 1)]
                answers = await gate.decide(grabs, patience_ms=60_000, timeout_ms=60_000)
                self.outcomes.update(answer.outcome for answer in answers)
                await asyncio.sleep(0.3)

    async def more(self) -> None:
        """Returns when some more were answered; raises what went wrong."""
        before = self.outcomes.total()

        async def answered() -> bool:
            if self._task.done():
                self._task.result()
            return self.outcomes.total() > before + 2 * GRABS_A_STEP

        await until(answered, 60, "answers")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def all_is_well(settings: Settings) -> None:
    """Nothing was lost, recovered, stopped or found, and all agrees."""
    wrong = {check.name: check.problems for check in await verify(settings, 120) if not check.passed}
    assert not wrong, (settings.prefix, wrong)
    for table in ("findings", "recoveries", "lost_decisions", "stopped_shards", "set_aside"):
        assert await rows(settings, f"TABLE {table}") == [], (settings.prefix, table)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_systems_side_by_side(servers: Settings, worker: Callable[..., Worker], tmp_path: Path) -> None:
    """Workers, verifiers, rebuilds, moments, backup and restore, and one that is taken down: the others decide, book and verify on."""
    async with systems(servers, 4) as (first, *others):
        workers = {one.prefix: [worker(one, "decide,relay,sweep,project,publish,verify", verify_percent="20")] for one in others}
        deciding, projecting = worker(first, "decide,relay,sweep"), worker(first, "project,publish,verify")
        crowds = {one.prefix: Crowd(one) for one in (first, *others)}

        async def all_go_on() -> None:
            for one in others:
                await crowds[one.prefix].more()
                assert workers[one.prefix][0].process.poll() is None

        try:
            await all_go_on()
            await crowds[first.prefix].more()
            await asyncio.to_thread(carry_out, "backup", first, tmp_path)
            await crowds[first.prefix].more()
            assert projecting.stop() == 0
            await asyncio.to_thread(carry_out, "restore", first, tmp_path)
            projecting = worker(first, "project,publish,verify")
            await all_go_on()
            for one in others:
                done = await asyncio.to_thread(grabstream, "rebuild", "all", "--patience", "150", **of(one), shards="2")
                assert done.returncode == 0, done.stderr
                done = await asyncio.to_thread(grabstream, "rebuild", "redis", **of(one), shards="2")
                assert done.returncode == 0, done.stderr
            done = await asyncio.to_thread(grabstream, "at", "2020-01-01", **of(first), shards="2")
            assert "nothing had happened" in done.stderr
            await all_go_on()
            await crowds[first.prefix].stop()
            await all_is_well_but_rebuilt(first)
            assert [one.stop() for one in (deciding, projecting)] == [0, 0]
            await take_down(first)
            await all_go_on()
            for one in others:
                await crowds[one.prefix].stop()
                await all_is_well_but_rebuilt(one)
                assert set(crowds[one.prefix].outcomes) == {"granted", "no_such_offer"}
                refused = crowds[one.prefix].outcomes["no_such_offer"]
                assert (await rows(one, "SELECT sum(refusals) FROM demand WHERE outcome = 'no_such_offer'"))[0][0] >= refused

            async def verified(one: Settings) -> bool:
                return not await rows(
                    one, "SELECT FROM verified WHERE compared_at IS NULL OR seq = 0 AND shard IN (SELECT shard FROM offers)"
                )

            for one in others:
                await until(lambda one=one: verified(one), 60, "the verifier")
                assert not [finding.what for _, finding in (await examine(one)).findings if finding.severity == "stuck"]
        finally:
            for crowd in crowds.values():
                await crowd.stop()


async def all_is_well_but_rebuilt(settings: Settings) -> None:
    """As `all_is_well`, after a rebuild of Redis by hand, which stands in the books."""
    async with await open_books(settings) as books:
        await books.execute("DELETE FROM recoveries WHERE problem LIKE '%by hand%'")
    await all_is_well(settings)


async def test_announcements_of_another_database_of_the_same_redis(system: Settings) -> None:
    """Channels are the server's, not a database's: the same prefix in another one has other channels."""
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


def test_down_remove_leaves_a_set_whose_directory_begins_alike(tmp_path: Path) -> None:
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
