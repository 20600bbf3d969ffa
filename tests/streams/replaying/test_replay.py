"""Replay and the time machine, against read models that were built live: the same rows, to any point, from
either source.
"""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from click.testing import CliRunner
from psycopg import AsyncConnection

from grabstream.models.transfers import transfers_of
from grabstream.ops.commands.read.at import at as at_verb
from grabstream.ops.commands.rebuild.replay import replay as replay_verb
from grabstream.ops.formats.moments import show_time
from grabstream.ops.formats.replay_request import request
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.services.servers import PROJECT
from grabstream.ops.settings import Settings, child_environment, load_settings
from grabstream.projections.database.locks import hold
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.replaying.history import JournalSource, Point
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.streams.replaying.histories import System, live, schemas
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import LINES, SHARD, JournalWriter, granted, opened, rows, running


@pytest.fixture
async def journal_of(system: Settings) -> AsyncIterator[JournalWriter]:
    """The journal of a system of a test's own."""
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka, acks="all")
    await producer.start()
    yield JournalWriter(system, producer)
    await producer.stop()


@pytest.mark.parametrize("words", [("--user", "nobody"), ("--from", "2030-01-01")])
async def test_nothing_is_said_to_be_nothing(told: System, words: tuple[str, ...]) -> None:
    done = told.replay("--into", "-", *words)
    assert (done.returncode, done.stdout) == (0, "")
    assert "0 events" in done.stderr


# -- lines ---------------------------------------------------------------------------------------------------


async def test_lines_are_those_of_the_journal(told: System) -> None:
    """From either source, without the server of the other; only to begin in the middle the journal asks
    PostgreSQL, and does without.
    """
    without = {"journal": {"postgres": "postgresql://127.0.0.1:1/x"}, "audit": {"kafka": "127.0.0.1:1"}}
    for source, away in without.items():
        done = grabstream("replay", "--into", "-", "--source", source, **{**env_of(told.settings), **away})
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == told.lines()
        assert ("PostgreSQL cannot be reached" in done.stderr) == (source == "journal"), done.stderr
        assert source == "journal" or done.stderr == ""
        done = grabstream(
            "replay",
            "--into",
            "-",
            "--source",
            source,
            "--from",
            "2:300",
            "--shard=2",
            **{**env_of(told.settings), **away},
        )
        assert done.stdout.splitlines() == told.lines(2)[299:]
        assert ("read from its beginning" in done.stderr) == (source == "journal")
        other = {"journal": "audit", "audit": "journal"}[source]
        done = grabstream("replay", "--into", "-", "--source", other, **{**env_of(told.settings), **away})
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr


async def test_any_stretch(told: System) -> None:
    """By seq and by time, both ends included, from both sources; a seq with an offer, a place for one shard
    and a time for the rest.
    """
    history, other = told.histories[2], told.histories[5]
    first, last = history.break_near(0.3) + 1, history.break_near(0.7)
    whole = list(zip(history.lines, history.events, strict=True))
    span = history.lines[first - 1 : last]
    begin, end = history.events[first - 1].at, history.events[last - 1].at
    between = [
        line for line, event in zip(other.lines, other.events, strict=True) if begin <= event.at <= end
    ]
    of_offer = [line for line, event in whole[first - 1 : last] if event.offer == history.envelope]
    assert of_offer
    assert between
    for source in ("journal", "audit"):
        for words, expected in (
            ((f"--from=2:{first}", f"--until=2:{last}", "--shard=2"), span),
            ((f"--from={begin}", f"--until={show_time(end)}"), span + between),
            (
                (
                    f"--from={show_time(begin).removesuffix('Z')}",
                    f"--until={end}",
                    f"--until=5:{10**6}",
                    f"--from=5:{len(other.lines)}",
                ),
                [*span, other.lines[-1]],
            ),
            ((f"--from={first}", f"--until={last}", f"--offer={history.envelope}"), of_offer),
            ((f"--from=2:{len(history.lines) + 1}", "--shard=2"), []),
            (
                (f"--from={history.events[-1].at}", "--shard=2"),
                [line for line, event in whole if event.at == history.events[-1].at],
            ),
        )[:: 1 if source == "journal" else 2]:
            done = told.replay("--into", "-", "--source", source, *words)
            assert done.returncode == 0, done.stderr
            assert [line.encode() for line in done.stdout.splitlines()] == expected, (source, words)
    assert "shard 5 ends at seq" in told.replay("--into", "-", "--until", f"5:{10**6}").stderr


async def test_a_user(told: System) -> None:
    """All that names them, books on their accounts, or is due back for their grabs, also when the grab was
    long before.
    """
    for since in (1, told.places[2]):
        expected = []
        for shard, history in told.histories.items():
            grabs = {
                (event.offer, event.grab) for event in history.events if getattr(event, "user", None) == "u1"
            }
            for line, event in zip(history.lines, history.events, strict=True):
                books = {account for one in transfers_of(event) for account in (one.debit, one.credit)}
                mine = (
                    getattr(
                        event, "user", "u1" if (event.offer, getattr(event, "grab", "")) in grabs else None
                    )
                    == "u1"
                )
                if (mine or books & {"wallet:u1", "hold:u1"}) and (shard != 2 or event.seq >= since):
                    expected.append(line.decode())
        done = told.replay("--into", "-", "--user", "u1", "--from", f"2:{since}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == expected
    assert any('"payment.refund_due"' in line for line in expected)
    assert any('"ledger.adjusted"' in line for line in expected)


async def test_a_reader_that_leaves(told: System) -> None:
    """SIGPIPE ends it quietly."""
    command = [sys.executable, "-m", "grabstream.ops.cli", "replay", "--into", "-"]
    running = subprocess.Popen(
        command,
        env=child_environment(**env_of(told.settings)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline().decode() == told.lines()[0] + "\n"
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait(20) == 128 + signal.SIGPIPE


class Counting(JournalSource):
    """Counts the records that chunks were made of."""

    read = 0

    async def chunks(self, *arguments: Any) -> Any:
        async for chunk in super().chunks(*arguments):
            self.read += chunk.read
            yield chunk


async def test_what_lies_before_is_not_read(system: Settings, journal_of: JournalWriter) -> None:
    """From near the end only the end is read; whatever is asked, no event from there on is missing, and what
    comes is the truth.
    """
    lines = [
        opened("e", 1, 100_000),
        *(granted("e", seq).replace(b'"at":%d' % seq, b'"at":%d' % (seq // 3)) for seq in range(2, 601)),
    ]
    await journal_of.marker(1, "a")
    for first in range(1, 601, 2):
        await journal_of.block(lines, first, first + 1)
    await live(system, {SHARD: 600})
    async with (
        await open_books(system) as books,
        open_reader(system.kafka, Topics(system.prefix).journal) as reader,
    ):
        for point in (
            *(Point(seq=seq) for seq in (1, 2, 300, 471, 600, 601)),
            *(Point(at=at) for at in (1, 2, 77, 150, 200, 201)),
        ):
            source = Counting(reader, books)
            found = [
                fact.line
                async for chunk in source.chunks(SHARD, await source.start(SHARD, point))
                for fact in chunk.facts
            ]
            wanted = [
                line
                for seq, line in enumerate(lines, 1)
                if (seq if point.seq else max(seq // 3, 1)) >= point.value
            ]
            assert found[len(found) - len(wanted) :] == wanted, point
            assert found == lines[len(lines) - len(found) :], point
            assert source.read <= 301 * len(wanted) / 600 + 70, point


class OneByOne(JournalReader):
    """Records in lists of one, so that nothing behind a record warns of it."""

    async def read(self, *arguments: Any) -> Any:
        async with aclosing(super().read(*arguments)) as lists:
            async for records in lists:
                for record in records:
                    yield [record]


async def test_a_block_found_in_the_middle_that_does_not_count(
    system: Settings, journal_of: JournalWriter
) -> None:
    """A paused relay wrote it, with another history in it: the search meets it, the audit trail unmasks it,
    the truth is handed out.
    """
    false = [*LINES[:10], *(line.replace(b'"amount":10', b'"amount":11') for line in LINES[10:])]
    await journal_of.marker(1, "a")
    await journal_of.block(LINES, 1, 10)
    await journal_of.marker(2, "b")
    for _ in range(100):
        await journal_of.block(false, 11, 20)  # of the owner before
    await journal_of.block(LINES, 11, 30, 2, "b")
    await live(system, {SHARD: 30})
    async with (
        await open_books(system) as books,
        open_reader(system.kafka, Topics(system.prefix).journal) as reader,
    ):
        source = JournalSource(OneByOne(reader._consumer, reader._topic), books)
        for since in (15, 20, 30):
            start = await source.start(SHARD, Point(seq=since))
            assert start.cursor.seq == 10  # it begins at one of those
            found = [fact.line async for chunk in source.chunks(SHARD, start) for fact in chunk.facts]
            assert found == LINES[10:]


async def test_a_true_block_of_a_paused_relay_behind_the_end(
    system: Settings, journal_of: JournalWriter
) -> None:
    """It says what is true, and nothing follows it: what stands before it in the journal, and behind it in
    seq, is not forgotten.
    """
    await journal_of.marker(1, "a")
    await journal_of.block(LINES, 1, 10)
    await journal_of.marker(2, "b")
    await journal_of.block(LINES, 11, 30, 2, "b")
    for _ in range(100):
        await journal_of.block(LINES, 11, 12)  # of the owner before
    await live(system, {SHARD: 30})
    async with (
        await open_books(system) as books,
        open_reader(system.kafka, Topics(system.prefix).journal) as reader,
    ):
        source = JournalSource(reader, books)
        start = await source.start(SHARD, Point(seq=15))
        assert start.cursor.next_offset > 3  # it begins at one of those
        assert [fact.line async for chunk in source.chunks(SHARD, start) for fact in chunk.facts] == LINES[
            10:
        ]


async def test_a_trail_that_was_tampered_with(told: System) -> None:
    """What lies before it is handed out, then it ends, and says where."""
    change = "UPDATE audit SET body = replace(body, '{}', '{}') WHERE shard = 5 AND seq = 200 RETURNING seq"
    assert await rows(told.settings, change.format('"v":1', '"v":7'))
    try:
        done = told.replay("--into", "-", "--source", "audit")
        assert done.returncode == 1
        assert "shard 5" in done.stderr
        assert "seq 200" in done.stderr
        found = done.stdout.splitlines()
        assert found == told.lines()[: len(told.lines(2)) + 199]
    finally:
        await rows(told.settings, change.format('"v":7', '"v":1'))


# -- a topic -------------------------------------------------------------------------------------------------


async def records(settings: Settings, topic: str) -> list[Any]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    found = []
    try:
        partitions = [TopicPartition(topic, number) for number in range(settings.shards)]
        for partition, end in (await consumer.end_offsets(partitions)).items():
            consumer.assign([partition])
            consumer.seek(partition, 0)
            while end > await consumer.position(partition):
                found += (await consumer.getmany(partition, timeout_ms=500)).get(partition, [])
    finally:
        await consumer.stop()
    return sorted(found, key=lambda record: (record.partition, record.offset))


@pytest.fixture
async def topic(servers: Settings, prefix: str) -> AsyncIterator[str]:
    name = f"{prefix}.mine"
    yield name
    client = AIOKafkaAdminClient(bootstrap_servers=servers.kafka)
    await client.start()
    await client.delete_topics([name])
    await client.close()


async def test_a_topic_gets_what_the_events_topic_has(told: System, topic: str) -> None:
    """Keys, bytes, headers, times: as the publisher makes them."""
    events = Topics(told.settings.prefix).events
    async with running(told.settings, "events") as [publisher]:
        for shard in told.histories:
            await publisher.put(CatchUp(shard))

        async def published() -> bool:
            return len(await records(told.settings, events)) >= len(told.lines())

        await until(published, 30, "all events")
    own = [
        (
            one.partition,
            one.key,
            one.value,
            [header for header in one.headers if header[0] != "cursor"],
            one.timestamp,
        )
        for one in await records(told.settings, events)
    ]
    done = told.replay("--into", f"topic:{topic}", "--json")
    assert done.returncode == 0, done.stderr
    assert sum(shard["events"] for shard in json.loads(done.stdout)["shards"] if "events" in shard) == len(
        told.lines()
    )
    found = await records(told.settings, topic)
    assert [(one.partition, one.key, one.value, list(one.headers), one.timestamp) for one in found] == own
    assert {line.decode() for line in (one.value for one in found)} == set(told.lines())
    # A second time it would all be there twice: that has to be meant.
    done = told.replay("--into", f"topic:{topic}")
    assert done.returncode == 1
    assert "--append" in done.stderr
    last = len(told.histories[5].lines)
    assert (
        told.replay("--into", f"topic:{topic}", "--append", "--from", f"5:{last}", "--shard", "5").returncode
        == 0
    )
    assert (await records(told.settings, topic))[-1].value == told.histories[5].lines[-1]


async def test_two_into_one_topic(told: System, topic: str) -> None:
    """The second is refused, with or without --append, and says who the first one is; each event is in the
    topic once.
    """
    async with await AsyncConnection.connect(told.settings.postgres) as other:
        await hold(other, f"grabstream-replay-topic-{topic}", f"replay into {topic}")
        for words in ((), ("--append",)):
            done = told.replay("--into", f"topic:{topic}", *words)
            assert done.returncode == 1
            assert f"being written by another replay: process {os.getpid()} on " in done.stderr
            assert f"pid {other.info.backend_pid} of PostgreSQL" in done.stderr
    both = await asyncio.gather(
        *(asyncio.to_thread(told.replay, "--into", f"topic:{topic}") for _ in range(2))
    )
    assert sorted(done.returncode for done in both) == [0, 1], [done.stderr for done in both]
    ids = [dict(record.headers)["ce_id"] for record in await records(told.settings, topic)]
    assert len(ids) == len(set(ids)) == len(told.lines())


async def test_into_a_topic_without_postgresql(told: System, topic: str) -> None:
    """Nobody can keep another replay out then: it says so, and goes on."""
    words = ("replay", "--into", f"topic:{topic}", "--shard", "2", "--until", "2:5")
    done = grabstream(*words, **{**env_of(told.settings), "postgres": "postgresql://127.0.0.1:1/x"})
    assert done.returncode == 0, done.stderr
    assert (
        "goes on without a lock, since PostgreSQL cannot be reached: see to it that no other one writes "
        f"topic {topic}" in done.stderr
    )
    assert len(await records(told.settings, topic)) == 5


async def test_topics_that_are_refused(told: System, topic: str) -> None:
    for name in (
        Topics(told.settings.prefix).journal,
        Topics(told.settings.prefix).events,
        Topics(told.settings.prefix).commands,
    ):
        done = told.replay("--into", f"topic:{name}", "--append")
        assert (done.returncode, "the system's own" in done.stderr) == (1, True)
    client = AIOKafkaAdminClient(bootstrap_servers=told.settings.kafka)
    await client.start()
    await client.create_topics([NewTopic(topic, num_partitions=2, replication_factor=1)])
    await client.close()
    for words in ((), ("--dry-run",)):
        done = told.replay("--into", f"topic:{topic}", *words)
        assert (done.returncode, "2 partitions" in done.stderr) == (1, True), done.stderr


async def test_dry_run_writes_nothing(told: System, topic: str) -> None:
    for into in (f"schema:{told.into('dry')}", f"topic:{topic}", "-"):
        done = told.replay("--into", into, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        shards = json.loads(done.stdout)["shards"]
        assert [shard["shard"] for shard in shards if shard["to_read"]] == sorted(told.histories)
    assert await schemas(told.settings, told.into("dry")) == []
    client = AIOKafkaAdminClient(bootstrap_servers=told.settings.kafka)
    await client.start()
    assert topic not in await client.list_topics()
    await client.close()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("schema:other", "--from", "2:5"), "from the first event"), (("schema:A-B",), "no name of a schema"),
        (("topic:a b",), "no name of a topic"), (("nonsense",), "topic:NAME"),
        (("-", "--until", "12"), "SHARD:12"),
        (("-", "--until", "12", "--offer", "a", "--offer", "b"), "exactly one --offer"),
        (("-", "--until", "99:12"), "8 shards"),
        (("-", "--until", "yesterday"), "2026-11-11T"), (("-", "--from", "2:0"), "seq 1"),
        (("-", "--append"), "--append"),
        (("-", "--from", "2:9", "--until", "2:8"), "behind"),
        (("-", "--from", "2:1", "--from", "2:2"), "two places"),
        (("-", "--from", "2026-01-01", "--from", "2026-01-02"), "two times"),
        (("-", "--from", "2:1", "--shard", "3"), "not among"),
        (("-", "--shard", "8"), "8 shards"), (("-", "--offer", "no such/id"), "--offer"),
        (("-", "--until", "1960-01-01"), "before 1973"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_named(words: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(replay_verb, ["--into", *words], env={"GRAB_SHARDS": "8"})
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.output.split())


def test_commands_of_the_page_are_understood() -> None:
    page = (PROJECT / "docs" / "replay.md").read_text()
    section = page.partition("## Replay and the time machine\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^grabstream (replay|at) (.*?)(?: +#.*)?$", section, re.MULTILINE)
    assert len(lines) > 4
    settings = load_settings()
    for verb, words in lines:
        command = {"replay": replay_verb, "at": at_verb}[verb]
        found = command.make_context(verb, shlex.split(words)).params
        points = {name: found.get(name, ()) for name in ("first", "last", "offers", "users", "shards")}
        assert request(settings, found["source"], **points).stretches
