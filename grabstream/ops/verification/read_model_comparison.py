"""Reads the journal once, checks its chain, and compares it with one snapshot of the read models."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from psycopg import AsyncConnection

from grabstream.models.bounds import counted
from grabstream.models.journal import GENESIS, Accepted, Corrupt, Cursor, Gap
from grabstream.models.runs import decode_line
from grabstream.models.transfers import GUARDED_ACCOUNTS, transfers_of
from grabstream.ops.verification.audit_trail import AuditTrail
from grabstream.ops.verification.checkpoints import Against
from grabstream.ops.verification.checks import Problems, RedisShard, VerificationCheck, VerificationProgress
from grabstream.ops.verification.journal_positions import PositionChecks
from grabstream.ops.verification.signatures import Signatures
from grabstream.projections.checking.rebuilt import REBUILT, RebuiltModels
from grabstream.projections.cursors import Fact, load
from grabstream.projections.database.migrate import PROJECTIONS
from grabstream.projections.tables import set_aside
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.settings import Settings
from grabstream.streams.history.archive import Archive
from grabstream.streams.history.archive_source import archived_chunks
from grabstream.streams.history.sources import AuditSource, Start
from grabstream.streams.journal import JournalReader, JournalRecord

log = logging.getLogger(__name__)


class ReadModelComparison:
    """Compares the journal with PostgreSQL, in one transaction. The attributes about shards are complete
    after `checks`.
    """

    def __init__(
        self, connection: AsyncConnection[Any], reader: JournalReader, settings: Settings,
        shards: Mapping[int, RedisShard], report: VerificationProgress, against: Against | None = None,
        archive: Archive | None = None,
    ) -> None:  # fmt: skip
        self._connection = connection
        self._archive = archive
        self._reader = reader
        self._settings = settings
        self.shards = shards
        self._report = report
        self._rebuilt = RebuiltModels(connection, settings.schema_)
        self._chain, self._audit, self._cursors, self._checkpoints = (Problems() for _ in range(4))
        self._signatures = Signatures()
        self._against = against
        self._events = self._audited = 0
        self.aside: Sequence[SetAsideRecord] = ()
        #: Shards whose journal is broken.
        self.broken: set[int] = set()
        #: Shard → why not all of its events could be applied.
        self.unfolded: dict[int, str] = {}
        #: (projection, shard) of cursors that differ from the journal: up to which event their rows should be
        #: computed is unknown.
        self.wrong_cursors: set[tuple[str, int]] = set()
        #: Shards with events in Redis that are not in the journal.
        self.not_journaled: set[int] = set()
        #: The last seq of each shard's journal.
        self.ends: dict[int, int] = {}
        #: Shards of which Redis counts events as journaled that are not in the journal.
        self.ahead: set[int] = set()
        #: Shards whose audit trail equals the journal, byte for byte.
        self.trail_is_sound: set[int] = set()

    async def checks(self) -> list[VerificationCheck]:
        """Reads the journal, and returns all checks of the read models."""
        self._positions = {name: await load(self._connection, name) for name in PROJECTIONS}
        self.aside = await set_aside.load(self._connection)
        self._set_aside = {
            name: [record for record in self.aside if record.projection == name] for name in PROJECTIONS
        }
        await self._rebuilt.begin()
        for shard in range(self._settings.shards):
            await self._shard(shard)
        await self._unknown_shards()
        self._report("computing the read models from the journal")
        await self._rebuilt.finish()
        self._report("comparing the read models")
        cursors, checkpoints = len(PROJECTIONS) * self._settings.shards, len(self.shards)
        return [
            VerificationCheck("chain of every shard", self._events, "events", self._chain.lines),
            VerificationCheck("audit bytes = journal", self._audited, "events", self._audit.lines),
            VerificationCheck("cursors = journal", cursors, "cursors", self._cursors.lines),
            *self._signatures.checks(),
            *([self._against.check(self.ends)] if self._against is not None else ()),
            *[await self._compared(name) for name in REBUILT],
            await self._solvent(),
            await self._agree(),
            await self._views(),
            VerificationCheck(
                "what Redis counts as journaled is in the journal",
                checkpoints,
                "checkpoints",
                self._checkpoints.lines,
            ),
        ]

    async def _shard(self, shard: int) -> None:
        """Reads one shard's journal to its end."""
        audit = AuditTrail(self._connection, shard, self._positions["audit"][shard].seq, self._audit)
        positions = PositionChecks(shard, self._of(shard), self.shards[shard])
        cursor, last = Cursor(), Accepted(0, b"", GENESIS)
        async with aclosing(audit.rows):
            try:
                async with aclosing(self._records(shard)) as records:
                    async for offset, cursor, events, facts in records:
                        if offset is None:
                            positions.archived(cursor, events)
                        else:
                            positions.after(offset, cursor, events)
                        for accepted, fact in zip(events, facts, strict=True):
                            if self._against is not None:
                                self._against.take(shard, accepted.seq, accepted.hash)
                            await self._event(shard, accepted, fact, audit)
                            last = accepted
                        self._report_progress(cursor.seq)
                self._require_end(shard, cursor)
            except (Corrupt, Gap, msgspec.DecodeError) as error:
                self.broken.add(shard)
                self._chain.add(f"shard {shard}: {error}")
                await self._rest_of_trail(shard, last)
            else:
                await audit.end(self._set_aside["audit"])
        self.ends[shard] = cursor.seq
        for name, line in positions.cursor_problems(shard in self.broken):
            self.wrong_cursors.add((name, shard))
            self._cursors.add(line)
        if shard not in self.broken:
            if line := positions.checkpoint_problem(cursor):
                self.ahead.add(shard)
                self._checkpoints.add(line)
            elif self.shards[shard].seq > cursor.seq:
                self.not_journaled.add(shard)
        if audit.sound and shard not in self.broken and ("audit", shard) not in self.wrong_cursors:
            self.trail_is_sound.add(shard)
        self._audited += audit.compared

    def _require_end(self, shard: int, end: Cursor) -> None:
        """Raises Gap if read models have applied events that are after the end of the journal."""
        further = [
            name
            for name, cursor in self._of(shard).items()
            if cursor.next_offset > end.next_offset and cursor.seq > end.seq
        ]
        if further:
            raise Gap(
                f"the journal has lost its end: it ends at seq {end.seq}, but {' and '.join(further)} "
                "applied later events"
            )

    async def _unknown_shards(self) -> None:
        """Reports rows and cursors of shards that this system does not have."""
        count = self._settings.shards
        rows = await self._rows(
            "SELECT shard, count(*) FROM audit WHERE shard < 0 OR shard >= %s GROUP BY shard ORDER BY shard",
            count,
        )
        for shard, events in rows:
            self._audit.add(
                f"shard {shard}: the system has no such shard, but the audit trail has "
                f"{counted(events, 'rows')} of it"
            )
        for name, cursors in self._positions.items():
            for shard in sorted(cursors.keys() - set(range(count))):
                self._cursors.add(f"{name}, shard {shard}: it has a cursor, but the system has no such shard")

    def _of(self, shard: int) -> dict[str, Cursor]:
        """The cursors of one shard."""
        return {name: cursors[shard] for name, cursors in self._positions.items()}

    async def _records(
        self, shard: int
    ) -> AsyncGenerator[
        tuple[int | None, Cursor, Sequence[Accepted], Sequence[Fact | msgspec.DecodeError]], None
    ]:
        """Yields each record's offset, the cursor after it, its accepted events, and these decoded; first
        those of the archive, if there is one, without an offset. A corrupt record that operators have set
        aside is skipped.
        """
        past = {record.journal_offset: record.after for record in self.aside if record.shard == shard}
        cursor = Cursor()
        if self._archive is not None:
            async with aclosing(archived_chunks(self._archive, shard, cursor, (), self.aside)) as chunks:
                async for chunk in chunks:
                    if not chunk.facts:
                        undecoded = msgspec.DecodeError(f"seq {chunk.after.seq}: it cannot be decoded")
                        line = Accepted(chunk.after.seq, b"", chunk.after.head)
                        yield None, chunk.after, [line], [undecoded]
                        continue
                    yield (
                        None,
                        chunk.after,
                        [Accepted(fact.event.last_seq, fact.line, fact.hash) for fact in chunk.facts],
                        chunk.facts,
                    )
            cursor = self._archive.end(shard)
            if cursor.next_offset:
                yield cursor.next_offset - 1, cursor, (), ()
        offset, beginning = cursor.next_offset, await self._reader.beginning(shard)
        if beginning > offset:
            raise Gap(
                f"the journal begins at offset {beginning}: older records were deleted; --archive names an "
                "archive that has them"
            )
        end = await self._reader.end(shard)
        if end < offset:
            raise Gap(
                f"the journal has lost its end: it ends at offset {end}, and the archive has read it up to "
                f"offset {offset}"
            )
        async with aclosing(self._reader.read(shard, offset, end)) as lists:
            async for records in lists:
                for record in records:
                    try:
                        cursor, accepted = self._fed(cursor, record)
                    except Corrupt:
                        if record.offset not in past:
                            raise
                        cursor, accepted = past[record.offset], ()
                    yield record.offset, cursor, accepted, _decoded(accepted)

    def _fed(self, cursor: Cursor, record: JournalRecord) -> tuple[Cursor, Sequence[Accepted]]:
        """The cursor after a record, and its accepted events; raises Corrupt or Gap with the record's
        offset.
        """
        try:
            block = self._reader.block(record)
            if block.shard != record.shard and block.authority == "unchecked":
                raise Corrupt(f"a block of shard {block.shard} in partition {record.shard}")
            self._signatures.take(record, cursor, block)
            return cursor.feed(record.offset, block)
        except (Corrupt, Gap) as error:
            where = f"offset {record.offset}: "
            if str(error).startswith(where):
                raise
            raise type(error)(where + str(error)) from None

    async def _event(
        self, shard: int, accepted: Accepted, fact: Fact | msgspec.DecodeError, audit: AuditTrail
    ) -> None:
        if isinstance(fact, msgspec.DecodeError):
            self._events += 1
            if not all(self._lacks(name, shard, accepted.seq) for name in PROJECTIONS):
                raise fact
            return
        if not self._lacks("audit", shard, accepted.seq):
            await audit.compare(accepted, fact.event)
        await self._fold(shard, fact)

    def _lacks(self, name: str, shard: int, seq: int) -> bool:
        """Whether operators set an event aside for a read model."""
        return any(record.has(shard, seq) for record in self._set_aside[name])

    async def _fold(self, shard: int, fact: Fact) -> None:
        """Adds an event to the read models that have applied it."""
        seq = fact.event.last_seq
        self._events += fact.event.seqs
        for name in REBUILT:
            if seq <= self._positions[name][shard].seq and not self._lacks(name, shard, seq):
                await self._rebuilt.take(name, fact)

    async def _rest_of_trail(self, shard: int, last: Accepted) -> None:
        """Continues after a break of the journal with the rows of the audit trail, as long as they continue
        the chain of the last event that was read.
        """
        wanted = max(cursors[shard].seq for name, cursors in self._positions.items() if name in REBUILT)
        seq, trail = last.seq, AuditSource(self._connection)
        rest = Start(Cursor(seq, last.hash), await trail.end(shard))
        try:
            async with aclosing(trail.chunks(shard, rest)) as chunks:
                async for chunk in chunks:
                    for fact in chunk.facts:
                        await self._fold(shard, fact)
                    seq = chunk.after.seq
        except (Corrupt, Gap):
            pass  # what follows is of no history that the journal begins
        if seq < wanted:
            self.unfolded[shard] = (
                f"events of shard {shard} from seq {seq + 1} on are neither in the journal nor in an audit "
                "trail that continues its chain"
            )

    def _not_comparable(self, *names: str) -> list[str]:
        """Why these read models cannot be computed from the journal up to their cursors; empty when they
        can.
        """
        wrong_cursors = [
            f"the cursor of {name} in shard {shard} is wrong"
            for name, shard in sorted(self.wrong_cursors)
            if name in names
        ]
        return [*self.unfolded.values(), *wrong_cursors]

    async def _compared(self, name: str) -> VerificationCheck:
        title, notes = f"{name} = fold of the journal", self._not_comparable(name)
        if (other := self._rebuilt.other_definition(name)) is not None:
            notes.append(other)
        if notes:
            return VerificationCheck(title, 0, "rows", [], [f"not compared: {note}" for note in notes])
        if name in self._rebuilt.refused:
            return VerificationCheck(title, 0, "rows", [self._rebuilt.refused[name]])
        rows, differences = await self._rebuilt.differences(name)
        return VerificationCheck(title, rows, "rows", differences)

    async def _views(self) -> VerificationCheck:
        count, problems = await self._rebuilt.views()
        return VerificationCheck("views show the read models", count, "views", problems)

    async def _solvent(self) -> VerificationCheck:
        """Checks that no guarded account is below 0 by the journal."""
        name = "no account below 0"
        if self._not_comparable("ledger") or "ledger" in self._rebuilt.refused:
            notes = ["not checked: the ledger could not be computed from the journal"]
            return VerificationCheck(name, 0, "accounts", [], notes)
        below = await self._rows(
            "SELECT account, asset, posted FROM accounts_1 WHERE posted < 0 AND account LIKE ANY(%s) "
            "ORDER BY account, asset",
            [f"{start}%" for start in GUARDED_ACCOUNTS],
        )
        [(count,)] = await self._rows("SELECT count(*) FROM accounts_1")
        lines = [f"{account} {asset} is below 0: {posted}" for account, asset, posted in below]
        return VerificationCheck(name, count, "accounts", lines)

    async def _agree(self) -> VerificationCheck:
        """Checks that ledger and balances, computed from the journal in different ways, have the same sums.
        Only possible where both have applied the same events.
        """
        name = "ledger and balances agree"
        ledger, balances = self._positions["ledger"], self._positions["balances"]
        same_seqs = all(ledger[shard].seq == cursor.seq for shard, cursor in balances.items())
        gaps = any(record.event_count and record.projection in REBUILT for record in self.aside)
        if self._not_comparable(*REBUILT) or self._rebuilt.refused or gaps or not same_seqs:
            notes = ["not checked: ledger and balances have not applied the same events"]
            return VerificationCheck(name, 0, "accounts", [], notes)
        wallets = await self._rows(
            "WITH kept AS ("
            "SELECT 'wallet:' || user_id AS account, asset, available AS amount FROM balances_1 "
            "UNION ALL SELECT 'hold:' || user_id, asset, held FROM balances_1 "
            "UNION ALL SELECT 'offer:' || offer, asset, total - given - held - refunded FROM offers_1) "
            "SELECT account, asset, coalesce(a.posted, 0), coalesce(k.amount, 0) "
            "FROM accounts_1 AS a FULL JOIN kept AS k USING (account, asset) "
            "WHERE (a.account IS NULL OR account LIKE ANY(%s)) "
            "AND coalesce(a.posted, 0) <> coalesce(k.amount, 0) ORDER BY account, asset LIMIT 100",
            ["wallet:%", "hold:%", "offer:%"],
        )
        [(count,)] = await self._rows("SELECT count(*) FROM accounts_1")
        lines = [
            f"{account} {asset}: {posted} by the ledger, {amount} by the balances"
            for account, asset, posted, amount in wallets
        ]
        return VerificationCheck(name, count, "accounts", lines)

    async def _rows(self, query: str, *arguments: Any) -> list[Any]:
        return await (await self._connection.execute(query.encode(), arguments or None)).fetchall()

    def _report_progress(self, seq: int) -> None:
        """Reports how much of the journal is read, with the seq of the shard that is being read."""
        done = sum(self.ends.values()) + seq
        # A number of Redis may be damaged, or older than the journal.
        self._report("reading the journal", done, max(done, sum(of.seq for of in self.shards.values())))


def _decoded(events: Sequence[Accepted]) -> list[Fact | msgspec.DecodeError]:
    """Each event as a fact, or the error with its seq when it cannot be decoded."""
    decoded: list[Fact | msgspec.DecodeError] = []
    for accepted in events:
        try:
            event = decode_line(accepted.line)
            decoded.append(Fact(accepted.line, accepted.hash, event, transfers_of(event)))
        except msgspec.DecodeError as error:
            text = str(error)
            decoded.append(
                msgspec.DecodeError(text if text.startswith("seq ") else f"seq {accepted.seq}: {text}")
            )
    return decoded
