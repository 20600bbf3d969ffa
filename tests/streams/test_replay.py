"""Replay and the time machine, against read models that were built live: the same rows, to any point, from either source."""

import asyncio
import json
import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from click.testing import CliRunner

from models.events import OfferAmended, OfferClosed, OfferLoaded, OfferOpened, OfferPaused, OfferResumed, OfferRetired
from models.transfers import transfers_of
from ops.commands.at import at as at_verb
from ops.commands.replay import replay as replay_verb
from ops.moments import show_time
from ops.rehearsal.run import open_books
from ops.rehearsal.stage import take_down
from ops.replaying import request
from ops.settings import Settings, child_environment, load_settings
from streams.history import JournalSource, Point
from streams.journal import JournalReader, open_reader
from streams.projector import CatchUp
from streams.topics import Topics
from tests.conftest import make_system, until
from tests.ops.test_cli import README, grabstream, of
from tests.streams.test_pieces import rows
from tests.streams.test_projections import LINES, SHARD, Journal, granted, opened, running
from tests.streams.told import VIEWS, WAITS_FOR_US, Told, drop, journal, live, schemas, tables


class System(NamedTuple):
    """A system with a history in two shards, its read models, and what stood in them when it was at an earlier point."""

    settings: Settings
    histories: dict[int, Told]
    places: dict[int, int]
    then: dict[str, list[Any]]
    at_ms: int

    def replay(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return grabstream("replay", *words, **of(self.settings))

    def into(self, name: str) -> str:
        return f"{self.settings.schema_}_{name}"

    def lines(self, *shards: int) -> list[str]:
        return [line.decode() for shard in shards or sorted(self.histories) for line in self.histories[shard].lines]


@pytest.fixture(scope="module")
def shared(servers: Settings) -> Iterator[System]:
    """Both shards are carried to one moment, looked at, and then to their ends. Tests read it, and leave it as it is."""
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name})
    asyncio.run(make_system(settings))
    yield asyncio.run(_tell(settings))
    asyncio.run(take_down(settings))


async def _tell(settings: Settings) -> System:
    histories = {2: Told(7, 2, 400), 5: Told(8, 5, 400)}
    cut = random.Random(3)
    # One moment for both: just before something happens in the first.
    at_ms = histories[2].events[histories[2].break_near(0.5) - 1].at
    places = {shard: sum(event.at <= at_ms for event in history.events) for shard, history in histories.items()}
    for shard, history in histories.items():
        await journal(settings, history, cut, 1, places[shard])
    await live(settings, places)
    then = await tables(settings, settings.schema_)
    for shard, history in histories.items():
        await journal(settings, history, cut, places[shard] + 1)
    await live(settings, {shard: len(history.lines) for shard, history in histories.items()})
    return System(settings, histories, places, then, at_ms)


@pytest.fixture
async def told(shared: System) -> AsyncIterator[System]:
    """The system; the schemas that a test made are taken away."""
    yield shared
    await drop(
        shared.settings, *(name for name in await schemas(shared.settings, shared.settings.schema_) if name != shared.settings.schema_)
    )


@pytest.fixture
async def journal_of(system: Settings) -> AsyncIterator[Journal]:
    """The journal of a system of a test's own."""
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka, acks="all")
    await producer.start()
    yield Journal(system, producer)
    await producer.stop()


# -- lines ----------------------------------------------------------------------------------------------------------------


async def test_lines_are_those_of_the_journal(told: System) -> None:
    """From either source, without the server of the other; only to begin in the middle the journal asks PostgreSQL, and does without."""
    without = {"journal": {"postgres": "postgresql://127.0.0.1:1/x"}, "audit": {"kafka": "127.0.0.1:1"}}
    for source, away in without.items():
        done = grabstream("replay", "--into", "-", "--source", source, **{**of(told.settings), **away})
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == told.lines()
        assert done.stderr == ""
        done = grabstream("replay", "--into", "-", "--source", source, "--from", "2:300", "--shard=2", **{**of(told.settings), **away})
        assert done.stdout.splitlines() == told.lines(2)[299:]
        assert ("read from its beginning" in done.stderr) == (source == "journal")
        other = {"journal": "audit", "audit": "journal"}[source]
        done = grabstream("replay", "--into", "-", "--source", other, **{**of(told.settings), **away})
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr


async def test_any_stretch(told: System) -> None:
    """By seq and by time, both ends included, from both sources; a seq with an offer, a place for one shard and a time for the rest."""
    history, other = told.histories[2], told.histories[5]
    first, last = history.break_near(0.3) + 1, history.break_near(0.7)
    whole = list(zip(history.lines, history.events, strict=True))
    span = history.lines[first - 1 : last]
    begin, end = history.events[first - 1].at, history.events[last - 1].at
    between = [line for line, event in zip(other.lines, other.events, strict=True) if begin <= event.at <= end]
    of_offer = [line for line, event in whole[first - 1 : last] if event.offer == history.envelope]
    assert of_offer
    assert between
    for source in ("journal", "audit"):
        for words, expected in (
            ((f"--from=2:{first}", f"--until=2:{last}", "--shard=2"), span),
            ((f"--from={begin}", f"--until={show_time(end)}"), span + between),
            (
                (f"--from={show_time(begin).removesuffix('Z')}", f"--until={end}", f"--until=5:{10**6}", f"--from=5:{len(other.lines)}"),
                [*span, other.lines[-1]],
            ),
            ((f"--from={first}", f"--until={last}", f"--offer={history.envelope}"), of_offer),
            ((f"--from=2:{len(history.lines) + 1}", "--shard=2"), []),
            ((f"--from={history.events[-1].at}", "--shard=2"), [line for line, event in whole if event.at == history.events[-1].at]),
        )[:: 1 if source == "journal" else 2]:
            done = told.replay("--into", "-", "--source", source, *words)
            assert done.returncode == 0, done.stderr
            assert [line.encode() for line in done.stdout.splitlines()] == expected, (source, words)
    assert "shard 5 ends at seq" in told.replay("--into", "-", "--until", f"5:{10**6}").stderr


async def test_a_user(told: System) -> None:
    """All that names them, books on their accounts, or is due back for their grabs, also when the grab was long before."""
    for since in (1, told.places[2]):
        expected = []
        for shard, history in told.histories.items():
            grabs = {(event.offer, event.grab) for event in history.events if getattr(event, "user", None) == "u1"}
            for line, event in zip(history.lines, history.events, strict=True):
                books = {account for one in transfers_of(event) for account in (one.debit, one.credit)}
                mine = getattr(event, "user", "u1" if (event.offer, getattr(event, "grab", "")) in grabs else None) == "u1"
                if (mine or books & {"wallet:u1", "hold:u1"}) and (shard != 2 or event.seq >= since):
                    expected.append(line.decode())
        done = told.replay("--into", "-", "--user", "u1", "--from", f"2:{since}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == expected
    assert any('"payment.refund_due"' in line for line in expected)
    assert any('"ledger.adjusted"' in line for line in expected)


async def test_a_reader_that_leaves(told: System) -> None:
    """SIGPIPE ends it quietly."""
    command = [sys.executable, "-m", "ops.cli", "replay", "--into", "-"]
    running = subprocess.Popen(command, env=child_environment(**of(told.settings)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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


async def test_what_lies_before_is_not_read(system: Settings, journal_of: Journal) -> None:
    """From near the end only the end is read; whatever is asked, no event from there on is missing, and what comes is the truth."""
    lines = [opened("e", 1, 100_000), *(granted("e", seq).replace(b'"at":%d' % seq, b'"at":%d' % (seq // 3)) for seq in range(2, 601))]
    await journal_of.marker(1, "a")
    for first in range(1, 601, 2):
        await journal_of.block(lines, first, first + 1)
    await live(system, {SHARD: 600})
    async with await open_books(system) as books, open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        for point in (*(Point(seq=seq) for seq in (1, 2, 300, 471, 600, 601)), *(Point(at=at) for at in (1, 2, 77, 150, 200, 201))):
            source = Counting(reader, books)
            found = [fact.line async for chunk in source.chunks(SHARD, await source.start(SHARD, point)) for fact in chunk.facts]
            wanted = [line for seq, line in enumerate(lines, 1) if (seq if point.seq else max(seq // 3, 1)) >= point.value]
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


async def test_a_block_found_in_the_middle_that_does_not_count(system: Settings, journal_of: Journal) -> None:
    """A paused relay wrote it, with another history in it: the search meets it, the audit trail unmasks it, the truth is handed out."""
    false = [*LINES[:10], *(line.replace(b'"amount":10', b'"amount":11') for line in LINES[10:])]
    await journal_of.marker(1, "a")
    await journal_of.block(LINES, 1, 10)
    await journal_of.marker(2, "b")
    for _ in range(100):
        await journal_of.block(false, 11, 20)  # of the owner before
    await journal_of.block(LINES, 11, 30, 2, "b")
    await live(system, {SHARD: 30})
    async with await open_books(system) as books, open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        source = JournalSource(OneByOne(reader._consumer, reader._topic), books)
        for since in (15, 20, 30):
            start = await source.start(SHARD, Point(seq=since))
            assert start.cursor.seq == 10  # it begins at one of those
            found = [fact.line async for chunk in source.chunks(SHARD, start) for fact in chunk.facts]
            assert found == LINES[10:]


async def test_a_true_block_of_a_paused_relay_behind_the_end(system: Settings, journal_of: Journal) -> None:
    """It says what is true, and nothing follows it: what stands before it in the journal, and behind it in seq, is not forgotten."""
    await journal_of.marker(1, "a")
    await journal_of.block(LINES, 1, 10)
    await journal_of.marker(2, "b")
    await journal_of.block(LINES, 11, 30, 2, "b")
    for _ in range(100):
        await journal_of.block(LINES, 11, 12)  # of the owner before
    await live(system, {SHARD: 30})
    async with await open_books(system) as books, open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        source = JournalSource(reader, books)
        start = await source.start(SHARD, Point(seq=15))
        assert start.cursor.next_offset > 3  # it begins at one of those
        assert [fact.line async for chunk in source.chunks(SHARD, start) for fact in chunk.facts] == LINES[10:]


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


# -- a topic --------------------------------------------------------------------------------------------------------------


async def records(settings: Settings, topic: str) -> list[Any]:
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False)
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
        (one.partition, one.key, one.value, [header for header in one.headers if header[0] != "cursor"], one.timestamp)
        for one in await records(told.settings, events)
    ]
    done = told.replay("--into", f"topic:{topic}", "--json")
    assert done.returncode == 0, done.stderr
    assert sum(shard["events"] for shard in json.loads(done.stdout)["shards"] if "events" in shard) == len(told.lines())
    found = await records(told.settings, topic)
    assert [(one.partition, one.key, one.value, list(one.headers), one.timestamp) for one in found] == own
    assert {line.decode() for line in (one.value for one in found)} == set(told.lines())
    # A second time it would all be there twice: that has to be meant.
    done = told.replay("--into", f"topic:{topic}")
    assert done.returncode == 1
    assert "--append" in done.stderr
    last = len(told.histories[5].lines)
    assert told.replay("--into", f"topic:{topic}", "--append", "--from", f"5:{last}", "--shard", "5").returncode == 0
    assert (await records(told.settings, topic))[-1].value == told.histories[5].lines[-1]


async def test_topics_that_are_refused(told: System, topic: str) -> None:
    for name in Topics(told.settings.prefix).journal, Topics(told.settings.prefix).events, Topics(told.settings.prefix).commands:
        done = told.replay("--into", f"topic:{name}", "--append")
        assert (done.returncode, "the system's own" in done.stderr) == (1, True)
    client = AIOKafkaAdminClient(bootstrap_servers=told.settings.kafka)
    await client.start()
    await client.create_topics([NewTopic(topic, num_partitions=2, replication_factor=1)])
    await client.close()
    for words in ((), ("--dry-run",)):
        done = told.replay("--into", f"topic:{topic}", *words)
        assert (done.returncode, "2 partitions" in done.stderr) == (1, True), done.stderr


# -- a schema -------------------------------------------------------------------------------------------------------------


async def test_read_models_anew_are_those_of_the_live_system(told: System, prefix: str) -> None:
    """All of it, from both sources, and from a journal whose blocks are cut elsewhere and repeated."""
    now = await tables(told.settings, told.settings.schema_)
    for source in ("journal", "audit"):
        done = told.replay("--into", f"schema:{told.into(source)}", "--source", source)
        assert done.returncode == 0, done.stderr
        assert await tables(told.settings, told.into(source)) == now
    limits = "SELECT * FROM {}.limits ORDER BY offer, by, per, value"
    assert await rows(told.settings, limits.format(told.settings.schema_)) == await rows(told.settings, limits.format(told.into("journal")))
    again = told.settings.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        for history in told.histories.values():
            await journal(again, history, random.Random(99))
        done = grabstream("replay", "--into", f"schema:{prefix}x_all", **of(again))
        assert done.returncode == 0, done.stderr
        assert await tables(again, f"{prefix}x_all") == now
        await drop(again, f"{prefix}x_all")
    finally:
        await take_down(again)


async def test_up_to_a_point_it_is_what_the_live_system_was_there(told: System) -> None:
    for name, words in (
        ("places", tuple(f"--until={shard}:{seq}" for shard, seq in told.places.items())),
        ("moment", (f"--until={told.at_ms}",)),
        ("trail", (f"--until={show_time(told.at_ms)}", "--source=audit")),
    ):
        done = told.replay("--into", f"schema:{told.into(name)}", *words)
        assert done.returncode == 0, done.stderr
        assert await tables(told.settings, told.into(name)) == told.then, name
        assert "limits_partial" in done.stdout
    # Further on, in the same schema: to a later time, then to the end; never back.
    later = told.histories[5].events[-20].at
    for words, before in (((f"--until={later}",), told.at_ms), ((), later)):
        done = told.replay("--into", f"schema:{told.into('moment')}", *words)
        assert done.returncode == 0, done.stderr
        done = told.replay("--into", f"schema:{told.into('moment')}", f"--until={before}")
        assert (done.returncode, "goes beyond" in done.stderr) == (1, True), done.stderr
    assert await tables(told.settings, told.into("moment")) == await tables(told.settings, told.settings.schema_)


async def test_offers_alone(told: System) -> None:
    """What is under its usual name is what the live system has of these offers."""
    names = (told.histories[2].envelope, told.histories[2].names[0])
    done = told.replay("--into", f"schema:{told.into('some')}", *(f"--offer={name}" for name in names), "--json")
    assert done.returncode == 0, done.stderr
    partial = {"accounts", "balances"}
    assert set(json.loads(done.stdout)["partial_views"]) == partial | {"limits", "demand"}
    mine = await tables(told.settings, told.into("some"), [view for view in VIEWS if view not in partial])
    for view in ("offers", "grabs", "transfers", "payments", "audit", "operations", "waiting"):
        query = f"SELECT * FROM {view} WHERE offer IN {names} ORDER BY {VIEWS[view]}"
        whole = await rows(told.settings, query)
        assert mine[view] == whole, view
        assert whole or view == "waiting"
    # The part on accounts is the sum of these offers' transfers.
    sums = await rows(
        told.settings,
        "SELECT account, asset, sum(change)::bigint FROM (SELECT debit AS account, asset, -amount AS change, offer FROM transfers "
        f"UNION ALL SELECT credit, asset, amount, offer FROM transfers) AS legs WHERE offer IN {names} GROUP BY 1, 2 ORDER BY 1, 2",
    )
    assert (await tables(told.settings, told.into("some"), ["accounts_partial"]))["accounts_partial"] == sums


async def test_users_alone(told: System) -> None:
    """In two steps: what is due back for a grab of the first is known in the second."""
    for words in ((f"--until={told.at_ms}",), ()):
        done = told.replay("--into", f"schema:{told.into('own')}", "--user", "u1", "--user", "alice", *words)
        assert done.returncode == 0, done.stderr
    mine = await tables(told.settings, told.into("own"), ["grabs", "balances", "payments"])
    users = "('u1', 'alice')"
    for view in ("grabs", "balances"):
        assert mine[view] == await rows(told.settings, f"SELECT * FROM {view} WHERE user_id IN {users} ORDER BY {VIEWS[view]}")
        assert mine[view]
    paid = f"SELECT p.* FROM payments AS p JOIN grabs AS g USING (offer, grab) WHERE g.user_id IN {users} ORDER BY payment"
    assert mine["payments"] == await rows(told.settings, paid)
    booked = "'wallet:u1', 'hold:u1', 'wallet:alice', 'hold:alice'"
    query = "SELECT * FROM {}.transfers WHERE debit IN ({}) OR credit IN ({}) ORDER BY shard, seq, leg"
    found = [await rows(told.settings, query.format(schema, booked, booked)) for schema in (told.settings.schema_, told.into("own"))]
    assert found[0] == found[1]
    said = "SELECT offer, state, total, closed_at, terms FROM {}.offers ORDER BY offer"
    found = [await rows(told.settings, said.format(schema)) for schema in (told.settings.schema_, told.into("own"))]
    assert found[0] == found[1]
    columns = await rows(told.settings, f"SELECT attname FROM pg_attribute WHERE attrelid = '{told.into('own')}.offers'::regclass")
    assert not {"given", "held", "units_left"} & {name for (name,) in columns}
    offer_level = OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
    bodies = {body for (body,) in await rows(told.settings, f"SELECT body FROM {told.into('own')}.audit")}
    missing = [
        event
        for history in told.histories.values()
        for line, event in zip(history.lines, history.events, strict=True)
        if isinstance(event, offer_level) and line.decode() not in bodies
    ]
    assert not missing


async def test_schemas_that_are_refused(told: System) -> None:
    own, other = told.settings.schema_, told.into("other")
    for schema in (own, "public"):
        done = told.replay("--into", f"schema:{schema}")
        assert (done.returncode, "not for replays" in done.stderr) == (1, True), done.stderr
    async with await open_books(told.settings) as books:
        await books.execute(f"CREATE SCHEMA {other}".encode())
    done = told.replay("--into", f"schema:{other}")
    assert (done.returncode, f"DROP SCHEMA {other} CASCADE" in done.stderr) == (1, True)
    assert told.replay("--into", f"schema:{told.into('mine')}", "--shard", "2").returncode == 0
    kept = await tables(told.settings, told.into("mine"), ["transfers", "accounts_partial", "balances_partial", "offers"])
    assert kept["transfers"] == await rows(told.settings, "SELECT * FROM transfers WHERE shard = 2 ORDER BY shard, seq, leg")
    done = told.replay("--into", f"schema:{told.into('mine')}", "--shard", "5")
    assert (done.returncode, "another replay, made with shards [2]" in done.stderr) == (1, True), done.stderr


async def test_no_worker_goes_on_with_a_replay(told: System) -> None:
    schema = told.into("mine")
    assert told.replay("--into", f"schema:{schema}", "--until", f"2:{told.places[2]}", "--shard", "2").returncode == 0
    before = await tables(told.settings, schema)
    own = {**of(told.settings), "schema": schema}
    for verb in ("worker", "init"):
        done = grabstream(verb, **own)
        assert (done.returncode, "bounded replay" in done.stderr) == (2, True), done.stderr
    # A projector that was started all the same (by Faust, say) ends at its first write.
    one = told.settings
    code = (
        "import asyncio\nfrom streams.agents import make_projectors\nfrom streams.projector import CatchUp\n"
        "async def main():\n"
        f"    [one] = make_projectors({one.kafka!r}, {one.prefix!r}, 8, {one.postgres!r}, {schema!r}, ['ledger'])\n"
        "    await one.put(CatchUp(2))\n    await one.run()\nasyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "bounded replay" in done.stderr) == (70, True), done.stderr
    assert await tables(told.settings, schema) == before


async def test_stopped_and_begun_again(told: System) -> None:
    """SIGINT and SIGTERM in the middle; the same command goes on, and the rows are those of a run that was never stopped."""
    schema = told.into("stopped")
    assert told.replay("--into", f"schema:{schema}", f"--until={told.at_ms}").returncode == 0
    command = [sys.executable, "-m", "ops.cli", "replay", "--into", f"schema:{schema}"]
    for number in (signal.SIGINT, signal.SIGTERM):
        # It gets as far as to write, and no further: the last of the tables is locked.
        async with await open_books(told.settings) as books, books.transaction():
            await books.execute(f"LOCK TABLE {schema}.audit IN ACCESS EXCLUSIVE MODE".encode())
            running = subprocess.Popen(command, env=child_environment(**of(told.settings)), stderr=subprocess.PIPE)

            async def waits(books: Any = books) -> bool:
                return await (await books.execute(WAITS_FOR_US)).fetchone() is not None

            await until(waits, 30, "the replay's writing")
            running.send_signal(number)
            await until(lambda running=running: running.poll() is not None, 20, "the end")
        assert running.returncode == 128 + number
        assert running.stderr is not None
        assert b"the same command goes on" in running.stderr.read()
        assert await tables(told.settings, schema) == told.then
    done = told.replay("--into", f"schema:{schema}")
    assert done.returncode == 0, done.stderr
    assert await tables(told.settings, schema) == await tables(told.settings, told.settings.schema_)


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
        (("topic:a b",), "no name of a topic"), (("nonsense",), "topic:NAME"), (("-", "--until", "12"), "SHARD:12"),
        (("-", "--until", "12", "--offer", "a", "--offer", "b"), "exactly one --offer"), (("-", "--until", "99:12"), "8 shards"),
        (("-", "--until", "yesterday"), "2026-11-11T"), (("-", "--from", "2:0"), "seq 1"), (("-", "--append"), "--append"),
        (("-", "--from", "2:9", "--until", "2:8"), "behind"), (("-", "--from", "2:1", "--from", "2:2"), "two places"),
        (("-", "--from", "2026-01-01", "--from", "2026-01-02"), "two times"), (("-", "--from", "2:1", "--shard", "3"), "not among"),
        (("-", "--shard", "8"), "8 shards"), (("-", "--offer", "no such/id"), "--offer"), (("-", "--until", "1960-01-01"), "before 1973"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_named(words: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(replay_verb, ["--into", *words], env={"GRAB_SHARDS": "8"})
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.output.split())


def test_the_commands_in_the_readme_are_understood() -> None:
    section = README.read_text().partition("## Replay and the time machine\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^grabstream (replay|at) (.*?)(?: +#.*)?$", section, re.MULTILINE)
    assert len(lines) > 4
    settings = load_settings()
    for verb, words in lines:
        command = {"replay": replay_verb, "at": at_verb}[verb]
        found = command.make_context(verb, shlex.split(words)).params
        points = {name: found.get(name, ()) for name in ("first", "last", "offers", "users", "shards")}
        assert request(settings, found["source"], **points).stretches
