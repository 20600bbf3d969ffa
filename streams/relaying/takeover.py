"""Taking a shard over (docs/protocol.md): 1. raise the term · 2. append a marker · 3. read the partition up
to it: what counts there is the truth · 4. make Redis equal to it, or ahead of it.

Step 4 has four outcomes. Equal or ahead: go on. Behind: apply what is missing. Another history, or a hole:
rebuild, and list what Redis had decided beyond it. A journal that has lost what was acknowledged: stay
fenced, and say how it is put right. The order of these steps is the protocol; change it only together with
tests/protocol/model.py.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from grabstream.lua.gate.sealing import CannotOpen
from grabstream.models.journal import Accepted, Corrupt, Cursor, Gap, chain, marker_headers, parse_block
from grabstream.streams.journal import JournalReader
from grabstream.streams.relaying.ownership import NotReconciled, OwnedShard, Ownership, Raised, SteppedDown
from grabstream.streams.relaying.recovery import Impossible, Position, Recovery

log = logging.getLogger(__name__)

#: Journal records that a snapshot must save before the shard's own checkpoint is given up for it.
SNAPSHOT_WORTH_RECORDS: Final = 2_000
RAISES_MAX: Final = 3
#: In the fault of a shard whose journal has to be restored …
JOURNAL_LOST: Final = "it has lost events"
#: … and at the beginning of that of a shard which its journal does not lead to.
CANNOT_BE_MADE: Final = "the shard cannot be made of the journal"

Send = Callable[[bytes, list[tuple[str, bytes]]], Awaitable[int]]
Drain = Callable[[Ownership, Cursor], Awaitable[Cursor]]


class Truth(NamedTuple):
    """What the journal says up to the own marker: where reading began, the cursor behind it, and the hash at
    every seq that Redis may have, from its checkpoint on.
    """

    base: Cursor
    cursor: Cursor
    hashes: dict[int, bytes]


class _NotTheJournal(Exception):
    """The record before a cursor is not the one that the cursor tells of."""


class Takeover:
    """Takes one shard over.

    `send` appends a record to the shard's partition and returns its offset; `drain` journals what the outbox
    holds behind a cursor and returns the cursor behind it.
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

    async def run(self) -> tuple[Ownership, Cursor]:
        """Returns the ownership and the cursor of the journal, with Redis reconciled.

        Raises SteppedDown, NewerProgram, NotReconciled, and what Redis and Kafka raise.
        """
        raised, marker = await self._raise(0)
        checkpoint = await self._shard.checkpoint()
        base = await self._base(raised, checkpoint)
        truth = await self._read_truth(base, checkpoint, marker, raised)
        for _ in range(RAISES_MAX):
            if truth.cursor[3:] == raised.ownership[:2]:
                break
            # A server that was emptied knows no terms: above the highest one read.
            raised, marker = await self._raise(truth.cursor.term)
            truth = await self._read_on(truth, marker, raised)
        else:
            raise SteppedDown(
                f"the marker of term {raised.ownership.term} does not count, term {truth.cursor.term} is in "
                "the journal"
            )
        if truth.cursor.seq < checkpoint.seq:
            raise await self._stay_fenced(
                raised.ownership, f"ends at seq {truth.cursor.seq}, {checkpoint.seq} were acknowledged"
            )
        own = raised.ownership
        cursor = await self._reconcile(
            raised, truth, checkpoint, distrusted=base != checkpoint or raised.form == "partial"
        )
        await self._shard.trim(own, cursor)
        return own, cursor

    async def rebuild(self, own: Ownership, cursor: Cursor, reason: str) -> Cursor:
        """Rebuilds a shard that was taken over, whatever Redis has of it, once all of that is journaled;
        returns the cursor behind it.
        """
        await self._shard.fence(own, reason)
        cursor = await self._drain(own, cursor)
        await self._rebuild(own, cursor, Position("other", cursor.seq, reason))
        await self._shard.trim(own, cursor)
        return cursor

    async def _raise(self, floor: int) -> tuple[Raised, int]:
        raised = await self._shard.raise_term(floor)
        own = raised.ownership
        return raised, await self._send(b"", marker_headers(self._shard.keys.shard, own.term, own.owner))

    async def _stay_fenced(self, own: Ownership, what: str) -> NotReconciled:
        way_out = "put it back, or restore it with `grabstream rebuild journal --from audit --new-journal`"
        reason = f"the journal {what}: {JOURNAL_LOST}; {way_out}"
        await self._shard.fence(own, reason)
        return NotReconciled(reason)

    # -- the truth -------------------------------------------------------------------------------------------

    async def _base(self, raised: Raised, checkpoint: Cursor) -> Cursor:
        """Where to read from: the checkpoint, or the newest snapshot where what Redis has is not worth
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
        """Reads the partition from the base up to the own marker; all of it when the base is not found in
        it.
        """
        try:
            await self._check_base(base, marker)
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
                raised.ownership, f"ends at seq {truth.cursor.seq}, but {base.seq} were in it"
            )
        return truth

    async def _check_base(self, base: Cursor, marker: int) -> None:
        """The record before the base must be the one that the base tells of."""
        before = base.next_offset - 1
        if before < 0:
            return
        if before > marker:
            raise _NotTheJournal(f"journal offset {before} was known, the journal ends at {marker}")
        async with aclosing(self._reader.read(self._shard.keys.shard, before, before + 1)) as reading:
            async for [record] in reading:
                block = parse_block(record.headers, record.value)
                if block.count and (block.term, block.owner) == base[3:] and block.head != base.head:
                    raise _NotTheJournal(f"journal offset {before} is not what was known of it")

    async def _read_on(self, truth: Truth, marker: int, raised: Raised, keep_from: int = 0) -> Truth:
        cursor, hashes = truth.cursor, truth.hashes
        async with aclosing(self._accepted(cursor, marker)) as reading:
            async for after, accepted in reading:
                cursor = after
                # Of a server that decides nothing, what is beyond its seq is never compared.
                hashes.update(
                    (one.seq, one.hash)
                    for one in accepted
                    if one.seq >= keep_from and (raised.alive or one.seq <= raised.seq)
                )
        return truth._replace(cursor=cursor)

    async def _accepted(
        self, cursor: Cursor, marker: int
    ) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        """The events that count from a cursor up to a marker, with the cursor behind them."""
        async with aclosing(
            self._reader.read(self._shard.keys.shard, cursor.next_offset, marker + 1)
        ) as reading:
            async for records in reading:
                for record in records:
                    cursor, accepted = cursor.feed(record.offset, parse_block(record.headers, record.value))
                    yield cursor, accepted

    # -- Redis against it ------------------------------------------------------------------------------------

    async def _reconcile(self, raised: Raised, truth: Truth, checkpoint: Cursor, distrusted: bool) -> Cursor:
        own = raised.ownership
        outdated = raised.form == "outdated"
        if (
            raised.alive
            and not (outdated or distrusted)
            and (await self._compare(own, truth, checkpoint)).kind == "ahead"
        ):
            return truth.cursor
        await self._shard.fence(own, "the shard is being reconciled with the journal")
        # Nothing is decided any more: what is compared now stays so.
        position = await self._compare(own, truth, checkpoint, distrusted)
        if position.kind == "ahead" and outdated:
            return await self.rebuild(own, truth.cursor, "the keys of the shard have an older layout")
        if position.kind == "ahead":
            await self._finish(own, position.seq)
        elif position.kind != "behind" or outdated or not await self._caught_up(own, truth, position):
            await self._rebuild(own, truth.cursor, position)
        return truth.cursor

    async def _caught_up(self, own: Ownership, truth: Truth, position: Position) -> bool:
        """Applies what is missing. False: a seed in it needs a key that is not there; who rebuilds looks
        whether it was revealed.
        """
        missing = self._accepted(truth.base, truth.cursor.next_offset - 1)
        try:
            await self._recovered(own, self._recovery.catch_up(own, position, missing))
        except CannotOpen as error:
            log.warning("shard %d: %s; rebuilding it", self._shard.keys.shard, error)
            return False
        await self._finish(own, truth.cursor.seq)
        return True

    async def _rebuild(self, own: Ownership, cursor: Cursor, position: Position) -> None:
        rebuilding = self._recovery.rebuild(
            own, position, lambda base: self._accepted(base, cursor.next_offset - 1)
        )
        try:
            await self._recovered(own, rebuilding)
        except CannotOpen as error:
            raise await self._cannot_be_made(own, error) from None
        await self._finish(own, cursor.seq)

    async def _recovered(self, own: Ownership, recovering: Awaitable[None]) -> None:
        """Awaits a recovery; events that do not follow from each other are the shard's fault, in words."""
        try:
            await recovering
        except Impossible as error:
            raise await self._cannot_be_made(own, error) from None

    async def _cannot_be_made(self, own: Ownership, error: Exception) -> NotReconciled:
        """Of what nobody can mend by trying again."""
        reason = f"{CANNOT_BE_MADE}: {error}"
        await self._shard.fence(own, reason)
        return NotReconciled(reason)

    async def _finish(self, own: Ownership, seq: int) -> None:
        await self._shard.run("reconcile", [self._shard.keys.state], own, seq, self._shards)

    async def _compare(
        self, own: Ownership, truth: Truth, checkpoint: Cursor, distrusted: bool = False
    ) -> Position:
        """Chains the outbox from the checkpoint: every hash up to the journal's tail must be the
        journal's.
        """
        seq, head, tail = checkpoint.seq, checkpoint.head, truth.cursor.seq
        different = None if distrusted or truth.hashes.get(seq) == head else seq
        lost: list[bytes] = []
        while True:
            shard_seq, lines, incomplete = await self._shard.read_outbox(own, seq)
            if not lines:
                break
            for line, hash_ in zip(lines, chain(head, lines), strict=True):
                seq, head = seq + 1, hash_
                if different is None and not distrusted and seq <= tail and truth.hashes.get(seq) != head:
                    different = seq
                if different is not None or seq > tail:
                    lost.append(line)
        if distrusted:
            # What it has beyond the journal goes too.
            problem = (
                "Redis has nothing of the shard"
                if not shard_seq
                else f"Redis is incomplete at seq {shard_seq} of {tail}"
                if incomplete
                else f"Redis is at seq {shard_seq} of {tail}, too far back to be gone on from"
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
            return Position("behind", seq, f"Redis is behind the journal: seq {seq} of {tail}")
        return Position("ahead", seq)
