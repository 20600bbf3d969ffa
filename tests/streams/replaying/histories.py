"""Histories to replay: two shards with offers of every kind, decided by the rules, and journaled in blocks of
random sizes.
"""

import random
import subprocess
from bisect import bisect_left
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer
from psycopg import sql

from grabstream.models.commands import Close, Grab, Open, Resume
from grabstream.models.events import decode_event
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.rules import ShardState
from grabstream.models.runs import decode_line
from grabstream.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.lua.histories.shop import Shop
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import JournalWriter, granted, opened, running
from tests.support.random_history import History
from tests.support.runs import as_lines, as_runs

#: In the past, since `at` refuses times in the future.
NOW = 1_790_000_000_000
SHARDS = 8
VIEWS = {
    "offers": "offer", "grabs": "offer, grab", "accounts": "account, asset", "transfers": "shard, seq, leg",
    "balances": "user_id, asset",
    "payments": "payment, shard", "audit": "shard, seq", "operations": "shard, seq",
    "waiting": "offer, position", "revenue": "offer, currency, minute_at", "results_by_week": "offer",
    "flows": "offer, asset, debit_kind, credit_kind",
    "fairness": "asset, law, total, parts, min, max, place",
}  # fmt: skip

#: Returns a row if another session waits for a lock of this one.
WAITS_FOR_US = "SELECT 1 FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


def name_in(shard: int, start: str) -> str:
    """The name of a campaign in a shard."""
    return next(
        name for number in range(1_000) if shard_of(campaign_of(name := f"{start}{number}"), SHARDS) == shard
    )


def runs_of_ten() -> list[bytes]:
    """The lines of an opening, and of two runs of ten grabs."""
    grabs = [granted("e", seq).replace(b'"at":%d' % seq, b'"at":2') for seq in range(2, 22)]
    return as_runs([opened("e", 1), *grabs], 10)


class MixedHistory(History):
    """A random history of one shard with coupon and stock offers and an envelope. `lines` and `events` are
    single events; `journaled` are the lines of the journal, where with `runs`, some runs have several grabs.
    """

    def __init__(self, seed: int, shard: int, steps: int, runs: bool = False) -> None:
        campaign = name_in(shard, "m")
        names = (f"{campaign}:a", f"{campaign}:b", name_in(shard, "s"), name_in(shard, "t"))
        Shop.__init__(self, seed, NOW + 500 * shard, names)
        self.state, self.lines, self.shard = ShardState(shard), [], shard
        self.envelope = name_in(shard, "e")
        for index in range(len(names)):
            self.decide(self.opening(index))
        terms = EnvelopeTerms(
            issuer="alice", funding="pay", asset="CNY", total=9_999, parts=30, seed=f"{seed:032x}"
        )
        self.send(Open, self.envelope, terms=terms)
        self.now += 10
        for step in range(steps):
            self.step()
            if step % 25 == 0:
                self.send(Grab, self.envelope, user=f"u{step % 7}")
        self.send(Resume, names[2])
        self.send(Close, names[3], operator="olga")
        self.send(Close, self.envelope)
        self.events = [decode_event(line) for line in self.lines]
        self.journaled = as_runs(self.lines) if runs else as_lines(self.lines)
        #: The seq of the last event of each line of the journal.
        self.last_seqs = [decode_line(line).last_seq for line in self.journaled]
        assert runs == (len(self.journaled) < len(self.lines))

    def journaled_between(self, first: int, last: int) -> list[bytes]:
        """The lines of the journal that have events `first` to `last`."""
        return self.journaled[bisect_left(self.last_seqs, first) : bisect_left(self.last_seqs, last) + 1]

    def break_near(self, share: float) -> int:
        """The first seq from a share of the history on whose next event has a later time."""
        start = int(len(self.lines) * share)
        return next(
            seq for seq in range(start, len(self.lines)) if self.events[seq - 1].at < self.events[seq].at
        )


async def journal(
    settings: Settings, history: MixedHistory, cut: random.Random, first: int = 1, last: int | None = None
) -> None:
    """Journals the lines that have events `first` to `last` in blocks of random sizes, some of them twice;
    before seq 1, a marker.
    """
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
    await producer.start()
    writer = JournalWriter(settings, producer, history.shard)
    if first == 1:
        await writer.marker(1, "a")
    number = bisect_left(history.last_seqs, first) + 1
    final = bisect_left(history.last_seqs, last or len(history.lines)) + 1
    while number <= final:
        end = min(number + cut.choice((0, 1, 5, 20, 60)), final)
        for _ in range(cut.choice((1, 1, 1, 2))):
            await writer.block(history.journaled, number, end, last_seqs=history.last_seqs)
        number = end + 1
    await producer.stop()


async def until_read_models_at(settings: Settings, seqs: dict[int, int]) -> None:
    """Runs projectors until all read models are at a seq in each shard."""
    async with running(settings) as projectors, await open_books(settings) as books:
        for projector in projectors:
            for shard in seqs:
                await projector.put(CatchUp(shard))

        async def all_at_seqs() -> bool:
            cursors = await (await books.execute("SELECT shard, seq FROM cursors")).fetchall()
            return all(seq == seqs[shard] for shard, seq in cursors if shard in seqs)

        await until(all_at_seqs, 30, f"{seqs}")


async def tables(settings: Settings, schema: str, names: Any = tuple(VIEWS)) -> dict[str, list[Any]]:
    """All rows of the views of a schema, and of its cursors."""
    async with await open_books(settings) as books:
        by_view = {}
        for view in names:
            query = f"SELECT * FROM {schema}.{view} ORDER BY {VIEWS[view.removesuffix('_partial')]}"
            by_view[view] = await (await books.execute(query.encode())).fetchall()
        query = f"SELECT projection, shard, seq, head FROM {schema}.cursors ORDER BY 1, 2"
        by_view["cursors"] = await (await books.execute(query.encode())).fetchall()
    return by_view


async def drop(settings: Settings, *schemas: str) -> None:
    async with await open_books(settings) as books:
        for schema in schemas:
            await books.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


async def schemas(settings: Settings, start: str) -> list[str]:
    """The schemas whose names begin with `start`, without those of the system's read models."""
    async with await open_books(settings) as books:
        cursor = await books.execute(
            "SELECT nspname FROM pg_namespace "
            "WHERE starts_with(nspname, %s) AND nspname NOT IN (SELECT schema FROM read_models) ORDER BY 1",
            (start,),
        )
        return [name for (name,) in await cursor.fetchall()]


class RecordedSystem(NamedTuple):
    """A system with a history in two shards and its read models, and the rows that they had at an earlier
    time.
    """

    settings: Settings
    histories: dict[int, MixedHistory]
    #: The earlier time, the seq of each shard at that time, and the rows of the views then.
    seqs: dict[int, int]
    then: dict[str, list[Any]]
    at_ms: int

    def replay(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return grabstream("replay", *words, **env_of(self.settings))

    def into(self, name: str) -> str:
        return f"{self.settings.schema_}_{name}"

    def singles(self, *shards: int) -> list[str]:
        """Single events, as on `grab.events`."""
        return [
            line.decode()
            for shard in shards or sorted(self.histories)
            for line in self.histories[shard].lines
        ]

    def between(self, shard: int, first: int, last: int | None = None) -> list[str]:
        """The lines of a shard's journal that have events `first` to `last`."""
        history = self.histories[shard]
        return [line.decode() for line in history.journaled_between(first, last or len(history.lines))]

    def lines(self, *shards: int) -> list[str]:
        """The lines of the journal."""
        return [
            line.decode()
            for shard in shards or sorted(self.histories)
            for line in self.histories[shard].journaled
        ]


async def recorded_system(settings: Settings) -> RecordedSystem:
    """Journals and applies two histories up to one time, reads the views, and then applies the rest."""
    histories = {2: MixedHistory(7, 2, 400, runs=True), 5: MixedHistory(8, 5, 400, runs=True)}
    cut = random.Random(3)
    # One time for both shards: just before an event of the first.
    at_ms = histories[2].events[histories[2].break_near(0.5) - 1].at
    seqs = {shard: sum(event.at <= at_ms for event in history.events) for shard, history in histories.items()}
    for shard, history in histories.items():
        await journal(settings, history, cut, 1, seqs[shard])
    await until_read_models_at(settings, seqs)
    then = await tables(settings, settings.schema_)
    for shard, history in histories.items():
        await journal(settings, history, cut, seqs[shard] + 1)
    await until_read_models_at(settings, {shard: len(history.lines) for shard, history in histories.items()})
    return RecordedSystem(settings, histories, seqs, then, at_ms)
