"""Systems that share Redis, Kafka and PostgreSQL, with everything on: what is done to one does not affect
another.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from psycopg import IsolationLevel, sql

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.projections.database.sessions import connect
from grabstream.projections.database.system import schemas_of
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.topic_ids import find_topic
from grabstream.streams.topics import Topics, retention_ms
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import until
from tests.ops.neighbours import systems
from tests.support.backup_recipes import DECIDING, assert_verified, run_recipe
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows

pytestmark = pytest.mark.long

READING = "project,publish,verify"
OFFERS = ("e", "f")
AT_ONCE = 4


class Crowd:
    """Grabs parts of a system's envelopes, a few at a time, and records the amount of each user."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.given: Counter[str] = Counter()
        self.over = False

    async def open(self) -> None:
        terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=1_000_000, parts=20_000)
        async with open_gate(self.settings) as gate:
            opened = await gate.decide(
                [Open(id=f"open-{offer}", offer=offer, terms=terms) for offer in OFFERS],
                patience_ms=90_000,
                timeout_ms=90_000,
            )
            assert {answer.outcome for answer in opened} == {"opened"}

    async def run(self, times: float = float("inf")) -> None:
        """Repeats this many times, or until `over`."""
        self.over = False
        async with open_gate(self.settings) as gate:
            while times > 0 and not self.over:
                users = [f"u{len(self.given) + number}" for number in range(AT_ONCE)]
                grabs = [
                    Grab(id=f"g-{user}-{offer}", offer=offer, user=user) for user in users for offer in OFFERS
                ]
                answers = await gate.decide(grabs, patience_ms=60_000, timeout_ms=60_000)
                assert {answer.outcome for answer in answers} == {"granted"}
                for command, answer in zip(grabs, answers, strict=True):
                    self.given[command.user] += answer.amount
                times -= 1
                await asyncio.sleep(0.1)

    async def has_what_it_was_given(self) -> None:
        """Verifies the system, and compares its balances with the answers of its gate."""
        await assert_verified(self.settings)
        assert (
            dict(await rows(self.settings, "SELECT user_id, available FROM balances WHERE user_id LIKE 'u%'"))
            == self.given
        )
        assert await rows(self.settings, "TABLE findings") == []


@asynccontextmanager
async def going_on(crowds: list[Crowd]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(crowd.run()) for crowd in crowds]
    try:
        yield
    finally:
        for crowd in crowds:
            crowd.over = True
        # What was asked for is answered first.
        await asyncio.gather(*tasks)


async def everything_of(settings: Settings) -> dict[str, Any]:
    """Digests of a system's rows and sequences by schema, its topics with their ends, and its keys."""
    found: dict[str, Any] = {}
    async with await open_books(settings) as books:
        for schema in await schemas_of(books, settings.schema_):
            relations = await books.execute(
                "SELECT relname, relkind::text, pg_get_viewdef(oid) FROM pg_class WHERE relnamespace = "
                "%s::regnamespace "
                "AND relkind IN ('r', 'S', 'v')",
                (schema,),
            )
            for name, kind, view in await relations.fetchall():
                rows_of = (
                    "last_value, is_called"
                    if kind == "S"
                    else "md5(string_agg(t::text, '' ORDER BY t::text))"
                )
                query = sql.SQL(f"SELECT {rows_of} FROM {{}} AS t").format(sql.Identifier(schema, name))
                found[f"{schema}.{name}"] = (
                    view if kind == "v" else await (await books.execute(query)).fetchone()
                )
    async with started(AIOKafkaConsumer(bootstrap_servers=settings.kafka)) as consumer:
        for name in retention_ms(Topics(settings.prefix), settings.refusals_topic):
            topic = await find_topic(settings.kafka, name)
            assert topic is not None
            parts = [TopicPartition(name, number) for number in range(topic.partitions)]
            found[name] = (topic, await consumer.beginning_offsets(parts), await consumer.end_offsets(parts))
    redis = open_redis(settings)
    try:
        async for key in redis.scan_iter(match=f"{settings.prefix}[:/]*", count=1_000):
            found[key.decode()] = (hashlib.sha256(await redis.dump(key)).hexdigest(), await redis.pttl(key))
    finally:
        await redis.aclose()
    return found


async def verified(settings: Settings) -> bool:
    """Whether the running verifier has reached the end of every shard's trail."""
    query = (
        "SELECT count(*) FROM verification JOIN cursors USING (shard) WHERE projection = 'audit' AND "
        "verification.seq >= cursors.seq"
    )
    return bool(await rows(settings, query) == [(settings.shards,)])


async def rebuilt(crowd: Crowd) -> None:
    """Rebuilds all read models of a system, with a short patience."""
    words = ("rebuild", "all", "--no-keep", "--patience", "30")
    done = await asyncio.to_thread(
        grabstream, *words, **env_of(crowd.settings), shards=str(crowd.settings.shards)
    )
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def reading_for_long(settings: Settings) -> AsyncIterator[None]:
    """Holds a snapshot in a session of a system, like `verify`."""
    async with await connect(settings.postgres, settings.schema_) as reader:
        await reader.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        async with reader.transaction():
            await reader.execute("SELECT 1")
            yield


async def test_rebuild_and_removal_of_a_system_do_not_change_another(
    servers: Settings, worker: Callable[..., Any]
) -> None:
    """The other system has some rows of every kind, and no activity except a reader."""
    async with systems(servers, 2) as made:
        one, other = Crowd(made[0]), made[1]
        at_work = worker(one.settings, f"{DECIDING},{READING}")
        redis = open_redis(other)
        await redis.hset(key_space(other).shard(0).state, "seq", 7)
        await redis.aclose()
        async with (
            await open_books(other) as books,
            started(AIOKafkaProducer(bootstrap_servers=other.kafka)) as producer,
        ):
            await books.execute(
                "INSERT INTO findings (kind, shard, subject, what) VALUES ('keys', 0, 's', 'w')"
            )
            await producer.send_and_wait(Topics(other.prefix).events, b"{}", partition=0)
        before = await everything_of(other)
        await one.open()
        async with going_on([one]), reading_for_long(other):
            await until(lambda: len(one.given) >= AT_ONCE, 30, "a grab")
            await rebuilt(one)
        await one.has_what_it_was_given()
        assert at_work.stop() == 0
        await take_down(one.settings)
        assert await everything_of(other) == before


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_systems_do_not_affect_each_other(
    servers: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    """One stands still; one is backed up and restored; two are rebuilt at the same time, and one of them is
    taken away.
    """
    async with systems(servers, 4) as made:
        crowds = [Crowd(settings) for settings in made]
        restored, still, kept, gone = crowds
        lively = [restored, kept, gone]
        workers = {
            crowd: [worker(crowd.settings, DECIDING), worker(crowd.settings, READING)] for crowd in crowds
        }
        await asyncio.gather(*(crowd.open() for crowd in crowds))
        await asyncio.gather(*(crowd.run(3) for crowd in crowds))
        await still.has_what_it_was_given()
        assert [one.stop() for one in workers[still]] == [0, 0]
        before = await everything_of(still.settings)
        async with going_on(lively):
            backup = asyncio.to_thread(run_recipe, "backup", restored.settings, tmp_path)
            async with reading_for_long(restored.settings):
                await asyncio.gather(backup, rebuilt(kept), rebuilt(gone))
            assert workers[restored].pop().stop() == 0
            await asyncio.to_thread(run_recipe, "restore", restored.settings, tmp_path)
            workers[restored].append(worker(restored.settings, READING))
        for crowd in lively:
            await crowd.has_what_it_was_given()
        await until(lambda: verified(restored.settings), 120, "the running verifier's round")
        assert [one.stop() for one in workers[gone]] == [0, 0]
        await take_down(gone.settings)
        assert await everything_of(still.settings) == before
        for crowd in (restored, kept):
            await crowd.run(1)
        for crowd in (restored, still, kept):
            await crowd.has_what_it_was_given()
        assert all(one.process.poll() is None for crowd in (restored, kept) for one in workers[crowd])
