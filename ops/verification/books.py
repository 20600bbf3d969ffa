"""The journal read once, chained, and compared with the read models as they are at one snapshot."""

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any

import msgspec
from psycopg import AsyncConnection

from grabstream.models.events import AnyEvent, decode_event
from grabstream.models.journal import GENESIS, Accepted, Corrupt, Cursor, Gap, parse_block
from grabstream.models.transfers import GUARDED_ACCOUNTS, transfers_of
from grabstream.ops.settings import Settings
from grabstream.ops.verification.audit_trail import AuditTrail, Lacks
from grabstream.ops.verification.checks import PROGRESS_SECONDS, Check, Problems, RedisShard, Say, flattened
from grabstream.ops.verification.places import Marks
from grabstream.projections.checking.rebuilt import REBUILT, RebuiltModels
from grabstream.projections.cursors import Fact, load
from grabstream.projections.database.migrate import PROJECTIONS
from grabstream.projections.records import set_aside
from grabstream.projections.records.set_aside import SetAside
from grabstream.streams.journal import JournalReader, Record

log = logging.getLogger(__name__)


class Books:
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
        self._anew = RebuiltModels(connection, settings.schema_)
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
        self._lacks = {name: Lacks(self.aside, name) for name in PROJECTIONS}
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
            *[await self._compared(name) for name in REBUILT],
            await self._solvent(),
            await self._agree(),
            Check("views show the read models", *flattened(*await self._anew.views(), "views")),
            Check(
                "what Redis knows as journaled is", len(self.shards), "checkpoints", self._checkpoints.lines
            ),
        ]

    async def _shard(self, shard: int) -> None:
        """Reads one shard's journal to its end."""
        audit = AuditTrail(self._connection, shard, self._positions["audit"][shard].seq, self._audit)
        marks = Marks(shard, self._of(shard), self.shards[shard])
        cursor, folded = Cursor(), Accepted(0, b"", GENESIS)
        async with aclosing(audit.rows):
            try:
                async with aclosing(self._records(shard)) as records:
                    async for offset, cursor, accepted in records:
                        marks.after(offset, cursor, accepted)
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
        past = {one.journal_offset: one.after for one in self.aside if one.shard == shard}
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
        self, shard: int, one: Accepted, event: AnyEvent | msgspec.DecodeError, audit: "AuditTrail"
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
        for name in REBUILT:
            if name not in lacking and one.seq <= self._positions[name][shard].seq:
                fact = fact if fact.transfers else fact._replace(transfers=transfers_of(event))
                await self._anew.take(name, fact)

    async def _rest_of_trail(self, shard: int, folded: Accepted, audit: "AuditTrail") -> None:
        """Behind a break of the journal: the audit trail goes on for as long as it follows from what stands
        before.
        """
        wanted = max(cursors[shard].seq for name, cursors in self._positions.items() if name in REBUILT)
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
        return Check(title, *flattened(*await self._anew.differences(name), "rows"))

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
        gaps = any(one.event_count and one.projection in REBUILT for one in self.aside)
        if self._unmade(*REBUILT) or self._anew.refused or gaps or not abreast:
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
