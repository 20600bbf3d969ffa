"""Taking a shard over (docs/protocol.md):

1. raise the term
2. append a marker
3. read the partition up to the marker: the records that count there are the truth
4. make Redis equal to the truth, or ahead of it

Step 4 has four outcomes. Equal or ahead: continue. Lagging: apply the missing events. Another history, or a
hole: rebuild, and list the decisions of Redis beyond the journal. A journal that has lost acknowledged
events: stay fenced, and state the fix. The order of these steps is the protocol; change it only together with
tests/protocol/model.py.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from grabstream.crypto.sealing import CannotOpen
from grabstream.models.journal import Accepted, Corrupt, Cursor, Gap, chain, is_signed_owner, marker_headers
from grabstream.streams.journal import JournalReader
from grabstream.streams.journal_keys import journal_keys, lacking
from grabstream.streams.relaying.ownership import (
    DamagedState,
    NotReconciled,
    OwnedShard,
    Ownership,
    Raised,
    SteppedDown,
)
from grabstream.streams.relaying.recovery import Impossible, Position, Recovery

log = logging.getLogger(__name__)

#: The number of journal records that a snapshot must save to be used instead of the shard's checkpoint.
SNAPSHOT_WORTH_RECORDS: Final = 2_000
RAISES_MAX: Final = 3
#: Part of the fault of a shard whose journal has to be restored.
JOURNAL_LOST: Final = "it has lost events"
#: The fault of a relay without a key: readers would ignore its records. How long a takeover waits for the
#: keys that relays sign with.
KEYS_SECONDS_MAX: Final = 10.0
NO_KEY: Final = (
    "the shard's records are signed, and this worker has no key to sign with: set GRAB_JOURNAL_KEYS, or run "
    "it without relays"
)
#: The beginning of the fault of a shard that cannot be rebuilt from its journal.
CANNOT_BE_REBUILT: Final = "the shard cannot be rebuilt from the journal"

Send = Callable[[bytes, list[tuple[str, bytes]]], Awaitable[int]]
Drain = Callable[[Ownership, Cursor], Awaitable[Cursor]]


class Truth(NamedTuple):
    """The journal up to the marker of this takeover: where reading began, the cursor at its end, and the hash
    at every seq that Redis may have, from its checkpoint.
    """

    base: Cursor
    cursor: Cursor
    hashes: dict[int, bytes]


class _NotTheJournal(Exception):
    """The record before a cursor does not match the cursor."""


class Takeover:
    """Takes one shard over.

    `send` appends a record to the shard's partition and returns its offset. `drain` journals the events in
    the outbox after a cursor, and returns the cursor after them.
    """

    def __init__(
        self, shard: OwnedShard, shards: int, reader: JournalReader, send: Send, drain: Drain,
        recovery: Recovery
    ) -> None:  # fmt: skip
        self._shard = shard
        self._shards = shards
        self._reader = reader
        self._send = send
        self._drain = drain
        self._recovery = recovery
        self._signs = journal_keys().signer is not None
        #: Whether the keys that relays sign with could not be read.
        self.keys_unread = False
        #: Whether an owner signs in what was read.
        self._met_signatures = False

    async def run(self) -> tuple[Ownership, Cursor]:
        """Reconciles Redis; returns the ownership and the cursor at the journal's end.

        Raises SteppedDown, NewerProgram, NotReconciled, and what Redis and Kafka raise.
        """
        if not self._signs and await self._shard.is_signed():
            # Before the term is raised: the relay that signs keeps the shard.
            raise NotReconciled(NO_KEY)
        await self._require_keys()
        raised, marker = await self._raise(0)
        try:
            checkpoint = await self._shard.checkpoint(raised.ownership)
        except DamagedState as error:
            await self._shard.fence(raised.ownership, str(error))
            raise
        base = await self._base(raised, checkpoint)
        truth = await self._read_truth(base, checkpoint, marker, raised)
        if self._met_signatures and not self._signs:
            raise NotReconciled(NO_KEY)
        for _ in range(RAISES_MAX):
            if truth.cursor[3:] == raised.ownership[:2]:
                break
            # A server that was emptied has no terms: raise above the highest term read.
            before = raised.ownership
            raised, marker = await self._raise(truth.cursor.term)
            if raised.ownership.server_epoch != before.server_epoch:
                raise SteppedDown("another server answered: the data read before is from a different server")
            truth = await self._read_on(truth, marker, raised)
            if self._met_signatures and not self._signs:
                raise NotReconciled(NO_KEY)
        else:
            raise SteppedDown(
                f"the marker of term {raised.ownership.term} does not count, term {truth.cursor.term} is in "
                "the journal"
            )
        if truth.cursor.seq < checkpoint.seq:
            raise await self._stay_fenced(
                raised.ownership,
                f"ends at seq {truth.cursor.seq}, but events up to seq {checkpoint.seq} were acknowledged",
            )
        ownership = raised.ownership
        cursor = await self._reconcile(
            raised, truth, checkpoint, distrusted=base != checkpoint or raised.form == "partial"
        )
        await self._shard.trim(ownership, cursor)
        return ownership, cursor

    async def rebuild(self, ownership: Ownership, cursor: Cursor, reason: str) -> Cursor:
        """Rebuilds a shard that was taken over, whatever its state in Redis, after all its events are
        journaled. Returns the cursor at the journal's end.
        """
        await self._shard.fence(ownership, reason)
        cursor = await self._drain(ownership, cursor)
        await self._rebuild(ownership, cursor, Position("other", cursor.seq, reason))
        await self._shard.trim(ownership, cursor)
        return cursor

    async def _require_keys(self) -> None:
        """Raises NotReconciled, before the term is raised, when this process lacks a key that relays sign
        with: events that were acknowledged would not count. Where the keys cannot be read, Redis has to have
        what the last owner acknowledged; else this raises the error.
        """
        if not journal_keys().public:
            return
        try:
            # A hanging PostgreSQL must not stop a shard that Redis knows.
            async with asyncio.timeout(KEYS_SECONDS_MAX):
                recorded = await self._recovery.recorded_keys()
        except OSError as error:
            if not await self._shard.is_signed():
                raise
            why = str(error) or "PostgreSQL does not answer"
            log.warning("shard %d: the keys of relays cannot be read: %s", self._shard.keys.shard, why)
            self.keys_unread = True
            return
        if why := lacking(journal_keys(), recorded):
            raise NotReconciled(why)

    async def _raise(self, floor: int) -> tuple[Raised, int]:
        raised = await self._shard.raise_term(floor, self._signs)
        ownership = raised.ownership
        return raised, await self._send(
            b"", marker_headers(self._shard.keys.shard, ownership.term, ownership.owner)
        )

    async def _stay_fenced(self, ownership: Ownership, what: str) -> NotReconciled:
        way_out = (
            "put the topic back, or restore it with `grabstream rebuild journal --from audit --new-journal`"
        )
        reason = f"the journal {what}: {JOURNAL_LOST}; {way_out}"
        await self._shard.fence(ownership, reason)
        return NotReconciled(reason)

    # -- the truth -------------------------------------------------------------------------------------------

    async def _base(self, raised: Raised, checkpoint: Cursor) -> Cursor:
        """Where to read from: the checkpoint, or the newest snapshot if the state of Redis is not worth
        comparing.
        """
        if raised.alive:
            return checkpoint
        snapshot = await self._recovery.newest_snapshot()
        has_nothing = raised.seq == 0 or raised.form == "partial"
        worth_records = 0 if has_nothing else SNAPSHOT_WORTH_RECORDS
        saved_records = snapshot.next_offset - checkpoint.next_offset
        return snapshot if snapshot.seq and saved_records > worth_records else checkpoint

    async def _read_truth(self, base: Cursor, checkpoint: Cursor, marker: int, raised: Raised) -> Truth:
        """Reads the partition from the base up to the marker of this takeover; all of it if the base does not
        match the partition.
        """
        try:
            await self._check_base(base, marker, base == checkpoint)
            return await self._read_on(
                Truth(base, base, {base.seq: base.head}), marker, raised, checkpoint.seq
            )
        except (_NotTheJournal, Corrupt, Gap) as error:
            if base == Cursor():
                raise await self._stay_fenced(raised.ownership, f"contradicts itself ({error})") from None
            log.warning("shard %d: %s; reading the journal from its beginning", self._shard.keys.shard, error)
        truth = await self._read_truth(Cursor(), checkpoint, marker, raised)
        if truth.cursor.seq < base.seq:
            raise await self._stay_fenced(
                raised.ownership, f"ends at seq {truth.cursor.seq}, but it contained seq {base.seq}"
            )
        return truth

    async def _check_base(self, base: Cursor, marker: int, is_checkpoint: bool) -> None:
        """Raises _NotTheJournal if the record before the base does not match it.

        The record before a checkpoint is of its term and owner, unless a recovery was interrupted after a
        record that does not count, or was one of a former release, whose checkpoints within earlier terms are
        wrong.
        """
        before = base.next_offset - 1
        if before < 0:
            return
        if before > marker:
            raise _NotTheJournal(f"journal offset {before} was read before, but the journal ends at {marker}")
        async with aclosing(self._reader.read(self._shard.keys.shard, before, before + 1)) as reading:
            async for [record] in reading:
                block = self._reader.block(record)
                has_base_owner = (block.term, block.owner) == base[3:]
                if has_base_owner and block.authority == "forged" and is_signed_owner(base.owner):
                    # Which record this is, Redis says, not a stranger. What follows it may be acknowledged.
                    raise NotReconciled(
                        f"journal offset {before}, which an earlier owner wrote, does not count here: "
                        f"{block.fault}; complete GRAB_JOURNAL_PUBLIC_KEYS of this worker"
                    )
                if block.count and has_base_owner and block.head != base.head and not base.ignores(block):
                    raise _NotTheJournal(f"journal offset {before} contains another block than before")
                if is_checkpoint and not has_base_owner:
                    raise _NotTheJournal(f"journal offset {before} is of another owner than the checkpoint")

    async def _read_on(self, truth: Truth, marker: int, raised: Raised, keep_from: int = 0) -> Truth:
        cursor, hashes = truth.cursor, truth.hashes
        async with aclosing(self._accepted(cursor, marker)) as reading:
            async for after, accepted in reading:
                cursor = after
                # A server that decides nothing has no events beyond its seq to compare.
                hashes.update(
                    (event.seq, event.hash)
                    for event in accepted
                    if event.seq >= keep_from and (raised.alive or event.seq <= raised.seq)
                )
        return truth._replace(cursor=cursor)

    async def _accepted(
        self, cursor: Cursor, marker: int
    ) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        """The events that count from a cursor up to a marker, with the cursor after them."""
        async with aclosing(
            self._reader.read(self._shard.keys.shard, cursor.next_offset, marker + 1)
        ) as reading:
            async for records in reading:
                for record in records:
                    block = self._reader.block(record)
                    cursor, accepted = cursor.feed(record.offset, block)
                    self._met_signatures |= is_signed_owner(cursor.owner)
                    yield cursor, accepted

    # -- comparing Redis with it -----------------------------------------------------------------------------

    async def _reconcile(self, raised: Raised, truth: Truth, checkpoint: Cursor, distrusted: bool) -> Cursor:
        ownership = raised.ownership
        outdated = raised.form == "outdated"
        if raised.alive and not (outdated or distrusted):
            position = await self._compare(ownership, truth, checkpoint)
            if position.kind == "ahead" and not position.problem:
                return truth.cursor
        await self._shard.fence(ownership, "the shard is being reconciled with the journal")
        # Nothing is decided any more, so the result of this comparison stays valid.
        position = await self._compare(ownership, truth, checkpoint, distrusted)
        if position.kind == "ahead" and (outdated or position.problem):
            reason = position.problem or "the keys of the shard have an older layout"
            return await self.rebuild(ownership, truth.cursor, reason)
        if position.kind == "ahead":
            await self._finish(ownership, position.seq)
        elif (
            position.kind != "behind"
            or outdated
            # A shard without a seq names no layout, and keys that it may have are of no known history.
            or not raised.seq
            or not await self._caught_up(ownership, truth, position)
        ):
            await self._rebuild(ownership, truth.cursor, position)
        return truth.cursor

    async def _caught_up(self, ownership: Ownership, truth: Truth, position: Position) -> bool:
        """Applies the missing events. Returns False if a seed among them needs a key that is not set: a
        rebuild then checks whether the seed was revealed.
        """
        missing = self._accepted(truth.base, truth.cursor.next_offset - 1)
        try:
            await self._recovered(ownership, self._recovery.catch_up(ownership, position, missing))
        except CannotOpen as error:
            log.warning("shard %d: %s; rebuilding it", self._shard.keys.shard, error)
            return False
        await self._finish(ownership, truth.cursor.seq)
        return True

    async def _rebuild(self, ownership: Ownership, cursor: Cursor, position: Position) -> None:
        rebuilding = self._recovery.rebuild(
            ownership,
            position,
            lambda base: self._accepted(base, cursor.next_offset - 1),
        )
        try:
            await self._recovered(ownership, rebuilding)
        except CannotOpen as error:
            raise await self._cannot_be_rebuilt(ownership, error) from None
        await self._finish(ownership, cursor.seq)

    async def _recovered(self, ownership: Ownership, recovering: Awaitable[None]) -> None:
        """Awaits a recovery; fences the shard if the events do not follow from each other."""
        try:
            await recovering
        except Impossible as error:
            raise await self._cannot_be_rebuilt(ownership, error) from None

    async def _cannot_be_rebuilt(self, ownership: Ownership, error: Exception) -> NotReconciled:
        """Fences the shard with an error that trying again does not repair."""
        reason = f"{CANNOT_BE_REBUILT}: {error}"
        await self._shard.fence(ownership, reason)
        return NotReconciled(reason)

    async def _finish(self, ownership: Ownership, seq: int) -> None:
        """Lets the shard decide again."""
        await self._shard.run("reconcile", [self._shard.keys.state], ownership, seq, self._shards)

    async def _compare(
        self, ownership: Ownership, truth: Truth, checkpoint: Cursor, distrusted: bool = False
    ) -> Position:
        """Chains the outbox from the checkpoint: up to the end of the journal, every hash must be the
        journal's.
        """
        seq, head, tail = checkpoint.seq, checkpoint.head, truth.cursor.seq
        different = None if distrusted or truth.hashes.get(seq) == head else seq
        lost: list[bytes] = []
        while True:
            outbox = await self._shard.read_outbox(ownership, seq)
            shard_seq, lines, incomplete = outbox.seq, outbox.lines, outbox.fault == "incomplete"
            if not lines:
                break
            texts = [text for text, _ in lines]
            for (text, seqs), hash_ in zip(lines, chain(head, texts), strict=True):
                before, seq, head = seq, seq + seqs, hash_
                # Lines that begin in the journal end there: no journal has a part of a run.
                if different is None and not distrusted and before < tail and truth.hashes.get(seq) != head:
                    different = seq
                if different is not None or seq > tail:
                    lost.append(text)
        if distrusted:
            # Events beyond the journal are lost as well.
            problem = (
                "Redis has no data of the shard"
                if not shard_seq
                else f"Redis is incomplete at seq {shard_seq} of {tail}"
                if incomplete
                else f"Redis is at seq {shard_seq} of {tail}, too far back to continue from"
            )
            return Position("other", shard_seq, problem, lost)
        if different is not None:
            return Position(
                "other", shard_seq, f"Redis has another history than the journal at seq {different}", lost
            )
        if seq != shard_seq:
            return Position(
                "other", shard_seq, f"Redis is at seq {shard_seq}, its outbox ends at {seq}: a hole", lost
            )
        if seq < tail:
            return Position("behind", seq, f"Redis lags behind the journal: seq {seq} of {tail}")
        if outbox.has_hole:
            return Position("ahead", seq, f"the outbox has an entry after seq {seq} that no script writes")
        return Position("ahead", seq)
