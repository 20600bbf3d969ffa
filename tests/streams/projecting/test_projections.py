"""Read models from blocks that the test writes: repeated blocks, missing ones, contradictions, and rows that
PostgreSQL refuses.
"""

import asyncio
import json
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import NotLeaderForPartitionError
from psycopg import errors

from grabstream.models.journal import GENESIS, Cursor, block_headers, chain
from grabstream.projections import cursors
from grabstream.projections.cursors import CursorMoved
from grabstream.projections.versions import use_read_model
from grabstream.settings import Settings
from grabstream.streams.follower import Decoder
from grabstream.streams.journal import JournalRecord, open_reader
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    EVENTS,
    LINES,
    SHARD,
    JournalWriter,
    granted,
    granted_run,
    journal,  # noqa: F401 - a fixture
    open_tables,
    opened,
    rows,
    running,
    until_at_seq,
)


async def test_repeated_overlapping_and_stale_blocks_are_ignored(
    system: Settings, journal: JournalWriter
) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    await journal.block(LINES, 5, 12)
    await journal.block(LINES, 1, 10)
    await journal.marker(2, "b")
    await journal.block(LINES, 13, 20)  # of the previous owner: does not count
    await journal.block(LINES, 13, 30, 2, "b")
    async with running(system) as projectors:
        for record in [*journal.records, *journal.records]:
            for projector in projectors:
                await projector.put(record)
        await until_at_seq(system, 30)
    assert [body.encode() for (body,) in await rows(system, "SELECT body FROM audit ORDER BY seq")] == LINES
    assert [bytes(hash_) for (hash_,) in await rows(system, "SELECT hash FROM audit ORDER BY seq")] == chain(
        GENESIS, LINES
    )
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(1000 - 290,)]
    assert await rows(system, "SELECT count(*), sum(amount)::int FROM grabs") == [(29, 290)]
    assert await rows(system, "SELECT sum(available)::int FROM balances") == [(290,)]
    assert await rows(system, "SELECT title, grabs, given, amount_left FROM offers") == [
        ('back\\slash "quote" 你好', 29, 290, 710)
    ]


async def test_records_of_a_busy_journal_share_a_transaction(
    system: Settings, journal: JournalWriter
) -> None:
    """Records of a thousand grabs that arrive within milliseconds are written together: a transaction costs
    as much as some hundred rows.
    """
    runs = [granted_run("e", 2 + 1_000 * number, 1_000) for number in range(6)]
    lines, last_seqs = [opened("e", 1, total=10_000), *runs], [1 + 1_000 * number for number in range(7)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2, last_seqs=last_seqs)
    for number in range(3, 8):
        await journal.block(lines, number, number, last_seqs=last_seqs)
    marker, first, *others = journal.records
    async with running(system, "audit") as [audit]:
        await audit.put(marker)
        await until(lambda: audit.measures.seqs == dict.fromkeys(range(system.shards), 0), 30, "cursors")
        await audit.put(first)
        while not audit._queue.empty():
            await asyncio.sleep(0)
        for record in others:
            await audit.put(record)
        await until_at_seq(system, 6_001, "audit")
    async with await open_tables(system) as books:
        written = await books.execute("SELECT count(*), count(DISTINCT xmin::text) FROM audit_1")
        assert await written.fetchone() == (7, 1)


async def test_cursors_of_all_shards_move_in_one_statement(system: Settings) -> None:
    async with await open_tables(system) as books:
        execute, statements = books.execute, []

        async def counted(query: Any, *arguments: Any) -> Any:
            statements.append(query)
            return await execute(query, *arguments)

        books.execute = counted  # type: ignore[method-assign]
        await use_read_model(books, system.schema_, "ledger")
        old = await cursors.load(books, "ledger")
        new = {shard: Cursor(5 + shard, bytes([shard]) * 32, 7, 2, f"of {shard}") for shard in old}
        statements.clear()
        await cursors.advance(books, "ledger", {shard: (old[shard], new[shard]) for shard in old})
        assert len(statements) == 1
        assert len(new) == system.shards
        assert await cursors.load(books, "ledger") == new
        for wrong in ({"seq": 4}, {"next_offset": 8}):
            moves = {shard: (new[shard], new[shard]._replace(seq=99)) for shard in new}
            moves[SHARD] = new[SHARD]._replace(**wrong), moves[SHARD][1]
            with pytest.raises(CursorMoved, match=f"ledger, shard {SHARD}: "):
                async with books.transaction():
                    await cursors.advance(books, "ledger", moves)
            assert await cursors.load(books, "ledger") == new
        with pytest.raises(CursorMoved):
            await cursors.advance(books, "ledger", {SHARD: (new[SHARD], old[SHARD])}, frozen=True)


async def test_two_projectors_of_a_shard_write_each_event_once(
    system: Settings, journal: JournalWriter
) -> None:
    """After a rebalance, two processes may both apply a shard: the update of the cursor succeeds in one of
    them, and the other reads the cursor again.
    """
    await journal.marker(1, "a")
    for first in range(1, 31):
        await journal.block(LINES, first, first)
    async with running(system) as mine, running(system) as theirs:
        for record in journal.records:
            await asyncio.gather(*(projector.put(record) for projector in (*mine, *theirs)))
        await until_at_seq(system, 30)
        await asyncio.gather(*(projector.put(CatchUp(SHARD)) for projector in (*mine, *theirs)))
        await journal.block([*LINES, granted("e", 31)], 31, 31)
        await asyncio.gather(*(projector.put(journal.records[-1]) for projector in (*theirs, *mine)))
        await until_at_seq(system, 31)
    assert await rows(system, "SELECT * FROM stopped_shards") == []
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(1000 - 300,)]
    assert await rows(system, "SELECT count(*) FROM audit") == [(31,)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"head": b"00" * 32}, "do not lead to the head"),
        ({"prev": b"11" * 32}, "do not lead"),
        ({"first_seq": b"9"}, "begins at seq 9"),
    ],
)
async def test_a_bad_block_stops_only_its_shard(
    system: Settings, journal: JournalWriter, wrong: dict[str, bytes], reason: str
) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 5)
    await journal.block(LINES, 6, 9, **wrong)
    other = JournalWriter(system, journal._producer, SHARD + 1)
    await other.marker(1, "x")
    async with running(system, "ledger") as [ledger]:
        for record in [*journal.records, *other.records]:
            await ledger.put(record)
        await until(lambda: ledger._stopped == {SHARD}, 30, "the stop")
        await until_at_seq(system, 5, "ledger")
        await journal.block(LINES, 6, 9)
        await ledger.put(journal.records[-1])
        await other.block([line.replace(b'"shard":3', b'"shard":4') for line in LINES], 1, 5, 1, "x")
        await ledger.put(other.records[-1])

        async def other_continued() -> bool:
            return await rows(
                system, f"SELECT seq FROM cursors WHERE projection = 'ledger' AND shard = {SHARD + 1}"
            ) == [(5,)]

        await until(other_continued, 30, "the other shard")
    [(shard, seq, why)] = await rows(system, "SELECT shard, seq, reason FROM stopped_shards")
    assert (shard, seq) == (SHARD, 5)
    assert reason in why
    shown = grabstream("status", "--json", **env_of(system))
    assert shown.returncode == 1
    assert [(stop["projection"], stop["shard"]) for stop in json.loads(shown.stdout)["stopped"]] == [
        ("ledger", SHARD)
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (granted("e", 7), "other numbers in their text"),
        (granted("e", 6).replace(b'"shard":3', b'"shard":4'), "other numbers in their text"),
        (granted("e", 6).replace(b"grab.granted", b"grab.imagined"), "cannot be decoded"),
        (granted("e", 6) + b"," + granted("e", 7), "other numbers in their text"),
        (b"\xff", "cannot be decoded"),
    ],
)
async def test_an_event_whose_text_contradicts_the_headers_stops_the_shard(
    system: Settings, journal: JournalWriter, line: bytes, reason: str
) -> None:
    """Rows use the numbers in the text, the chain those in the headers: they must agree."""
    await journal.marker(1, "a")
    await journal.block([*LINES[:5], line], 1, 5)
    await journal.block([*LINES[:5], line], 6, 6)
    async with running(system, "ledger", "audit") as projectors:
        for projector in projectors:
            await projector.put(journal.records[-1])
        for projector in projectors:
            await until(lambda projector=projector: projector._stopped == {SHARD}, 30, "the stop")
    stops = await rows(system, "SELECT projection, seq, reason FROM stopped_shards ORDER BY projection")
    assert [stop[:2] for stop in stops] == [("audit", 5), ("ledger", 5)]
    assert all(reason in stop[2] for stop in stops)
    assert await rows(system, "SELECT count(*) FROM audit") == [(5,)]


def test_decoded_blocks_are_shared_within_a_bound_of_bytes() -> None:
    headers = tuple(block_headers(SHARD, 1, "a", 1, 2, GENESIS, chain(GENESIS, LINES[:2])[-1]))
    record = JournalRecord(SHARD, 1, headers, b"\n".join(LINES[:2]))
    decoder = Decoder(bytes_max=len(record.value))
    assert decoder.decode("t", record) is decoder.decode("t", record)
    assert decoder.decode("t", record) is not decoder.decode("another", record)
    assert list(decoder._newest) == [("another", SHARD, 1, headers)]


async def test_an_overdraft_stops_the_ledger(system: Settings, journal: JournalWriter) -> None:
    """An offer gives more than its total: PostgreSQL refuses the rows, the ledger stops, and keeps earlier
    rows.
    """
    lines = [opened("e", 1, total=25), granted("e", 2), granted("e", 3), granted("e", 4)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 3)
    await journal.block(lines, 4, 4)
    async with running(system, "ledger") as [ledger]:
        await ledger.put(journal.records[1])
        await until_at_seq(system, 3, "ledger")
        await ledger.put(journal.records[2])
        await until(lambda: ledger._stopped == {SHARD}, 30, "the stop")
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(5,)]
    [(why,)] = await rows(system, "SELECT reason FROM stopped_shards")
    assert "never_below_zero" in why


async def test_guarded_accounts_cannot_be_written_below_zero(system: Settings) -> None:
    async with await open_books(system) as books:
        await use_read_model(books, system.schema_, "ledger")
        for account in ("offer:x", "hold:x", "wallet:x", "redeemed:x"):
            with pytest.raises(errors.CheckViolation):
                await books.execute("INSERT INTO accounts_1 VALUES (%s, 'CNY', -1)", (account,))
        await books.execute("INSERT INTO accounts_1 VALUES ('external:x', 'CNY', -1)")


@pytest.mark.long
async def test_a_restarted_publisher_leaves_no_gap(system: Settings, journal: JournalWriter) -> None:
    """The publisher reads its cursor from the topic when it starts: repeats have the same id and bytes, and
    no event is missing.
    """
    topic = Topics(system.prefix).events
    await journal.marker(1, "a")
    for first, last in ((1, 7), (8, 9), (10, 24), (25, 30)):
        await journal.block(LINES, first, last)
        async with running(system, "events") as [publisher]:
            await publisher.put(journal.records[-1])

            async def published(last: int = last) -> bool:
                async with open_reader(system.kafka, topic) as reader:
                    return await reader.end(SHARD) >= last

            await until(published, 30, f"event {last}")
    consumer = AIOKafkaConsumer(
        bootstrap_servers=system.kafka, auto_offset_reset="earliest", enable_auto_commit=False
    )
    consumer.assign([TopicPartition(topic, SHARD)])
    await consumer.start()
    by_id: dict[str, set[bytes]] = {}
    while len(by_id) < 30:
        for records in (await consumer.getmany(timeout_ms=500)).values():
            for record in records:
                by_id.setdefault(dict(record.headers)["ce_id"].decode(), set()).add(record.value)
    await consumer.stop()
    assert by_id == {f"{SHARD}-{seq}": {line} for seq, line in enumerate(EVENTS, 1)}


class _Expiring:
    """A producer whose batch after the first `sound` ones fails, as when a partition has no leader."""

    def __init__(self, producer: AIOKafkaProducer, sound: int) -> None:
        self._producer, self._sound = producer, sound
        self.create_batch = producer.create_batch

    async def send_batch(self, *arguments: Any, **named: Any) -> Any:
        self._sound -= 1
        if self._sound >= 0:
            return await self._producer.send_batch(*arguments, **named)
        failed = asyncio.get_running_loop().create_future()
        if self._sound == -1:
            failed.set_exception(NotLeaderForPartitionError())
            return failed
        return await self._producer.send_batch(*arguments, **named)

    async def stop(self) -> None:
        await self._producer.stop()


async def test_a_publisher_batch_that_expires_leaves_no_gap(
    system: Settings, journal: JournalWriter, monkeypatch: Any
) -> None:
    """The rest of its group is not sent: the cursor in a later record would claim that the batch was
    published.
    """
    lines = [opened("e", 1, 10**6), *(granted("e", seq) for seq in range(2, 1_001))]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 1_000)
    started = AIOKafkaProducer.start
    sound = iter((1,))

    async def start(self: Any) -> None:
        self._max_batch_size = 64 * 1024
        await started(self)

    monkeypatch.setattr(AIOKafkaProducer, "start", start)
    async with running(system, "events") as [publisher]:
        opening = publisher._open

        async def open_expiring(connection: Any) -> Any:
            partitions = await opening(connection)
            for count in sound:
                publisher._producer = _Expiring(publisher._producer, count)  # type: ignore[attr-defined]
            return partitions

        publisher._open = open_expiring  # type: ignore[method-assign]
        await publisher.put(journal.records[-1])
        await until(
            lambda: publisher._cursors.get(SHARD) and publisher._cursors[SHARD].seq == 1_000, 30, "all events"
        )
    highest = 0
    async with open_reader(system.kafka, Topics(system.prefix).events) as reader:
        async for records in reader.read(SHARD, 0, await reader.end(SHARD)):
            for record in records:
                seq = int(dict(record.headers)["ce_id"].decode().partition("-")[2])
                assert seq <= highest + 1
                highest = max(highest, seq)
    assert highest == 1_000
