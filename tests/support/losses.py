"""Losses of a system, and traffic before them: deleted topics, a new empty journal, an audit trail without
its last event.
"""

from collections.abc import Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.events import AnyEvent
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.runs import decode_line, singles
from grabstream.ops.initialization import take_new_journal
from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics, create_topics
from grabstream.workshop.rehearsal.run import open_books, read_progress
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows
from tests.support.rebuilding import version_in

OFFERS = 12


async def delete_topics(settings: Settings, *topics: str) -> None:
    """Deletes topics, and returns when they are gone."""
    client = AIOKafkaAdminClient(bootstrap_servers=settings.kafka)
    await client.start()
    try:
        await client.delete_topics(list(topics))

        async def gone() -> bool:
            return not set(topics) & set(await client.list_topics())

        await until(gone, 30, "the end of the topics")
    finally:
        await client.close()


async def take_parts(settings: Settings, name: str) -> None:
    """Opens envelopes in all shards, grabs parts of each, and returns when all events are in the read models
    and on the topic of single events.
    """
    before = await published(settings)
    async with open_gate(settings) as gate, await open_books(settings) as books:
        terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=10_000, parts=20)
        await gate.decide(
            [Open(id=f"o{n}", offer=f"{name}{n}", terms=terms) for n in range(OFFERS)],
            patience_ms=90_000,
            timeout_ms=90_000,
        )
        grabs = [
            Grab(id=f"g{n}-{user}", offer=f"{name}{n}", user=f"u{user}")
            for n in range(OFFERS)
            for user in range(9)
        ]
        assert {
            answer.outcome for answer in await gate.decide(grabs, patience_ms=90_000, timeout_ms=90_000)
        } == {"granted"}
        redis = open_redis(settings)
        try:

            async def booked() -> Any:
                progress = await read_progress(redis, key_space(settings), books)
                return progress.complete and await published(settings) >= before + OFFERS * 10

            await until(booked, 60, "the books")
        finally:
            await redis.aclose()


async def published(settings: Settings) -> int:
    """The number of records on the topic of single events."""
    async with open_reader(settings.kafka, Topics(settings.prefix).events) as reader:
        return sum([await reader.end(shard) for shard in range(settings.shards)])


async def empty_journal(settings: Settings) -> None:
    """Makes an empty journal in place of the deleted one. `init` refuses it; this takes it all the same, as a
    careless operator could.
    """
    done = grabstream("init", **env_of(settings))
    assert (
        done.returncode,
        "for good, `grabstream rebuild journal --from audit --new-journal`" in done.stderr,
    ) == (2, True), done.stderr
    await create_topics(settings.kafka, Topics(settings.prefix), settings.shards)
    done = grabstream("rebuild", "redis", "--dry-run", **env_of(settings))
    assert (done.returncode, "the topic of that name has the id" in done.stderr) == (2, True), done.stderr
    redis = open_redis(settings)
    try:
        await take_new_journal(settings, redis)
    finally:
        await redis.aclose()


async def forget_last_audit_row(settings: Settings) -> tuple[int, Sequence[AnyEvent]]:
    """Removes the last line of a shard from the audit trail, with its cursor; returns the shard and the
    events of the line.
    """
    query = (
        "SELECT a.shard, a.seq, body FROM audit a JOIN cursors c ON c.projection = 'audit' AND "
        "(c.shard, c.seq) = (a.shard, a.seq + a.seqs - 1) ORDER BY a.seq DESC"
    )
    [(shard, seq, body), *_] = await rows(settings, query)
    schema = (await version_in(settings, "audit")).schema
    async with await open_books(settings) as books:
        [head] = await (
            await books.execute("SELECT hash FROM audit WHERE (shard, seq + seqs) = (%s, %s)", (shard, seq))
        ).fetchone() or [b""]
        await books.execute(
            f"DELETE FROM {schema}.audit_1 WHERE (shard, seq) = (%s, %s)".encode(), (shard, seq)
        )
        await books.execute(
            f"UPDATE {schema}.projection_cursors SET seq = %s, head = %s WHERE shard = %s".encode(),
            (seq - 1, head, shard),
        )
    return shard, singles(decode_line(body.encode()))
