"""Histories to replay: two shards of offers of every sort, decided by the rules, journaled in blocks cut at
random places.
"""

import random
import subprocess
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer
from psycopg import sql

from grabstream.models.commands import Close, Grab, Open, Resume
from grabstream.models.events import decode_event
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.rules import ShardState
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from tests.conftest import until
from tests.lua.histories.shop import Shop
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import JournalWriter, running
from tests.support.random_history import History

#: In the past, since a time machine refuses the future.
NOW = 1_790_000_000_000
SHARDS = 8
VIEWS = {
    "offers": "offer", "grabs": "offer, grab", "accounts": "account, asset", "transfers": "shard, seq, leg",
    "balances": "user_id, asset",
    "payments": "payment, shard", "audit": "shard, seq", "operations": "shard, seq",
    "waiting": "offer, position",
}  # fmt: skip

#: Finds another session that waits for a lock of this one.
WAITS_FOR_US = "SELECT 1 FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


def name_in(shard: int, start: str) -> str:
    """A campaign of a shard."""
    return next(
        name for number in range(1_000) if shard_of(campaign_of(name := f"{start}{number}"), SHARDS) == shard
    )


class Told(History):
    """A shop's history in one shard, with an envelope beside its pieces."""

    def __init__(self, seed: int, shard: int, steps: int) -> None:
        campaign = name_in(shard, "m")
        names = (f"{campaign}:a", f"{campaign}:b", name_in(shard, "s"), name_in(shard, "t"))
        Shop.__init__(self, seed, NOW + 500 * shard, names)
        self.state, self.lines, self.shard = ShardState(shard), [], shard
        self.envelope = name_in(shard, "e")
        for place in range(len(names)):
            self.decide(self.opening(place))
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

    def break_near(self, share: float) -> int:
        """A seq behind which time passes before the next event, some way into the history."""
        start = int(len(self.lines) * share)
        return next(
            seq for seq in range(start, len(self.lines)) if self.events[seq - 1].at < self.events[seq].at
        )


async def journal(
    settings: Settings, history: Told, cut: random.Random, first: int = 1, last: int | None = None
) -> None:
    """Events first … last over the journal, in blocks of random sizes, some of them twice; the marker comes
    with the first.
    """
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
    await producer.start()
    out = JournalWriter(settings, producer, history.shard)
    if first == 1:
        await out.marker(1, "a")
    last = last or len(history.lines)
    while first <= last:
        end = min(first + cut.choice((0, 1, 5, 20, 60)), last)
        for _ in range(cut.choice((1, 1, 1, 2))):
            await out.block(history.lines, first, end)
        first = end + 1
    await producer.stop()


async def live(settings: Settings, places: dict[int, int]) -> None:
    """The read models of a live system, carried up to a seq in each shard."""
    async with running(settings) as projectors, await open_books(settings) as books:
        for projector in projectors:
            for shard in places:
                await projector.put(CatchUp(shard))

        async def there() -> bool:
            found = await (await books.execute("SELECT shard, seq FROM cursors")).fetchall()
            return all(seq == places[shard] for shard, seq in found if shard in places)

        await until(there, 30, f"{places}")


async def tables(settings: Settings, schema: str, names: Any = tuple(VIEWS)) -> dict[str, list[Any]]:
    """All rows of the views of a schema, and how far its cursors are."""
    async with await open_books(settings) as books:
        found = {}
        for view in names:
            query = f"SELECT * FROM {schema}.{view} ORDER BY {VIEWS[view.removesuffix('_partial')]}"
            found[view] = await (await books.execute(query.encode())).fetchall()
        query = f"SELECT projection, shard, seq, head FROM {schema}.cursors ORDER BY 1, 2"
        found["cursors"] = await (await books.execute(query.encode())).fetchall()
    return found


async def drop(settings: Settings, *schemas: str) -> None:
    async with await open_books(settings) as books:
        for schema in schemas:
            await books.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


async def schemas(settings: Settings, start: str) -> list[str]:
    """Schemas whose names begin so, but for those of the system's own versions."""
    async with await open_books(settings) as books:
        found = await books.execute(
            "SELECT nspname FROM pg_namespace "
            "WHERE starts_with(nspname, %s) AND nspname NOT IN (SELECT schema FROM read_models) ORDER BY 1",
            (start,),
        )
        return [name for (name,) in await found.fetchall()]


class System(NamedTuple):
    """A system with a history in two shards, its read models, and what stood in them when it was at an
    earlier point.
    """

    settings: Settings
    histories: dict[int, Told]
    places: dict[int, int]
    then: dict[str, list[Any]]
    at_ms: int

    def replay(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return grabstream("replay", *words, **env_of(self.settings))

    def into(self, name: str) -> str:
        return f"{self.settings.schema_}_{name}"

    def lines(self, *shards: int) -> list[str]:
        return [
            line.decode()
            for shard in shards or sorted(self.histories)
            for line in self.histories[shard].lines
        ]


async def told_system(settings: Settings) -> System:
    histories = {2: Told(7, 2, 400), 5: Told(8, 5, 400)}
    cut = random.Random(3)
    # One moment for both: just before something happens in the first.
    at_ms = histories[2].events[histories[2].break_near(0.5) - 1].at
    places = {
        shard: sum(event.at <= at_ms for event in history.events) for shard, history in histories.items()
    }
    for shard, history in histories.items():
        await journal(settings, history, cut, 1, places[shard])
    await live(settings, places)
    then = await tables(settings, settings.schema_)
    for shard, history in histories.items():
        await journal(settings, history, cut, places[shard] + 1)
    await live(settings, {shard: len(history.lines) for shard, history in histories.items()})
    return System(settings, histories, places, then, at_ms)
