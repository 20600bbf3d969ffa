"""`grabstream replay` to standard output and into topics: the events of the recorded system, between any two
points, from the journal or the audit trail.
"""

import asyncio
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from click.testing import CliRunner
from psycopg import AsyncConnection

from grabstream.models.events import AnyGrabEvent
from grabstream.models.runs import decode_line
from grabstream.models.transfers import transfers_of
from grabstream.ops.commands.read.at import at as at_verb
from grabstream.ops.commands.rebuild.replay import replay as replay_verb
from grabstream.ops.formats.moments import show_time
from grabstream.ops.formats.replay_request import request
from grabstream.projections.database.locks import lock_or_raise
from grabstream.settings import Settings, child_environment, load_settings
from grabstream.streams.follower import Chunk
from grabstream.streams.history.chunks import Point
from grabstream.streams.history.sources import JournalSource
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.replaying import replay as replaying
from grabstream.streams.replaying.replay import Stretch
from grabstream.streams.replaying.selection import Selection, Wanted
from grabstream.streams.replaying.sinks import PacedSink, events_in
from grabstream.streams.topics import Topics, make_topics
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.streams.replaying.histories import RecordedSystem, runs_of_ten, schemas, until_read_models_at
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    LINES,
    SHARD,
    JournalWriter,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    running,
)
from tests.support.runs import as_singles


@pytest.mark.parametrize("words", [("--user", "nobody"), ("--from", "2030-01-01")])
async def test_a_replay_without_events_reports_0_events(
    recorded: RecordedSystem, words: tuple[str, ...]
) -> None:
    done = recorded.replay("--into", "-", *words)
    assert (done.returncode, done.stdout) == (0, "")
    assert "0 events" in done.stderr


# -- lines ---------------------------------------------------------------------------------------------------


async def test_a_replay_prints_the_lines_of_the_journal(recorded: RecordedSystem) -> None:
    """From either source, without the server of the other. The journal uses PostgreSQL only to begin in the
    middle, and without it reads from the beginning.
    """
    without = {"journal": {"postgres": "postgresql://127.0.0.1:1/x"}, "audit": {"kafka": "127.0.0.1:1"}}
    for source, away in without.items():
        done = grabstream(
            "replay", "--into", "-", "--source", source, **{**env_of(recorded.settings), **away}
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == recorded.lines()
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
            **{**env_of(recorded.settings), **away},
        )
        assert done.stdout.splitlines() == recorded.between(2, 300)
        assert ("reading the journal from its beginning" in done.stderr) == (source == "journal")
        other = {"journal": "audit", "audit": "journal"}[source]
        done = grabstream("replay", "--into", "-", "--source", other, **{**env_of(recorded.settings), **away})
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr


async def test_a_replay_prints_a_range_by_seq_or_by_time(recorded: RecordedSystem) -> None:
    """By seq and by time, both ends included, from both sources; also a seq with an offer, and a seq of one
    shard with a time for the others.
    """
    history, other = recorded.histories[2], recorded.histories[5]
    first, last = history.break_near(0.3) + 1, history.break_near(0.7)
    span = history.journaled_between(first, last)
    begin, end = history.events[first - 1].at, history.events[last - 1].at
    between = [line for line in other.journaled if begin <= decode_line(line).at <= end]
    of_offer = [line for line in span if decode_line(line).offer == history.envelope]
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
                [*span, other.journaled[-1]],
            ),
            ((f"--from={first}", f"--until={last}", f"--offer={history.envelope}"), of_offer),
            ((f"--from=2:{len(history.lines) + 1}", "--shard=2"), []),
            (
                (f"--from={history.events[-1].at}", "--shard=2"),
                [line for line in history.journaled if decode_line(line).at == history.events[-1].at],
            ),
        )[:: 1 if source == "journal" else 2]:
            done = recorded.replay("--into", "-", "--source", source, *words)
            assert done.returncode == 0, done.stderr
            assert [line.encode() for line in done.stdout.splitlines()] == expected, (source, words)
    assert "shard 5 ends at seq" in recorded.replay("--into", "-", "--until", f"5:{10**6}").stderr


async def test_a_replay_of_a_user_prints_all_events_about_them(recorded: RecordedSystem) -> None:
    """Events that name the user, change the user's accounts, or are refunds due for the user's grabs, also if
    the grab is before the range.
    """
    for since in (1, recorded.seqs[2]):
        expected = []
        for shard, history in recorded.histories.items():
            grabs = {
                (event.offer, event.grab)
                for event in history.events
                if isinstance(event, AnyGrabEvent) and event.user == "u1"
            }
            for line, event in zip(history.lines, history.events, strict=True):
                accounts = {
                    account
                    for transfer in transfers_of(event)
                    for account in (transfer.debit, transfer.credit)
                }
                user = getattr(event, "user", None)
                if user is None and (event.offer, getattr(event, "grab", "")) in grabs:
                    user = "u1"
                of_user = user == "u1"
                if (of_user or accounts & {"wallet:u1", "hold:u1"}) and (shard != 2 or event.seq >= since):
                    expected.append(line.decode())
        done = recorded.replay("--into", "-", "--user", "u1", "--from", f"2:{since}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == expected
    assert any('"payment.refund_due"' in line for line in expected)
    assert any('"ledger.adjusted"' in line for line in expected)


@pytest.mark.long
async def test_a_replay_ends_quietly_when_its_reader_closes_the_pipe(recorded: RecordedSystem) -> None:
    """SIGPIPE ends it without output."""
    command = [sys.executable, "-m", "grabstream.ops.cli", "replay", "--into", "-"]
    running = subprocess.Popen(
        command,
        env=child_environment(**env_of(recorded.settings)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline().decode() == recorded.lines()[0] + "\n"
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait(20) == 128 + signal.SIGPIPE


class Counting(JournalSource):
    """Counts the records that were read for chunks."""

    read = 0

    async def chunks(self, *arguments: Any) -> Any:
        async for chunk in super().chunks(*arguments):
            self.read += chunk.read
            yield chunk


@pytest.mark.long
async def test_a_replay_from_near_the_end_reads_only_the_end(
    system: Settings, journal: JournalWriter
) -> None:
    """The number of records read is bounded by the number of events wanted. From every point, no event is
    missing, and all events are those of the journal.
    """
    lines = [
        opened("e", 1, 100_000),
        *(granted("e", seq).replace(b'"at":%d' % seq, b'"at":%d' % (seq // 3)) for seq in range(2, 601)),
    ]
    await journal.marker(1, "a")
    for first in range(1, 601, 2):
        await journal.block(lines, first, first + 1)
    await until_read_models_at(system, {SHARD: 600})
    async with (
        await open_books(system) as books,
        open_reader(system.kafka, Topics(system.prefix).journal) as reader,
    ):
        for point in (
            *(Point(seq=seq) for seq in (1, 2, 300, 471, 600, 601)),
            *(Point(at=at) for at in (1, 2, 77, 150, 200, 201)),
        ):
            source = Counting(reader, books)
            read = [
                fact.line
                async for chunk in source.chunks(SHARD, await source.start(SHARD, point))
                for fact in chunk.facts
            ]
            wanted = [
                line
                for seq, line in enumerate(lines, 1)
                if (seq if point.seq else max(seq // 3, 1)) >= point.value
            ]
            assert read[len(read) - len(wanted) :] == wanted, point
            assert read == lines[len(lines) - len(read) :], point
            assert source.read <= 301 * len(wanted) / 600 + 70, point


class OneByOne(JournalReader):
    """Returns each record in a separate list, so that no later record of a list reveals a stale one."""

    async def read(self, *arguments: Any) -> Any:
        async with aclosing(super().read(*arguments)) as lists:
            async for records in lists:
                for record in records:
                    yield [record]


@pytest.mark.long
async def test_a_stale_block_at_the_start_of_a_replay_is_ignored(
    system: Settings, journal: JournalWriter
) -> None:
    """A paused relay wrote blocks of another history. The search for the start finds one of them, the audit
    trail shows that it is not valid, and the events of the valid history are returned.
    """
    stale_lines = [*LINES[:10], *(line.replace(b'"amounts":[10]', b'"amounts":[11]') for line in LINES[10:])]
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    await journal.marker(2, "b")
    for _ in range(100):
        await journal.block(stale_lines, 11, 20)  # of the previous owner
    await journal.block(LINES, 11, 30, 2, "b")
    await until_read_models_at(system, {SHARD: 30})
    async with (
        await open_books(system) as books,
        open_reader(system.kafka, Topics(system.prefix).journal) as reader,
    ):
        source = JournalSource(OneByOne(reader._consumer, reader._topic), books)
        for since in (15, 20, 30):
            start = await source.start(SHARD, Point(seq=since))
            assert start.cursor.seq == 10  # the start is at one of the stale blocks
            read = [fact.line async for chunk in source.chunks(SHARD, start) for fact in chunk.facts]
            assert read == LINES[10:]


@pytest.mark.long
async def test_a_stale_block_with_true_events_after_the_end_hides_no_event(
    system: Settings, journal: JournalWriter
) -> None:
    """The stale blocks repeat valid events, and no block follows them. Blocks before them in the journal with
    higher seqs are still read.
    """
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    await journal.marker(2, "b")
    await journal.block(LINES, 11, 30, 2, "b")
    for _ in range(100):
        await journal.block(LINES, 11, 12)  # of the previous owner
    await until_read_models_at(system, {SHARD: 30})
    async with (
        await open_books(system) as books,
        open_reader(system.kafka, Topics(system.prefix).journal) as reader,
    ):
        source = JournalSource(reader, books)
        start = await source.start(SHARD, Point(seq=15))
        assert start.cursor.next_offset > 3  # the start is at one of the stale blocks
        assert [fact.line async for chunk in source.chunks(SHARD, start) for fact in chunk.facts] == LINES[
            10:
        ]


async def test_a_replay_ends_before_a_changed_event_of_the_audit_trail(recorded: RecordedSystem) -> None:
    """It prints the events before the changed one, and then ends with an error that names shard and seq."""
    [(home,)] = await rows(
        recorded.settings, "SELECT schema FROM read_models WHERE projection = 'audit' AND state = 'live'"
    )
    # A line of one event in the middle.
    number = next(
        number for number, line in enumerate(recorded.lines(5)) if number >= 150 and '"v":1' in line
    )
    seq = recorded.histories[5].last_seqs[number]
    change = (
        f"UPDATE {home}.audit_1 SET body = replace(body, '{{}}', '{{}}') WHERE shard = 5 AND seq = {seq} "
        "RETURNING seq"
    )
    assert await rows(recorded.settings, change.format('"v":1', '"v":7'))
    try:
        done = recorded.replay("--into", "-", "--source", "audit")
        assert done.returncode == 1
        assert "shard 5" in done.stderr
        assert f"seq {seq}" in done.stderr
        printed = done.stdout.splitlines()
        assert printed == recorded.lines()[: len(recorded.lines(2)) + number]
    finally:
        await rows(recorded.settings, change.format('"v":7', '"v":1'))


# -- a file ------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_replay_into_a_file_continues_wherever_it_was_cut(
    recorded: RecordedSystem, tmp_path: Path
) -> None:
    """Within a line, between two lines, in either shard, before the first; and to a later end."""
    file = tmp_path / "lines"
    whole = "".join(f"{line}\n" for line in recorded.lines()).encode()
    first_shard = len("".join(f"{line}\n" for line in recorded.lines(2)).encode())
    for cut in (0, 7, len(recorded.lines()[0]) + 1, first_shard - 1, first_shard, first_shard + 900):
        file.write_bytes(whole[:cut])
        done = recorded.replay("--into", f"file:{file}", "--continue", "--dry-run")
        assert (done.returncode, file.read_bytes()) == (0, whole[:cut]), done.stderr
        done = recorded.replay("--into", f"file:{file}", "--continue", "--json")
        assert done.returncode == 0, done.stderr
        assert file.read_bytes() == whole, cut
    assert "has lines already" in recorded.replay("--into", f"file:{file}").stderr
    for foreign in (b'{"token":"secret"}', b"x", whole + b"notes"):
        file.write_bytes(foreign)
        refused = recorded.replay("--into", f"file:{file}", "--continue")
        assert (refused.returncode, "no replay has written" in refused.stderr) == (1, True)
        assert file.read_bytes() == foreign
    file.unlink()
    until = ("--until", str(recorded.at_ms))
    assert recorded.replay("--into", f"file:{file}", *until).returncode == 0
    shorter = file.read_bytes().splitlines()
    assert recorded.replay("--into", f"file:{file}", "--continue").returncode == 0
    lines = file.read_bytes().splitlines()
    assert lines[: len(shorter)] == shorter
    assert sorted(lines) == sorted(whole.splitlines())


@pytest.mark.long
async def test_a_replay_refuses_a_file_that_is_not_its_own(recorded: RecordedSystem, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    for text, reason in (
        ("hello\n", "line 1: not a line of a journal"),
        ("\n".join([*reversed(recorded.lines(2)[:2]), ""]), "line 2: the events are not in order"),
    ):
        file.write_text(text)
        done = recorded.replay("--into", f"file:{file}", "--continue")
        assert (done.returncode, file.read_text()) == (1, text)
        assert reason in done.stderr
    file.write_text("")
    with file.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = recorded.replay("--into", f"file:{file}", "--continue")
    assert (done.returncode, "another replay" in done.stderr) == (1, True)
    done = recorded.replay("--into", f"file:{tmp_path / 'no' / 'folder'}")
    assert (done.returncode, "No such file" in done.stderr) == (1, True)


class _Writes:
    """A sink that notes when it gets events."""

    def __init__(self) -> None:
        self.events: list[tuple[int, float]] = []

    async def write(self, chunk: Chunk, facts: Any) -> int:
        self.events.append((events_in(facts), time.monotonic()))
        return events_in(facts)

    async def flush(self) -> None:
        """Nothing waits here."""


async def test_a_replay_is_not_faster_than_its_rate(recorded: RecordedSystem) -> None:
    sink, rate = _Writes(), 2_000
    async with open_reader(recorded.settings.kafka, Topics(recorded.settings.prefix).journal) as reader:
        source = JournalSource(reader, None)
        planned = await replaying.plan(source, [Stretch(2)], True)
        begun = time.monotonic()
        await replaying.replay(
            source, planned, Selection(Wanted(), False), PacedSink(sink, rate), lambda *_: None, {}
        )
    events = 0
    for number, at in sink.events:
        # What was written before this write took at least its time.
        assert at - begun >= events / rate - 0.001
        events += number
    assert events == len(recorded.singles(2))


# -- a topic -------------------------------------------------------------------------------------------------


async def records(settings: Settings, topic: str) -> list[Any]:
    """All records of a topic, by partition and offset."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    all_records = []
    try:
        partitions = [TopicPartition(topic, number) for number in range(settings.shards)]
        for partition, end in (await consumer.end_offsets(partitions)).items():
            consumer.assign([partition])
            consumer.seek(partition, 0)
            while end > await consumer.position(partition):
                all_records += (await consumer.getmany(partition, timeout_ms=500)).get(partition, [])
    finally:
        await consumer.stop()
    return sorted(all_records, key=lambda record: (record.partition, record.offset))


@pytest.mark.long
async def test_a_replay_into_a_topic_writes_the_records_of_the_publisher(
    recorded: RecordedSystem, topic: str
) -> None:
    """Keys, values, headers and times are those of the publisher."""
    events = Topics(recorded.settings.prefix).events
    async with running(recorded.settings, "events") as [publisher]:
        for shard in recorded.histories:
            await publisher.put(CatchUp(shard))

        async def published() -> bool:
            return len(await records(recorded.settings, events)) >= len(recorded.singles())

        await until(published, 30, "all events")
    of_publisher = [
        (
            record.partition,
            record.key,
            record.value,
            [header for header in record.headers if header[0] != "cursor"],
            record.timestamp,
        )
        for record in await records(recorded.settings, events)
    ]
    done = recorded.replay("--into", f"topic:{topic}", "--json")
    assert done.returncode == 0, done.stderr
    assert sum(shard["events"] for shard in json.loads(done.stdout)["shards"] if "events" in shard) == len(
        recorded.singles()
    )
    replayed = await records(recorded.settings, topic)
    assert [
        (
            record.partition,
            record.key,
            record.value,
            [header for header in record.headers if header[0] != "replay"],
            record.timestamp,
        )
        for record in replayed
    ] == of_publisher
    assert {record.value.decode() for record in replayed} == set(recorded.singles())
    # A second replay would write every event twice: it needs --append.
    done = recorded.replay("--into", f"topic:{topic}")
    assert done.returncode == 1
    assert "--append" in done.stderr
    last = len(recorded.histories[5].lines)
    assert (
        recorded.replay(
            "--into", f"topic:{topic}", "--append", "--from", f"5:{last}", "--shard", "5"
        ).returncode
        == 0
    )
    assert (await records(recorded.settings, topic))[-1].value == recorded.histories[5].lines[-1]


@pytest.mark.long
async def test_a_replay_into_a_topic_continues_with_what_it_lacks(
    recorded: RecordedSystem, topic: str
) -> None:
    """Also where only some shards have events, and where it has everything."""
    for words in (("--until", "2:40", "--shard", "2"), ("--until", str(recorded.at_ms)), (), ()):
        done = recorded.replay("--into", f"topic:{topic}", "--continue", *words)
        assert done.returncode == 0, done.stderr
    written = await records(recorded.settings, topic)
    assert [record.value.decode() for record in written] == recorded.singles()
    # Records of another program are not taken for events.
    producer = AIOKafkaProducer(bootstrap_servers=recorded.settings.kafka, acks="all")
    await producer.start()
    await producer.send_and_wait(topic, b"hello", partition=5)
    await producer.stop()
    done = recorded.replay("--into", f"topic:{topic}", "--continue")
    assert (done.returncode, "is not an event of shard 5" in done.stderr) == (1, True), done


@pytest.mark.long
async def test_a_second_replay_into_a_topic_is_refused(recorded: RecordedSystem, topic: str) -> None:
    """With or without --append; the message names the process and pid of the first. Each event is in the
    topic once.
    """
    async with await AsyncConnection.connect(recorded.settings.postgres) as other:
        await lock_or_raise(other, f"grabstream-replay-topic-{topic}", f"replay into {topic}")
        for words in ((), ("--append",)):
            done = recorded.replay("--into", f"topic:{topic}", *words)
            assert done.returncode == 1
            assert f"being written by another replay: process {os.getpid()} on " in done.stderr
            assert f"pid {other.info.backend_pid} of PostgreSQL" in done.stderr
    both = await asyncio.gather(
        *(asyncio.to_thread(recorded.replay, "--into", f"topic:{topic}") for _ in range(2))
    )
    assert sorted(done.returncode for done in both) == [0, 1], [done.stderr for done in both]
    ids = [dict(record.headers)["ce_id"] for record in await records(recorded.settings, topic)]
    assert len(ids) == len(set(ids)) == len(recorded.singles())


@pytest.mark.long
async def test_single_events_are_those_between_bounds_within_runs(
    system: Settings, journal: JournalWriter, topic: str
) -> None:
    """In a topic and for a user, from and until any grab of a run, also in two steps. Lines stay whole."""
    lines = runs_of_ten()
    singles = as_singles(lines)
    assert [decode_line(line).last_seq for line in lines] == [1, 11, 21]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 3, last_seqs=[1, 11, 21])
    await until_read_models_at(system, {SHARD: 21})
    words = ("replay", "--shard", str(SHARD))

    async def in_topic() -> list[bytes]:
        return [record.value for record in await records(system, topic)]

    before = 0
    for first, last in ((5, 8), (9, 11), (12, 17)):
        bounds = (f"--from={SHARD}:{first}", f"--until={SHARD}:{last}")
        done = grabstream(*words, "--into", f"topic:{topic}", "--append", *bounds, **env_of(system))
        assert (done.returncode, f"{last - first + 1} events into" in done.stdout) == (0, True), done
        written = await in_topic()
        assert written[before:] == singles[first - 1 : last]
        before = len(written)
        done = grabstream(*words, "--into", "-", "--user", "u1", *bounds, **env_of(system))
        assert [line.encode() for line in done.stdout.splitlines()] == [
            line for line in singles[first - 1 : last] if b'"user":"u1"' in line
        ]
        done = grabstream(*words, "--into", "-", *bounds, **env_of(system))
        assert [line.encode() for line in done.stdout.splitlines()] == [
            line for line in lines if decode_line(line).last_seq >= first and decode_line(line).seq <= last
        ]


@pytest.mark.long
async def test_a_topic_continues_after_a_bound_within_a_run(
    system: Settings, journal: JournalWriter, topic: str
) -> None:
    lines = runs_of_ten()
    singles = as_singles(lines)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 3, last_seqs=[1, 11, 21])
    await until_read_models_at(system, {SHARD: 21})
    into = ("replay", "--into", f"topic:{topic}", "--continue", "--shard", str(SHARD))
    for last in (1, 4, 4, 12, 20, 21):
        done = grabstream(*into, f"--until={SHARD}:{last}", **env_of(system))
        assert done.returncode == 0, done.stderr
        assert [record.value for record in await records(system, topic)] == singles[:last]


async def test_a_replay_into_a_topic_without_postgresql_warns_that_it_has_no_lock(
    recorded: RecordedSystem, topic: str
) -> None:
    """Without PostgreSQL no lock can exclude another replay: it warns and continues."""
    words = ("replay", "--into", f"topic:{topic}", "--shard", "2", "--until", "2:5")
    done = grabstream(*words, **{**env_of(recorded.settings), "postgres": "postgresql://127.0.0.1:1/x"})
    assert done.returncode == 0, done.stderr
    assert (
        "this replay holds no lock, because PostgreSQL cannot be reached: make sure that no other replay "
        f"writes to topic {topic}" in done.stderr
    )
    assert len(await records(recorded.settings, topic)) == 5


@pytest.mark.long
async def test_a_replay_refuses_topics_that_are_not_its_own(recorded: RecordedSystem, topic: str) -> None:
    for name in (
        Topics(recorded.settings.prefix).journal,
        Topics(recorded.settings.prefix).events,
        Topics(recorded.settings.prefix).commands,
    ):
        done = recorded.replay("--into", f"topic:{name}", "--append")
        assert (done.returncode, "belongs to the system" in done.stderr) == (1, True)
    await make_topics(recorded.settings.kafka, [NewTopic(topic, num_partitions=2, replication_factor=1)])
    for words in ((), ("--dry-run",)):
        done = recorded.replay("--into", f"topic:{topic}", *words)
        assert (done.returncode, "2 partitions" in done.stderr) == (1, True), done.stderr


@pytest.mark.long
async def test_a_dry_run_of_a_replay_writes_nothing(recorded: RecordedSystem, topic: str) -> None:
    for into in (f"schema:{recorded.into('dry')}", f"topic:{topic}", "-"):
        done = recorded.replay("--into", into, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        shards = json.loads(done.stdout)["shards"]
        assert [shard["shard"] for shard in shards if shard["to_read"]] == sorted(recorded.histories)
    assert await schemas(recorded.settings, recorded.into("dry")) == []
    client = AIOKafkaAdminClient(bootstrap_servers=recorded.settings.kafka)
    await client.start()
    assert topic not in await client.list_topics()
    await client.close()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("schema:other", "--from", "2:5"), "from the first event"),
        (("schema:A-B",), "cannot name a schema"),
        (("topic:a b",), "cannot name a topic"), (("nonsense",), "topic:NAME"),
        (("-", "--until", "12"), "SHARD:12"),
        (("-", "--until", "12", "--offer", "a", "--offer", "b"), "exactly one --offer"),
        (("-", "--until", "99:12"), "8 shards"),
        (("-", "--from", "10:00"), "needs its date"), (("-", "--from", "4:05"), "2026-11-11T04:05"),
        (("-", "--until", "yesterday"), "2026-11-11T"), (("-", "--from", "2:0"), "seq 1"),
        (("-", "--append"), "--append"), (("-", "--continue"), "--into file:PATH"),
        (("schema:other", "--continue"), "a schema continues without it"),
        (("topic:t", "--continue", "--append"), "exclude each other"), (("-", "--rate", "0"), "--rate"),
        (("file:",), "file:PATH"),
        (("-", "--from", "2:9", "--until", "2:8"), "is after --until"),
        (("-", "--from", "2:1", "--from", "2:2"), "names two events"),
        (("-", "--from", "2026-01-01", "--from", "2026-01-02"), "two times"),
        (("-", "--from", "2:1", "--shard", "3"), "is not read"),
        (("-", "--shard", "8"), "8 shards"), (("-", "--offer", "no such/id"), "--offer"),
        (("-", "--until", "1960-01-01"), "before 1973"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(words: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(replay_verb, ["--into", *words], env={"GRAB_SHARDS": "8"})
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.output.split())


def test_commands_on_the_page_have_valid_options() -> None:
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
