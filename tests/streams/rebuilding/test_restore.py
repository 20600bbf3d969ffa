"""The journal restored from the audit trail: the topic is deleted and filled again, and the system continues
without a loss.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from grabstream.connections.opening import key_space, open_gate, open_redis, where_of
from grabstream.models.commands import Grab
from grabstream.models.journal import marker_headers
from grabstream.ops.initialization import take_new_journal
from grabstream.ops.verification.verifying import verify
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import Version, versions
from grabstream.settings import Settings
from grabstream.streams.rebuilding.restore import Restore
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.losses import (
    OFFERS,
    delete_topics,
    empty_journal,
    forget_last_audit_row,
    published,
    take_parts,
)
from tests.support.projecting import rows
from tests.support.rebuilding import digests, rebuilt, version_in

pytestmark = pytest.mark.long

RESTORE_JOURNAL = ("rebuild", "journal", "--from", "audit", "--new-journal")


async def append(settings: Settings, shard: int, value: bytes, headers: list[tuple[str, bytes]]) -> None:
    """Appends a record to a partition of the journal."""
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka)
    await producer.start()
    await producer.send_and_wait(Topics(settings.prefix).journal, value, partition=shard, headers=headers)
    await producer.stop()


async def assert_verified(settings: Settings) -> None:
    checks = await verify(settings, share=1)
    assert not {check.name: check.problems for check in checks if not check.passed}


@pytest.mark.parametrize("lost", ["events too", pytest.param("journal", marks=pytest.mark.nightly)])
async def test_restoring_the_journal_returns_all_events_and_traffic_continues(
    system: Settings, worker: Callable[..., Any], lost: str
) -> None:
    topics = Topics(system.prefix)
    first = worker(system)
    await take_parts(system, "a")
    assert first.stop() == 0
    events = OFFERS * 10
    before = {
        projection: await digests(system, await version_in(system, projection)) for projection in PROJECTIONS
    }
    sent = await published(system)
    await delete_topics(system, topics.journal, *([topics.events] if lost == "events too" else []))
    done = grabstream(*RESTORE_JOURNAL, "--json", **env_of(system))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["events"], result["written"]) == (events, events)
    assert "journal: restoring the journal" in done.stderr
    # A second run writes nothing.
    again = grabstream(*RESTORE_JOURNAL, "--json", **env_of(system))
    assert (again.returncode, json.loads(again.stdout)["written"]) == (0, 0)
    for projection in PROJECTIONS:
        assert await digests(system, await rebuilt(system, projection)) == before[projection]
    [(last_events, shards)] = await rows(
        system,
        "SELECT sum(seqs)::int, count(*) FROM "
        "(SELECT DISTINCT ON (shard) seqs FROM audit ORDER BY shard, seq DESC) AS last",
    )
    worker(system)
    await take_parts(system, "b")
    await assert_verified(system)
    [(last,)] = await rows(system, "SELECT sum(seq)::int FROM cursors WHERE projection = 'audit'")
    assert last == 2 * events
    # Only the events of the last line of each shard were published again, once per restore.
    assert shards == len(await rows(system, "SELECT DISTINCT shard FROM audit WHERE offer LIKE 'a%'"))
    kept = sent if lost == "journal" else 0
    assert await published(system) == kept + 2 * last_events + events
    refused = grabstream(*RESTORE_JOURNAL, **env_of(system))
    assert refused.returncode == 1
    assert "stop the workers" in refused.stderr


async def test_a_restore_names_events_that_the_audit_trail_lacks(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The message names every place that has more events than the audit trail, with their seqs. With
    --accept-loss they are removed everywhere, and all places agree again.
    """
    first = worker(system)
    await take_parts(system, "a")
    assert first.stop() == 0
    refused = grabstream(*RESTORE_JOURNAL, **env_of(system))
    assert refused.returncode == 1
    assert "the journal contains events, seq 1 to " in refused.stderr
    assert (
        f"`kafka-topics.sh --bootstrap-server {system.kafka} --delete --topic {system.prefix}.journal`"
        in refused.stderr
    )
    # A second version of the ledger has the event too.
    await rebuilt(system, "ledger")
    topics = Topics(system.prefix)
    await delete_topics(system, topics.journal)
    shard, lost = await forget_last_audit_row(system)
    first_seq, last_seq = lost[0].seq, lost[-1].seq
    refused = grabstream(*RESTORE_JOURNAL, "--dry-run", **env_of(system))
    assert refused.returncode == 1
    for has_event in ("ledger", "balances", "the checkpoint in Redis", "the events topic"):
        assert f"shard {shard}: {has_event}" in refused.stderr
    assert f"the text of seq {first_seq} to {last_seq} is on {topics.events} only" in refused.stderr
    assert "--accept-loss" in refused.stderr
    accepted = (*RESTORE_JOURNAL, "--accept-loss", "--json")
    refused = grabstream(*accepted, **env_of(system))
    assert (refused.returncode, refused.stderr.count(f"shard {shard}: ")) == (1, 1)
    assert "delete that topic too, and add --republish" in refused.stderr
    await delete_topics(system, topics.events)
    refused = grabstream(*RESTORE_JOURNAL, **env_of(system))
    assert f"the text of seq {first_seq} to {last_seq} exists nowhere else" in refused.stderr
    before = {version.schema for version in await all_versions(system)}
    done = grabstream(*accepted, "--republish", **env_of(system))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    given_up = {row["shard"]: row["given_up"] for row in result["shards"] if row["given_up"]}
    assert given_up == {shard: len(lost)}
    now = await all_versions(system)
    assert sorted(before - {version.schema for version in now}) == result["made_anew"]
    assert {version.state for version in now} == {"live"}
    # A second run has nothing to remove.
    again = grabstream(*RESTORE_JOURNAL, "--json", **env_of(system))
    assert (again.returncode, json.loads(again.stdout)["made_anew"]) == (0, []), again.stderr
    worker(system)
    async with open_gate(system) as gate:
        # The removed events count as never decided: the same commands are decided again.
        commands = [Grab(id=event.grab, offer=event.offer, user=event.user) for event in lost]
        answers = await gate.decide(commands, patience_ms=90_000, timeout_ms=90_000)
        assert [(answer.outcome, answer.repeated, answer.seq) for answer in answers] == [
            ("granted", False, event.seq) for event in lost
        ]
    await take_parts(system, "b")
    await assert_verified(system)


async def all_versions(settings: Settings) -> list[Version]:
    """The versions of all read models."""
    async with await open_books(settings) as books:
        return await versions(books, settings.schema_)


async def test_an_interrupted_restore_continues_with_a_higher_term(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """One shard is written, another has only its marker. The next run writes them under a higher term, also
    higher than that of a marker of an unknown relay.
    """
    first = worker(system)
    await take_parts(system, "a")
    assert first.stop() == 0
    topics = Topics(system.prefix)
    await delete_topics(system, topics.journal)
    redis = open_redis(system)
    try:
        assert grabstream(*RESTORE_JOURNAL, "--dry-run", **env_of(system)).returncode == 0  # makes the topic
        work = Restore(where_of(system), redis, key_space(system), topics.events, "test")
        plans = await work.plan()
        half = [plan for plan in plans if plan.end.seq][:2]

        def stop_soon(progress: Any) -> None:
            if progress.done >= half[0].end.seq:
                cutting.cancel()

        cutting = asyncio.create_task(work.run(half, stop_soon))
        with pytest.raises(asyncio.CancelledError):
            await cutting
        later = await work.plan()
        assert {plan.shard: plan.restored.seq for plan in later if plan.restored.seq} == {
            half[0].shard: half[0].end.seq
        }
        assert await work.run(later) == sum(plan.end.seq for plan in plans) - half[0].end.seq
        # A marker of an unknown relay has no events: the next run takes a higher term.
        await append(system, 0, b"", marker_headers(0, 10_000, "stranger"))
        assert await work.run(await work.plan()) == 0
        assert await redis.hget(key_space(system).shard(0).state, "term") == b"10001"
        await take_new_journal(system, redis)
    finally:
        await redis.aclose()
    worker(system)
    await take_parts(system, "b")
    await assert_verified(system)


async def test_rebuild_redis_refuses_a_shard_that_another_command_rebuilds(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """With a worker running; when the lease of the other command has ended, the shard is rebuilt."""
    worker(system)
    await take_parts(system, "a")
    keys, redis = key_space(system).shard(0), open_redis(system)
    try:
        await redis.set(keys.lease, "rebuild-another", px=600_000)
        refused = grabstream("rebuild", "redis", "--json", **env_of(system))
        assert refused.returncode == 1, refused.stderr
        by_shard = {row["shard"]: row for row in json.loads(refused.stdout)}
        assert [shard for shard, row in by_shard.items() if row["refused"]] == [0]
        assert "another `grabstream rebuild redis`" in by_shard[0]["done"]
        assert await redis.get(keys.lease) == b"rebuild-another"
        await redis.delete(keys.lease)
        done = grabstream("rebuild", "redis", "--shard", "0", **env_of(system))
        assert done.returncode == 0, done.stdout
        assert not (await redis.get(keys.lease) or b"").startswith(b"rebuild-")
    finally:
        await redis.aclose()


async def test_a_restore_fills_a_journal_with_markers_of_other_relays(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """A rebuild and a relay, which could not recover, have left markers in the empty journal: it can still be
    filled.
    """
    first = worker(system)
    await take_parts(system, "a")
    assert first.stop() == 0
    await delete_topics(system, Topics(system.prefix).journal)
    await empty_journal(system)
    [(shard, seq)] = await rows(
        system, "SELECT shard, seq FROM cursors WHERE projection = 'audit' ORDER BY seq DESC LIMIT 1"
    )
    for arguments in (["--dry-run"], []):
        refused = grabstream(
            "rebuild", "redis", "--shard", str(shard), "--json", *arguments, **env_of(system)
        )
        assert (refused.returncode, json.loads(refused.stdout)[0]["refused"]) == (1, True)
        assert "the journal ends at seq 0, " in refused.stdout
    redis = open_redis(system)
    try:

        async def term() -> int:
            return int(await redis.hget(key_space(system).shard(shard).state, "term"))

        before = await term()
        relaying = worker(system, "relay")

        async def taken_in_vain() -> bool:
            return await term() > before

        await until(taken_in_vain, 30, "the relay's term")
        assert relaying.stop() == 0
        # Higher than every term outside the topic.
        await append(system, shard, b"", marker_headers(shard, 500, "in-vain"))
        done = grabstream(*RESTORE_JOURNAL, **env_of(system))
        assert done.returncode == 0, done.stderr
        checkpoint = await redis.hmget(
            key_space(system).shard(shard).state, "journaled_term", "journaled_owner", "journaled_offset"
        )
    finally:
        await redis.aclose()
    anchored = await rows(
        system, f"SELECT DISTINCT term, owner, next_offset FROM cursors WHERE shard = {shard} AND seq = {seq}"
    )
    assert anchored == [(501, checkpoint[1].decode(), int(checkpoint[2]))]
    assert checkpoint[0] == b"501"
    worker(system)
    await take_parts(system, "b")
    await assert_verified(system)
