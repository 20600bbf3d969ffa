"""Recovery: computes a shard's state in Redis from the journal (docs/design.md), by applying the missing
events or all of them.

It need not read all of them, because the audit trail in PostgreSQL is a snapshot with a seq and a hash.
Retired offers need nothing, so a recovery reads the events of the campaigns that still exist, and the journal
after the trail's cursor. A shard that is being rebuilt is marked `partial` until it is complete; a recovery
that finds the mark starts again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Final, Literal, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from grabstream.crypto.sealing import CannotOpen, Sealer
from grabstream.gate.drawing import in_slices
from grabstream.gate.staging import pieces
from grabstream.lua.packed_values import demand_row
from grabstream.models.events import (
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferRetired,
)
from grabstream.models.identifiers import campaign_of, encoded_payment
from grabstream.models.journal import Accepted, Corrupt, Cursor, Gap
from grabstream.models.runs import AnyLine, decode_line, decode_lines
from grabstream.projections.checking.snapshots import KnownPayment, RetiredOffer
from grabstream.streams.relaying import apply_arguments
from grabstream.streams.relaying.apply_arguments import Applicable, PlainGrabs, in_columns, last_seq
from grabstream.streams.relaying.ownership import OwnedShard, Ownership

log = logging.getLogger(__name__)

_pack = msgspec.msgpack.Encoder().encode

APPLY_EVENTS_MAX: Final = 256
#: The cost of the events in one call, in µs of the Redis thread, as far as it is known in advance. The script
#: counts the rest (lua/includes/cost.lua).
APPLY_COST_MAX: Final = 3_000
#: The cost in µs of each byte of an event above USUAL_BYTES, in addition to a constant per event.
USUAL_BYTES: Final = 512
BYTE_COST: Final = 0.025
#: The cost in µs of each grab of an envelope in columns, whose bytes are few.
PART_COST: Final = 5
WIPE_KEYS_A_STEP: Final = 500
#: A key with the parts of an envelope counts as this many other keys: Redis frees a string of megabytes in
#: one step.
WIPE_PARTS_WEIGHT: Final = 10
RETIRED_A_STEP: Final = 1_000
SCAN_COUNT: Final = 1_000
#: How long a shard waits for PostgreSQL where its recovery can do without: for the position of the newest
#: snapshot, and for its own report.
BOOKS_SECONDS_MAX: Final = 15.0

#: Lists of events that count, in order, each list with the cursor after it.
AcceptedEvents = AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]


class Position(NamedTuple):
    """The state of Redis compared with the journal: its seq, the problem in words, and the lines of events
    that only Redis has.
    """

    kind: Literal["ahead", "behind", "other"]
    seq: int
    problem: str = ""
    lost: Sequence[bytes] = ()


class Snapshot(NamedTuple):
    """A fold of the journal up to a cursor: the time there (ms), the ids of retired offers, and the events of
    campaigns that still exist.

    `past` and `payments` are the remains of retired offers whose events are not among these.
    """

    cursor: Cursor
    at: int
    retired: Sequence[str]
    past: Sequence[RetiredOffer]
    payments: AsyncIterator[Sequence[KnownPayment]]
    events: AsyncIterator[Sequence[AnyLine]]


#: OpenSnapshot opens the newest snapshot of a shard, None if there is none; NewestCursor returns its cursor.
OpenSnapshot = Callable[[int], AbstractAsyncContextManager[Snapshot | None]]
NewestCursor = Callable[[int], Awaitable[Cursor]]
RecordedKeys = Callable[[], Awaitable[Mapping[str, str]]]


class Recovered(NamedTuple):
    """The result of a recovery. `lost` are the lines of events that Redis had decided and the journal
    lacks.
    """

    shard: int
    term: int
    kind: Literal["behind", "other"]
    problem: str
    redis_seq: int
    journal_seq: int
    snapshot_seq: int
    applied: int
    seconds: float
    lost: Sequence[bytes]


class Impossible(Exception):
    """The events of the journal do not follow from each other."""


class Snapshots(NamedTuple):
    """The functions that read snapshots, and `keys`, which records this process's signing key, and returns
    the public keys of all relays by id.
    """

    open: OpenSnapshot
    newest: NewestCursor
    keys: RecordedKeys


class Recovery:
    """Recovers one shard for its owner. `report` is called with the result, `progress` with the number of
    events applied.
    """

    def __init__(
        self,
        shard: OwnedShard,
        sealer: Sealer,
        snapshots: Snapshots | None = None,
        report: Callable[[Recovered], Awaitable[None]] | None = None,
        progress: Callable[[int], None] = lambda applied: None,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._shard = shard
        self._sealer = sealer
        self._snapshots = snapshots
        self._report = report
        self._progress = progress
        self._step = step
        self._applied = 0
        self._seeds: dict[str, str] = {}

    async def recorded_keys(self) -> Mapping[str, str]:
        """The public keys of the relays, by id, with that of this process; raises OSError when they cannot be
        read.
        """
        return {} if self._snapshots is None else await self._snapshots.keys()

    async def newest_snapshot(self) -> Cursor:
        """The cursor of the newest snapshot; the journal's beginning if there is none."""
        if self._snapshots is None:
            return Cursor()
        try:
            async with asyncio.timeout(BOOKS_SECONDS_MAX):
                return await self._snapshots.newest(self._shard.keys.shard)
        except OSError as error:
            words = str(error) or "PostgreSQL does not answer"
            log.warning("shard %d: no snapshot: %s", self._shard.keys.shard, words)
            return Cursor()

    async def catch_up(self, ownership: Ownership, position: Position, journal: AcceptedEvents) -> None:
        """Applies the events of the journal after the seq of Redis."""
        began = time.monotonic()
        self._applied = 0
        seq = await self.follow(ownership, position.seq, journal)
        await self._finish(ownership, position, seq, 0, began)

    async def rebuild(
        self, ownership: Ownership, position: Position, journal: Callable[[Cursor], AcceptedEvents]
    ) -> None:
        """Deletes the keys of the shard and rebuilds them; `journal` returns the events after a cursor."""
        began = time.monotonic()
        seq, base_seq = await self.make(ownership, journal)
        await self._finish(ownership, position, seq, base_seq, began)

    async def make(
        self, ownership: Ownership, journal: Callable[[Cursor], AcceptedEvents]
    ) -> tuple[int, int]:
        """Rebuilds the shard without a report. Returns its seq, and that of the snapshot it started from."""
        self._seeds = {}
        try:
            return await self._make(ownership, journal)
        except CannotOpen as error:
            self._seeds = await self._revealed(journal(Cursor()))
            if not self._seeds:
                raise
            log.warning(
                "shard %d: %s; %d seeds were revealed when their envelopes closed",
                self._shard.keys.shard,
                error,
                len(self._seeds),
            )
        return await self._make(ownership, journal)

    async def _revealed(self, journal: AcceptedEvents) -> dict[str, str]:
        """The seeds, by offer, of envelopes that have closed. They need no key."""
        seeds: dict[str, str] = {}
        async with aclosing(journal) as reading:
            async for _, accepted in reading:
                closed = [
                    record.line
                    for record in accepted
                    if b'"offer.closed"' in record.line and b'"seed"' in record.line
                ]
                for event in self._decoded(closed) if closed else ():
                    if isinstance(event, OfferClosed) and event.seed is not None:
                        seeds[event.offer] = event.seed
        return seeds

    async def _make(
        self, ownership: Ownership, journal: Callable[[Cursor], AcceptedEvents]
    ) -> tuple[int, int]:
        self._applied = 0
        base = Cursor()
        try:
            base = await self._from_snapshot(ownership)
        except (OSError, Impossible, msgspec.DecodeError) as error:
            # If PostgreSQL cannot be reached, or its trail has a hole, the recovery does not wait: the
            # journal has all events.
            log.warning(
                "shard %d: the snapshot cannot be used (%s): reading the journal from its beginning",
                self._shard.keys.shard,
                error,
            )
        try:
            seq = await self._from_journal(ownership, base, journal)
        except Impossible as error:
            if base == Cursor():
                raise
            log.warning(
                "shard %d: the journal does not continue from the snapshot (%s): reading all of it",
                self._shard.keys.shard,
                error,
            )
            base = Cursor()
            seq = await self._from_journal(ownership, base, journal)
        return seq, base.seq

    async def _from_journal(
        self, ownership: Ownership, base: Cursor, journal: Callable[[Cursor], AcceptedEvents]
    ) -> int:
        """Applies the events of the journal after a base; from the beginning, it empties the shard first."""
        if base == Cursor():
            await self.wipe(ownership)
            await self._apply(ownership, [], "", 0, 0)
        return await self.follow(ownership, base.seq, journal(base))

    async def _from_snapshot(self, ownership: Ownership) -> Cursor:
        if self._snapshots is None:
            return Cursor()
        async with self._snapshots.open(self._shard.keys.shard) as snapshot:
            if snapshot is None:
                return Cursor()
            await self.wipe(ownership)
            for start in range(0, len(snapshot.retired), RETIRED_A_STEP):
                await self._apply(ownership, [], "", "", "", snapshot.retired[start : start + RETIRED_A_STEP])
            for start in range(0, len(snapshot.past), RETIRED_A_STEP):
                await self._apply_past(ownership, snapshot.past[start : start + RETIRED_A_STEP], ())
            async for payments in snapshot.payments:
                await self._apply_past(ownership, (), payments)
            async for events in snapshot.events:
                await self._apply_all(ownership, events, None)
            await self._apply(ownership, [], "", snapshot.cursor.seq, snapshot.at)
            await self._shard.trim(ownership, snapshot.cursor)
            return snapshot.cursor

    async def follow(self, ownership: Ownership, seq: int, journal: AcceptedEvents) -> int:
        """Applies the events after a seq; returns the last seq."""
        waiting: list[bytes] = []
        cursor: Cursor | None = None
        read = seq
        try:
            async with aclosing(journal) as reading:
                async for cursor, accepted in reading:
                    waiting += [line.line for line in accepted if line.seq > read]
                    read = max(read, accepted[-1].seq) if accepted else read
                    if read - seq >= APPLY_EVENTS_MAX:
                        seq = await self._apply_lines(ownership, seq, waiting, cursor)
                        waiting = []
        except (Corrupt, Gap) as error:
            raise Impossible(str(error)) from None
        return (
            await self._apply_lines(ownership, seq, waiting, cursor)
            if waiting and cursor is not None
            else seq
        )

    async def _apply_lines(
        self, ownership: Ownership, seq: int, lines: Sequence[bytes], cursor: Cursor
    ) -> int:
        """Applies lines up to a cursor, which becomes the checkpoint: a recovery that is interrupted resumes
        there.
        """
        try:
            decoded = self._decoded(lines)
        except Impossible as error:
            raise Impossible(f"after seq {seq}: {error}") from None
        seq = await self._apply_all(ownership, decoded, seq)
        await self._shard.trim(ownership, cursor)
        return seq

    def _decoded(self, lines: Sequence[bytes]) -> list[AnyLine]:
        try:
            return decode_lines(b"[" + b",".join(lines) + b"]")
        except msgspec.DecodeError as error:
            raise Impossible(str(error)) from None

    # -- applying --------------------------------------------------------------------------------------------

    async def _apply_all(self, ownership: Ownership, lines: Sequence[AnyLine], seq: int | None) -> int:
        """Applies events in calls of bounded size. `seq` is that of the event before them, and those up to it
        are left out: a recovery that was interrupted may have applied a part of a run. None if they are the
        events of some offers only. Returns the seq of the last.
        """
        at = seq or 0
        for part in _parts(in_columns(lines, at)):
            done = 0
            while done < len(part):
                rest = part[done:]
                after: tuple[int | str, int | str] = ("", "") if seq is None else (at, last_seq(rest[-1]))
                applied = rest[: await self._apply(ownership, rest, *after, rest[-1].at)]
                done += len(applied)
                at = last_seq(applied[-1])
                self._applied += sum(last_seq(event) - event.seq + 1 for event in applied)
                self._progress(self._applied)
                self._step("recovery.applied")
        return at

    async def _apply(
        self,
        ownership: Ownership,
        events: Sequence[Applicable],
        seq: int | str,
        after: int | str,
        at: int | str,
        retired: Sequence[str] = (),
    ) -> int:
        """Applies events in one call; returns the number that the call had room for."""
        keys = self._shard.keys
        try:
            # Drawing the parts of a large envelope takes a while: other shards are served meanwhile.
            call = await in_slices(apply_arguments.building(keys, events, self._sealer, retired, self._seeds))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Impossible(f"an event from seq {events[0].seq} on cannot be applied: {error}") from error
        try:
            for staged in call.staged:
                for offset, piece in pieces(staged.parts):
                    await self._shard.run("apply_parts", [keys.state, staged.key], ownership, offset, piece)
            return int(
                await self._shard.run(
                    "apply", [*keys.deciding(), *call.keys], ownership, seq, after, at, *call.arguments
                )
            )
        except ResponseError as error:
            raise Impossible(str(error)) from None

    async def _apply_past(
        self, ownership: Ownership, past: Sequence[RetiredOffer], payments: Sequence[KnownPayment]
    ) -> None:
        keys, campaigns = self._shard.keys, dict[str, int]()
        payments = [row._replace(payment=encoded_payment(row.payment)) for row in payments]
        rows = [
            [(campaigns.setdefault(campaign_of(row.offer), len(campaigns) + 1), *row) for row in kind_rows]
            for kind_rows in (past, payments)
        ]
        names = [keys.state, keys.past]
        for campaign in campaigns:
            _, payments_key, _, state_key, _ = keys.campaign_keys(campaign)
            names += (payments_key, state_key)
        await self._shard.run("apply_past", names, ownership, _pack(rows))

    async def wipe(self, ownership: Ownership) -> None:
        """Deletes the keys of the shard, of any layout. What remains: its lease, what the script `wipe` keeps
        of its hash, and the counts of refusals that are not in SQL yet, if they are sound.
        """
        keys = self._shard.keys
        kept = {key.encode() for key in (keys.state, keys.lease, keys.present)}
        if await self._has_sound_counts(ownership):
            kept.add(keys.demand.encode())
        step: list[str | bytes] = []
        weight = 0
        reason = "the shard is being rebuilt from the journal"
        await self._shard.run("wipe", [keys.state], ownership, reason)
        match = f"{literal(keys.tag)}:*"
        async for name in self._scanned(ownership, "SCAN", None, "MATCH", match):
            if name not in kept:
                step.append(name)
                weight += WIPE_PARTS_WEIGHT if name.endswith(b"/parts") else 1
            if weight >= WIPE_KEYS_A_STEP:
                await self._shard.run("wipe", [keys.state, *step], ownership, reason)
                step, weight = [], 0
        await self._shard.run("wipe", [keys.state, *step], ownership, reason)
        self._step("recovery.wiped")

    async def _has_sound_counts(self, ownership: Ownership) -> bool:
        """Whether the counts of refusals are in the form that scripts write: others would fail at them."""
        key = self._shard.keys.demand
        if await self._shard.read(ownership, "TYPE", key) != b"hash":
            return False
        field: bytes | None = None
        async for word in self._scanned(ownership, "HSCAN", key):
            if field is None:
                field = word
            elif demand_row(field, word) is None:
                return False
            else:
                field = None
        return True

    async def _scanned(
        self, ownership: Ownership, command: str, key: str | None, *arguments: str
    ) -> AsyncIterator[bytes]:
        """What a scan of the server of the takeover finds."""
        cursor = b"0"
        while True:
            cursor, found = await self._shard.read(
                ownership, command, key, cursor, *arguments, "COUNT", SCAN_COUNT
            )
            for word in found:
                yield word
            if cursor == b"0":
                return

    async def _finish(
        self, ownership: Ownership, position: Position, journal_seq: int, snapshot_seq: int, began: float
    ) -> None:
        kind: Literal["behind", "other"] = "behind" if position.kind == "behind" else "other"
        done = Recovered(
            self._shard.keys.shard, ownership.term, kind, position.problem, position.seq, journal_seq,
            snapshot_seq, self._applied,
            round(time.monotonic() - began, 3), position.lost,
        )  # fmt: skip
        beginning = (
            f"seq {done.redis_seq} of Redis"
            if kind == "behind"
            else f"a snapshot of seq {snapshot_seq}"
            if snapshot_seq
            else "the beginning"
        )
        log.warning(
            "shard %d recovered in %.1f s (%s): from %s, %d events applied, up to seq %d; %d events "
            "that only Redis had are lost; "
            "running gates report which answers promised as decided are lost, those of ended gates are "
            "unknown",
            done.shard, done.seconds, done.problem, beginning, done.applied, done.journal_seq,
            sum(decode_line(line).seqs for line in done.lost),
        )  # fmt: skip
        for line in done.lost:
            log.error("lost: decided by Redis, but not in the journal: %s", line.decode())
        if self._report is not None:
            try:
                async with asyncio.timeout(BOOKS_SECONDS_MAX):
                    await self._report(done)
            except OSError as error:
                words = str(error) or "PostgreSQL does not answer"
                log.warning("the recovery of shard %d could not be recorded: %s", done.shard, words)


class _Drawn(msgspec.Struct):
    """The fields of an envelope's terms that say how many parts are drawn at opening."""

    parts: int = 0
    draw: str = "ahead"


_parse_drawn = msgspec.json.Decoder(_Drawn).decode


def _cost(event: Applicable) -> float:
    """The cost in µs of applying an event, as far as the event itself shows it."""
    if isinstance(event, PlainGrabs):
        return 10 + PART_COST * len(event.grabs)
    cost = 10 + BYTE_COST * max(len(_pack(event)) - USUAL_BYTES, 0)
    if isinstance(event, OfferOpened):
        terms = _parse_drawn(event.terms)
        return cost + 40 + (0.01 * terms.parts if terms.draw == "ahead" else 0)
    return cost + len(event.items) if isinstance(event, OfferLoaded) else cost


def _parts(events: Sequence[Applicable]) -> list[list[Applicable]]:
    """The events of each call, of bounded cost. Retirements are in separate calls, because the last one
    of a campaign deletes the campaign's answers.
    """
    parts: list[list[Applicable]] = []
    cost = 0.0
    for event in events:
        retires, event_cost = isinstance(event, OfferRetired), _cost(event)
        full = bool(parts) and (len(parts[-1]) >= APPLY_EVENTS_MAX or cost + event_cost > APPLY_COST_MAX)
        if not parts or full or isinstance(parts[-1][-1], OfferRetired) != retires:
            parts.append([])
            cost = 0.0
        parts[-1].append(event)
        cost += event_cost
    return parts


def literal(text: str) -> str:
    """A Redis pattern that matches only this text."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
