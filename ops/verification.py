"""Verification: journal, books, audit trail and Redis against each other.

1. wait until journal and read models have come as far as Redis was · 2. one snapshot of PostgreSQL · 3. read
   the whole journal, chain it, hold every line against the audit trail, and make of it, in temporary tables,
   what the read models must be at the snapshot's cursors ·
4. compare them row by row · 5. shard by shard, make of the journal beside Redis' keys what they must be, and
   compare these. Each check is made against the journal, so that what is wrong in one place is named there,
   and nowhere else.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
from psycopg import AsyncConnection, IsolationLevel
from redis.exceptions import RedisError

from grabstream.lua.gate.sealing import CannotOpen
from grabstream.models.events import AnyEvent, decode_event
from grabstream.models.journal import GENESIS, Accepted, Corrupt, Cursor, Gap, parse_block
from grabstream.models.transfers import GUARDED_ACCOUNTS, transfers_of
from grabstream.ops.connections.opening import key_space, open_redis, sealer, snapshots
from grabstream.ops.connections.redis_servers import information
from grabstream.ops.settings import BadSettings, Settings
from grabstream.projections.checking.anew import MADE, Anew
from grabstream.projections.cursors import Fact, load, stopped
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.records import set_aside
from grabstream.projections.records.set_aside import SetAside
from grabstream.streams.journal import JournalReader, Record, open_reader
from grabstream.streams.relaying.ownership import NewerProgram, SteppedDown
from grabstream.streams.relaying.recovery import Impossible
from grabstream.streams.relaying.shadow import BESIDE_STEADILY, NoRoom, NotComparable, Pace, open_beside
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
PROBLEMS_SHOWN_MAX = 5
#: Further problems of one kind are counted, and not kept.
PROBLEMS_KEPT_MAX: Final = 200
PROGRESS_SECONDS: Final = 1.0
#: How full a server of Redis may become for a shard to be made a second time there: of `maxmemory`, and
#: without one of the machine.
ROOM_SHARE: Final = 0.9
ROOM_SHARE_OF_MACHINE: Final = 0.7


class Check(NamedTuple):
    """One thing that was checked: how many of what, what is wrong (empty: nothing), and what is known and was
    decided by somebody.
    """

    name: str
    checked: int
    of_what: str
    problems: list[str]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


class RedisShard(NamedTuple):
    """How far a shard is by Redis: its seq, and the checkpoint, the last event it knows to be journaled, with
    the chain's hash there; and the journal offset behind it, with term and owner. `decides` is false while it
    is fenced, or being made anew.
    """

    seq: int
    journaled_seq: int
    journaled_head: bytes
    journaled_offset: int = 0
    journaled_term: int = 0
    journaled_owner: str = ""
    decides: bool = False


Say = Callable[[str], None]


class Problems:
    """What is wrong of one kind, in words: the first ones, and how many there are."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def add(self, problem: str) -> None:
        """One more."""
        self._count += 1
        if self._count <= PROBLEMS_KEPT_MAX:
            self._kept.append(problem)

    @property
    def lines(self) -> list[str]:
        """For a check."""
        more = self._count - len(self._kept)
        return [*self._kept, f"and {more:,} more"] if more else list(self._kept)


async def verify(
    settings: Settings, wait_seconds: float = 30.0, report: Say = lambda line: None, quick: bool = False,
    share: float = 0.5
) -> list[Check]:  # fmt: skip
    """Runs every check and returns them all; raises the clients' own errors when a server cannot be reached.

    `quick` leaves out what takes room in Redis: a second copy of each shard, one after the other. That takes
    at most this `share` of the time, so that whoever grabs is served; 1 where nobody does.
    """
    report("reading Redis")
    redis = open_redis(settings)
    try:
        shards = await redis_shards(redis, settings)
        connection = await connect(settings.postgres, settings.schema_)
        async with connection, open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
            await use_schema(connection, settings.schema_)
            report("waiting for the read models")
            caught_up = await _caught_up(connection, shards, wait_seconds)
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            async with connection.transaction():
                books = _Books(connection, reader, settings, shards, report)
                of_books = await books.checks()
            checks = [_of_the_rest(caught_up, books), *of_books]
            if quick:
                notes = ["left out: --quick"]
                checks.append(Check("Redis = fold of the journal", 0, "keys", [], notes))
            else:
                checks.append(await _redis_check(settings, redis, reader, books, wait_seconds, report, share))
            if books.aside:
                checks.append(
                    Check(
                        "set aside by operators",
                        len(books.aside),
                        "records",
                        [],
                        [one.in_words() for one in books.aside],
                    )
                )
    finally:
        await redis.aclose()
    return checks


async def redis_shards(redis: Any, settings: Settings) -> dict[int, RedisShard]:
    """How far every shard is."""
    shards = {}
    for number in range(settings.shards):
        seq, journaled, head, offset, term, owner, life = await redis.hmget(
            key_space(settings).shard(number).state,
            [
                "seq",
                "journaled_seq",
                "journaled_head",
                "journaled_offset",
                "journaled_term",
                "journaled_owner",
                "life",
            ],
        )
        shards[number] = RedisShard(
            int(seq or 0), int(journaled or 0), bytes.fromhex((head or b"").decode()), int(offset or 0),
            int(term or 0),
            (owner or b"").decode(errors="replace"), life is not None,
        )  # fmt: skip
    return shards


class Waited(NamedTuple):
    """What has not come as far as Redis was: (shard, projection, in words)."""

    cursors: int
    behind: list[tuple[int, str, str]]


async def _caught_up(
    connection: AsyncConnection[Any], shards: dict[int, RedisShard], wait_seconds: float
) -> Waited:
    deadline = time.monotonic() + wait_seconds
    while True:
        behind: list[tuple[int, str, str]] = []
        halted: list[tuple[int, str, str]] = []
        for name in PROJECTIONS:
            cursors = await load(connection, name)
            at_rest = await stopped(connection, name)
            halted += [
                (shard, name, f"{name} has stopped at shard {shard}, seq {cursors[shard].seq}: see status")
                for shard in sorted(at_rest)
            ]
            behind += [
                (
                    number,
                    name,
                    f"{name} is at seq {cursors[number].seq} of shard {number}, Redis at {shard.seq}",
                )
                for number, shard in shards.items()
                if number not in at_rest and cursors[number].seq < shard.seq
            ]
        if not behind or time.monotonic() > deadline:
            return Waited(len(shards) * len(PROJECTIONS), halted + behind)
        await asyncio.sleep(POLL_SECONDS)


def _of_the_rest(waited: Waited, books: "_Books") -> Check:
    """Who is behind; what follows from something that is named elsewhere is left out."""
    problems = [
        f"shard {shard}: Redis is at seq {books.shards[shard].seq}, its journal ends at {books.ends[shard]}"
        for shard in sorted(books.not_journaled)
    ]
    known = books.broken | books.ahead | books.not_journaled
    problems += [
        what
        for shard, name, what in waited.behind
        if shard not in known and (name, shard) not in books.untrue
    ]
    return Check("read models have caught up", waited.cursors, "cursors", problems)


# -- the journal and the read models -------------------------------------------------------------------------


class _Lacks:
    """The events that one projection lacks, as operators decided."""

    def __init__(self, aside: Sequence[SetAside], projection: str) -> None:
        self._spans = [
            (one.shard, one.first_seq, one.last_seq)
            for one in aside
            if one.projection == projection and one.event_count
        ]

    def has(self, shard: int, seq: int) -> bool:
        """Whether it lacks this one."""
        return any(of == shard and first <= seq <= last for of, first, last in self._spans)


class _Books:
    """The journal against PostgreSQL, in one transaction; what it says of the journal is known when `checks`
    was called.
    """

    def __init__(
        self, connection: AsyncConnection[Any], reader: JournalReader, settings: Settings,
        shards: Mapping[int, RedisShard], report: Say
    ) -> None:  # fmt: skip
        self._connection = connection
        self._reader = reader
        self._settings = settings
        self.shards = shards
        self._report = report
        self._told_at = time.monotonic()
        self._anew = Anew(connection, settings.schema_)
        self._chain, self._audit, self._cursors, self._checkpoints = (
            Problems(),
            Problems(),
            Problems(),
            Problems(),
        )
        self._events = self._audited = 0
        self.aside: Sequence[SetAside] = ()
        #: Shards whose journal is broken, and shards of which not all events could be folded.
        self.broken: set[int] = set()
        self.unfolded: dict[int, str] = {}
        #: Cursors that are not as the journal has them, by projection and shard: what was made up to there
        #: cannot be told.
        self.untrue: set[tuple[str, int]] = set()
        #: Shards of which Redis has decided more than is journaled.
        self.not_journaled: set[int] = set()
        #: The last seq of each shard's journal.
        self.ends: dict[int, int] = {}
        #: Shards whose Redis says that more is journaled than there is.
        self.ahead: set[int] = set()
        #: Shards whose audit trail is the journal, byte for byte.
        self.trail_is_sound: set[int] = set()

    async def checks(self) -> list[Check]:
        """All of them."""
        self._positions = {name: await load(self._connection, name) for name in PROJECTIONS}
        self.aside = await set_aside.load(self._connection)
        self._lacks = {name: _Lacks(self.aside, name) for name in PROJECTIONS}
        await self._anew.begin()
        for shard in range(self._settings.shards):
            await self._shard(shard)
        await self._shards_that_are_none()
        self._report("making the read models of it")
        await self._anew.finish()
        self._report("comparing the read models")
        return [
            Check("chain of every shard", self._events, "events", self._chain.lines),
            Check("audit bytes = journal", self._audited, "events", self._audit.lines),
            Check(
                "cursors = journal", len(PROJECTIONS) * self._settings.shards, "cursors", self._cursors.lines
            ),
            *[await self._compared(name) for name in MADE],
            await self._solvent(),
            await self._agree(),
            Check("views show the read models", *_flat(*await self._anew.views(), "views")),
            Check(
                "what Redis knows as journaled is", len(self.shards), "checkpoints", self._checkpoints.lines
            ),
        ]

    async def _shard(self, shard: int) -> None:
        """Reads one shard's journal to its end."""
        audit = _Audit(self._connection, shard, self._positions["audit"][shard].seq, self._audit)
        marks = _Marks(shard, self._of(shard), self.shards[shard])
        cursor, folded = Cursor(), Accepted(0, b"", GENESIS)
        async with aclosing(audit.rows):
            try:
                async with aclosing(self._records(shard)) as records:
                    async for offset, cursor, accepted in records:
                        marks.behind(offset, cursor, accepted)
                        for one, event in zip(accepted, _decoded(accepted), strict=True):
                            await self._event(shard, one, event, audit)
                            folded = one
                        self._tell(shard, cursor.seq)
            except (Corrupt, Gap, msgspec.DecodeError) as error:
                self.broken.add(shard)
                self._chain.add(f"shard {shard}: {error}")
                await self._rest_of_trail(shard, folded, audit)
            else:
                lost = [
                    name
                    for name, one in self._of(shard).items()
                    if one.next_offset > cursor.next_offset and one.seq > cursor.seq
                ]
                if lost:
                    self.broken.add(shard)
                    names = " and ".join(lost)
                    self._chain.add(
                        f"shard {shard}: it ends at seq {cursor.seq}, and {names} came further: it has lost "
                        "its end"
                    )
                    await self._rest_of_trail(shard, folded, audit)
                else:
                    await audit.end(self._lacks["audit"])
        self.ends[shard] = cursor.seq
        for name, line in marks.problems(shard in self.broken):
            self.untrue.add((name, shard))
            self._cursors.add(line)
        if shard not in self.broken:
            if line := marks.checkpoint(cursor):
                self.ahead.add(shard)
                self._checkpoints.add(line)
            elif self.shards[shard].seq > cursor.seq:
                self.not_journaled.add(shard)
        if audit.sound and shard not in self.broken and ("audit", shard) not in self.untrue:
            self.trail_is_sound.add(shard)
        self._audited += audit.compared

    async def _shards_that_are_none(self) -> None:
        """What stands under the number of a shard that this system has not."""
        count = self._settings.shards
        rows = await self._rows(
            "SELECT shard, count(*) FROM audit WHERE shard < 0 OR shard >= %s GROUP BY shard ORDER BY shard",
            count,
        )
        for shard, events in rows:
            self._audit.add(
                f"shard {shard}: the audit trail has {events} rows of it, and there is no such shard"
            )
        for name, cursors in self._positions.items():
            for shard in sorted(cursors.keys() - set(range(count))):
                self._cursors.add(f"{name}, shard {shard}: it has a cursor, and there is no such shard")

    def _of(self, shard: int) -> dict[str, Cursor]:
        """The cursors of one shard."""
        return {name: cursors[shard] for name, cursors in self._positions.items()}

    async def _records(self, shard: int) -> AsyncGenerator[tuple[int, Cursor, Sequence[Accepted]], None]:
        """Each record's offset, the cursor behind it, and what it adds; what operators have set aside is
        passed over.
        """
        past = {one.journal_offset: one.behind for one in self.aside if one.shard == shard}
        cursor = Cursor()
        async with aclosing(
            self._reader.read(shard, await self._reader.beginning(shard), await self._reader.end(shard))
        ) as lists:
            async for records in lists:
                for record in records:
                    try:
                        cursor, accepted = _fed(cursor, record)
                    except Corrupt:
                        if record.offset not in past:
                            raise
                        cursor, accepted = past[record.offset], ()
                    yield record.offset, cursor, accepted

    async def _event(
        self, shard: int, one: Accepted, event: AnyEvent | msgspec.DecodeError, audit: "_Audit"
    ) -> None:
        self._events += 1
        lacking = [name for name in PROJECTIONS if self._lacks[name].has(shard, one.seq)]
        if isinstance(event, msgspec.DecodeError):
            if len(lacking) < len(PROJECTIONS):
                raise event
            return
        if "audit" not in lacking:
            await audit.compare(one, event)
        fact = Fact(one.line, one.hash, event, ())
        for name in MADE:
            if name not in lacking and one.seq <= self._positions[name][shard].seq:
                fact = fact if fact.transfers else fact._replace(transfers=transfers_of(event))
                await self._anew.take(name, fact)

    async def _rest_of_trail(self, shard: int, folded: Accepted, audit: "_Audit") -> None:
        """Behind a break of the journal: the audit trail goes on for as long as it follows from what stands
        before.
        """
        wanted = max(cursors[shard].seq for name, cursors in self._positions.items() if name in MADE)
        seq, head = folded.seq, folded.hash
        async for row in audit.rest(seq):
            text = row.body.encode()
            if row.seq != seq + 1 or sha256(head + text).digest() != row.hash:
                break
            seq, head = row.seq, row.hash
            try:
                await self._event(shard, Accepted(seq, text, head), decode_event(text), audit.ended)
            except msgspec.DecodeError:
                break
        if seq < wanted:
            self.unfolded[shard] = (
                f"shard {shard} from seq {seq + 1} on stands in no journal, and in no audit trail that "
                "follows from it"
            )

    def _unmade(self, *names: str) -> list[str]:
        """Why these read models cannot be made of the journal up to where they are."""
        untrue = [
            f"the cursor of {name} in shard {shard} is not true"
            for name, shard in sorted(self.untrue)
            if name in names
        ]
        return [*self.unfolded.values(), *untrue]

    async def _compared(self, name: str) -> Check:
        title, notes = f"{name} = fold of the journal", self._unmade(name)
        if (other := self._anew.other_definition(name)) is not None:
            notes.append(other)
        if notes:
            return Check(title, 0, "rows", [], [f"not compared: {note}" for note in notes])
        if name in self._anew.refused:
            return Check(title, 0, "rows", [self._anew.refused[name]])
        return Check(title, *_flat(*await self._anew.differences(name), "rows"))

    async def _solvent(self) -> Check:
        """By the journal, no guarded account is below 0."""
        name = "no account below 0"
        if self._unmade("ledger") or "ledger" in self._anew.refused:
            return Check(
                name, 0, "accounts", [], ["not looked at: the ledger could not be made of the journal"]
            )
        below = await self._rows(
            "SELECT account, asset, posted FROM accounts_1 WHERE posted < 0 AND account LIKE ANY(%s) ORDER "
            "BY account, asset",
            [f"{start}%" for start in GUARDED_ACCOUNTS],
        )
        [(count,)] = await self._rows("SELECT count(*) FROM accounts_1")
        return Check(
            name,
            count,
            "accounts",
            [f"{account} {asset} is below 0: {posted}" for account, asset, posted in below],
        )

    async def _agree(self) -> Check:
        """By the journal, the ledger and the balances come to the same by different ways, where both are
        equally far.
        """
        name = "ledger and balances agree"
        abreast = all(
            self._positions["ledger"][shard].seq == cursor.seq
            for shard, cursor in self._positions["balances"].items()
        )
        gaps = any(one.event_count and one.projection in MADE for one in self.aside)
        if self._unmade(*MADE) or self._anew.refused or gaps or not abreast:
            return Check(name, 0, "accounts", [], ["not looked at: they do not stand at the same events"])
        wallets = await self._rows(
            "WITH kept AS (SELECT 'wallet:' || user_id AS account, asset, available AS amount FROM "
            "balances_1 "
            "UNION ALL SELECT 'hold:' || user_id, asset, held FROM balances_1 "
            "UNION ALL SELECT 'offer:' || offer, asset, total - given - held - refunded FROM offers_1) "
            "SELECT account, asset, coalesce(a.posted, 0), coalesce(k.amount, 0) FROM accounts_1 AS a FULL "
            "JOIN kept AS k "
            "USING (account, asset) WHERE (a.account IS NULL OR account LIKE ANY(%s)) AND coalesce(a.posted, "
            "0) <> coalesce(k.amount, 0) "
            "ORDER BY account, asset LIMIT 100",
            ["wallet:%", "hold:%", "offer:%"],
        )
        [(count,)] = await self._rows("SELECT count(*) FROM accounts_1")
        lines = [
            f"{account} {asset}: {posted} by the ledger, {amount} by the balances"
            for account, asset, posted, amount in wallets
        ]
        return Check(name, count, "accounts", lines)

    async def _rows(self, query: str, *arguments: Any) -> list[Any]:
        return await (await self._connection.execute(query.encode(), arguments or None)).fetchall()

    def _tell(self, shard: int, seq: int) -> None:
        now = time.monotonic()
        if now - self._told_at > PROGRESS_SECONDS:
            self._told_at = now
            self._report(
                f"reading the journal: shard {shard} of {self._settings.shards}, seq {seq:,}; "
                f"{self._events:,} events in all"
            )


def _flat(count: int, problems: list[str], of_what: str) -> tuple[int, str, list[str]]:
    return count, of_what, problems


def _fed(cursor: Cursor, record: Record) -> tuple[Cursor, Sequence[Accepted]]:
    """Raises Corrupt or Gap with the record's offset."""
    try:
        block = parse_block(record.headers, record.value)
        if block.shard != record.shard:
            raise Corrupt(f"a block of shard {block.shard} in partition {record.shard}")
        return cursor.feed(record.offset, block)
    except (Corrupt, Gap) as error:
        where = f"offset {record.offset}: "
        if str(error).startswith(where):
            raise
        raise type(error)(where + str(error)) from None


def _decoded(accepted: Sequence[Accepted]) -> list[AnyEvent | msgspec.DecodeError]:
    """The events, or why one cannot be decoded, with its seq."""
    found: list[AnyEvent | msgspec.DecodeError] = []
    for one in accepted:
        try:
            found.append(decode_event(one.line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            said = str(error)
            found.append(msgspec.DecodeError(said if said.startswith("seq ") else f"seq {one.seq}: {said}"))
    return found


class _Row(NamedTuple):
    seq: int
    offer: str
    type: str
    at: int
    body: str
    hash: bytes


class _Audit:
    """The audit trail of a shard up to its cursor, held row by row against what the journal has."""

    def __init__(self, connection: AsyncConnection[Any], shard: int, end: int, problems: Problems) -> None:
        self.rows = self._read(connection, shard)
        self.compared = 0
        self.sound = True
        self._shard = shard
        self._end = end
        self._problems = problems
        self._next: _Row | None = None
        self._began = False
        self._active = True

    @staticmethod
    async def _read(connection: AsyncConnection[Any], shard: int) -> AsyncGenerator[_Row, None]:
        async with connection.cursor(f"audit_{shard}") as rows:
            rows.itersize = 5_000
            await rows.execute(
                "SELECT seq, offer, type, at, body, hash FROM audit WHERE shard = %s ORDER BY seq", (shard,)
            )
            async for seq, offer, type_, at, body, hash_ in rows:
                yield _Row(seq, offer, type_, at, body, bytes(hash_))

    @property
    def ended(self) -> "_Audit":
        """The same, with nothing more to be compared."""
        self._active = False
        return self

    async def _row(self) -> _Row | None:
        if not self._began:
            self._began = True
            await self._step()
        return self._next

    async def _step(self) -> None:
        self._next = await anext(self.rows, None)

    def _wrong(self, seq: int, what: str) -> None:
        self.sound = False
        self._problems.add(f"shard {self._shard}, seq {seq}: {what}")

    async def compare(self, one: Accepted, event: AnyEvent) -> None:
        """The row of the next event."""
        if not self._active:
            return
        while (row := await self._row()) is not None and row.seq < one.seq:
            self._wrong(row.seq, "the audit trail has a row that the journal has not")
            await self._step()
        if row is None or row.seq > one.seq:
            if one.seq > self._end:
                return  # still to come
            self.compared += 1
            self._wrong(one.seq, "the audit trail lacks this event")
            return
        self.compared += 1
        said = _Row(
            one.seq, event.offer, str(event.__struct_config__.tag), event.at, one.line.decode(), one.hash
        )
        if row != said:
            fields = [name for name, is_, was in zip(_Row._fields, row, said, strict=True) if is_ != was]
            self._wrong(
                one.seq,
                f"{' and '.join(fields)} of the audit trail {'differs' if len(fields) == 1 else 'differ'} "
                "from the journal",
            )
        await self._step()

    async def end(self, lacks: _Lacks) -> None:
        """What is left belongs to nothing; but where events were set aside, the row may be of a record that
        cannot be read.
        """
        while (row := await self._row()) is not None:
            if not lacks.has(self._shard, row.seq):
                self._wrong(row.seq, "the audit trail has a row that the journal has not")
            await self._step()

    async def rest(self, seq: int) -> AsyncGenerator[_Row, None]:
        """The rows behind a seq."""
        while (row := await self._row()) is not None:
            if row.seq > seq:
                yield row
            await self._step()


class _Marks:
    """Places in a shard's journal that others know of: the cursors of the read models, and Redis'
    checkpoint.
    """

    def __init__(self, shard: int, cursors: Mapping[str, Cursor], redis: RedisShard) -> None:
        self._shard = shard
        self._cursors = cursors
        self._met: dict[str, Cursor] = {
            name: Cursor() for name, cursor in cursors.items() if cursor.next_offset == 0
        }
        self._redis = redis
        self._head = b"" if redis.journaled_seq else redis.journaled_head
        self._at_checkpoint: Cursor | None = None

    def behind(self, offset: int, cursor: Cursor, accepted: Sequence[Accepted]) -> None:
        """The next record: its offset, the cursor behind it, and its events."""
        for name, one in self._cursors.items():
            if one.next_offset == offset + 1:
                self._met[name] = cursor
        if self._redis.journaled_offset == offset + 1:
            self._at_checkpoint = cursor
        if accepted and accepted[0].seq <= self._redis.journaled_seq <= accepted[-1].seq:
            self._head = accepted[self._redis.journaled_seq - accepted[0].seq].hash

    def problems(self, broken: bool) -> list[tuple[str, str]]:
        """Cursors that are not as the journal has them at their offset: whose, and what is wrong."""
        lines = []
        for name, one in self._cursors.items():
            there = self._met.get(name)
            if there is None and not broken:
                lines.append(
                    (
                        name,
                        f"{name}, shard {self._shard}: no record of the journal ends at offset "
                        f"{one.next_offset}",
                    )
                )
            elif there is not None and there != one:
                fields = [
                    (name_, is_, was)
                    for name_, is_, was in zip(Cursor._fields, one, there, strict=True)
                    if is_ != was
                ]
                what = ", ".join(
                    f"{field} is {_hex(is_)}, the journal has {_hex(was)}" for field, is_, was in fields
                )
                lines.append(
                    (name, f"{name}, shard {self._shard}, the cursor: {what} at offset {one.next_offset}")
                )
        return lines

    def checkpoint(self, end: Cursor) -> str:
        """What is wrong with Redis' checkpoint; '' when nothing is."""
        if self._redis.journaled_seq > end.seq:
            return (
                f"shard {self._shard}: Redis knows seq {self._redis.journaled_seq} as journaled, the "
                f"journal ends at {end.seq}"
            )
        if self._head != self._redis.journaled_head:
            seq, known = self._redis.journaled_seq, _hex(self._redis.journaled_head)
            return (
                f"shard {self._shard}: the hash that Redis knows at seq {seq} is {known}, the journal's "
                f"is {_hex(self._head)}"
            )
        # While a shard is being recovered its checkpoint moves under the new owner's term.
        return self._checkpoint_place() if self._redis.journaled_seq and self._redis.decides else ""

    def _checkpoint_place(self) -> str:
        """What is wrong with where the checkpoint says that the journal goes on."""
        known, there = self._redis, self._at_checkpoint
        if there is None:
            return (
                f"shard {self._shard}: no record of the journal ends at offset {known.journaled_offset}, "
                "where Redis' checkpoint is"
            )
        said = {"seq": known.journaled_seq, "term": known.journaled_term, "owner": known.journaled_owner}
        wrong = [
            f"{name} is {is_}, the journal has {was}"
            for name, is_ in said.items()
            if (was := getattr(there, name)) != is_
        ]
        where = f"at offset {known.journaled_offset}"
        return f"shard {self._shard}, Redis' checkpoint: {', '.join(wrong)} {where}" if wrong else ""


def _hex(value: object) -> object:
    return f"{value.hex()[:16]}…" if isinstance(value, bytes) else value


# -- Redis ---------------------------------------------------------------------------------------------------


async def _redis_check(
    settings: Settings, redis: Any, reader: JournalReader, books: _Books, wait_seconds: float, report: Say,
    share: float
) -> Check:  # fmt: skip
    """Every key of every shard is what a recovery would make of the journal."""
    keys, problems, notes = 0, [], []
    for shard in range(settings.shards):
        if shard in books.broken:
            notes.append(f"shard {shard} is not compared: its journal is broken")
            continue
        if shard in books.ahead or shard in books.not_journaled:
            notes.append(
                f"shard {shard} is not compared: Redis and its journal do not stand at the same event"
            )
            continue
        seq, life = await redis.hmget(key_space(settings).shard(shard).state, ["seq", "life"])
        if seq is None and life is None:
            if books.ends[shard]:
                problems.append(
                    f"shard {shard}: Redis has nothing of it, its journal ends at seq {books.ends[shard]}"
                )
            continue
        report(f"comparing Redis: shard {shard} of {settings.shards}")
        try:
            compared = await _compare_shard(
                settings, redis, reader, shard, shard in books.trail_is_sound, wait_seconds, share
            )
            keys += compared.keys
            problems += compared.differences
        except NotComparable as error:
            problems.append(f"shard {shard}: {error}")
        except (NoRoom, NewerProgram, SteppedDown) as error:
            problems.append(f"not compared: {error} (--quick leaves this out)")
        except (CannotOpen, BadSettings) as error:
            problems.append(f"shard {shard} is not compared: {error} (--quick leaves this out)")
        except (Impossible, msgspec.DecodeError) as error:
            aside = [one for one in books.aside if one.shard == shard and one.event_count]
            if aside:
                notes.append(f"shard {shard} is not compared: events of it were set aside ({error})")
            else:
                problems.append(f"shard {shard}: what the journal says does not follow from itself: {error}")
    return Check("Redis = fold of the journal", keys, "keys", problems, notes)


async def _compare_shard(
    settings: Settings, redis: Any, reader: JournalReader, shard: int, trail_is_sound: bool,
    wait_seconds: float, share: float
) -> Any:  # fmt: skip
    settings.require_seal_keys()
    deadline = time.monotonic() + wait_seconds
    trail = snapshots(settings, slowly=True) if trail_is_sound else None
    async with open_beside(
        redis,
        key_space(settings),
        shard,
        sealer(settings),
        reader,
        trail,
        pace=Pace(share),
        room=_room_of(redis),
        wait_seconds=wait_seconds,
    ) as beside:
        await beside.make()
        while True:
            try:
                return await beside.compare()
            except NotComparable:
                # A shard that is being taken over at this very moment is soon whole again.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_SECONDS)


def compares_keys(settings: Settings, redis: Any) -> Callable[[int, float], Awaitable[list[str] | None]]:
    """For the verifier: what of a shard in Redis is not what its journal makes of it, at a share of the time;
    None: not to be told now.
    """

    async def compare(shard: int, share: float) -> list[str] | None:
        if await redis.hget(key_space(settings).shard(shard).state, "life") is None:
            return None
        try:
            # Of what has retired nothing is made again; what differs so is looked at once more, and then the
            # journal alone is believed.
            for trail in (snapshots(settings, slowly=True), None):
                async with (
                    open_reader(settings.kafka, Topics(settings.prefix).journal) as reader,
                    open_beside(
                        redis, key_space(settings), shard, sealer(settings), reader, trail, pace=Pace(share),
                        room=_room_of(redis),
                        place=BESIDE_STEADILY,
                    ) as beside,
                ):  # fmt: skip
                    await beside.make()
                    found = (await beside.compare()).differences
                if not found:
                    return []
        except (
            NotComparable,
            NoRoom,
            NewerProgram,
            SteppedDown,
            Impossible,
            CannotOpen,
            msgspec.DecodeError,
        ) as error:
            log.info("shard %d is not compared key by key: %s", shard, error)
            return None
        return found

    return compare


def _room_of(redis: Any) -> Callable[[str], Any]:
    async def room(key: str) -> str:
        """Why the server of a key should not be given more to keep; '' while it may."""
        try:
            [(server, memory)] = (await information(redis, "memory", key)).items()
        except RedisError:
            return ""
        most, share = int(memory.get("maxmemory", 0)), ROOM_SHARE
        if not most:
            most, share = int(memory.get("total_system_memory", 0)), ROOM_SHARE_OF_MACHINE
        if most and int(memory["used_memory"]) > share * most:
            return f"{server or 'Redis'} has {int(memory['used_memory']):,} of {most:,} bytes in use"
        return ""

    return room
