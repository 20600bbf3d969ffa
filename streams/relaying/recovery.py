"""Recovery: a shard's state in Redis from the journal (docs/design.md), the events that are missing, or all
of them.

All of them need not be read: the audit trail in PostgreSQL is a snapshot. It knows its seq and hash, and of
offers that have retired nothing is needed, so what is read is the events of campaigns that are still there,
and the journal behind the trail's cursor. A shard that is being rebuilt is marked `partial` until it is
complete; who finds the mark begins anew.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Final, Literal, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from grabstream.lua import restoring
from grabstream.lua.gate.sealing import CannotOpen, Sealer
from grabstream.lua.gate.staging import pieces
from grabstream.models.events import (
    AnyEvent,
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferRetired,
    decode_event_list,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.journal import Accepted, Corrupt, Cursor, Gap
from grabstream.projections.checking.snapshots import KnownPayment, RetiredOffer
from grabstream.streams.relaying.ownership import OwnedShard, Ownership

log = logging.getLogger(__name__)

_pack = msgspec.msgpack.Encoder().encode

APPLY_EVENTS_MAX: Final = 256
#: What a call may apply, as far as it is known before, in µs of Redis' thread; the script knows the rest
#: (lua/includes/cost.lua).
APPLY_COST_MAX: Final = 3_000
#: What an event costs beyond a constant: µs for each byte that it has more than most have.
USUAL_BYTES: Final = 512
BYTE_COST: Final = 0.025
WIPE_KEYS_A_STEP: Final = 500
#: A key with the parts of an envelope counts as so many others: Redis frees a string, which may have
#: megabytes, at once.
WIPE_PARTS_WEIGHT: Final = 10
RETIRED_A_STEP: Final = 1_000
PROGRESS_SECONDS: Final = 1.0


class Position(NamedTuple):
    """Redis against the journal: its seq, what is wrong in words, and the events it has beyond what both
    have.
    """

    kind: Literal["ahead", "behind", "other"]
    seq: int
    problem: str = ""
    lost: Sequence[bytes] = ()


class Snapshot(NamedTuple):
    """A fold of the journal up to a cursor: the time there (ms), offers that have left, and the events of
    campaigns that are there.

    `past` and `payments` are what is still kept of offers that have left and whose events are not among
    these.
    """

    cursor: Cursor
    at: int
    retired: Sequence[str]
    past: Sequence[RetiredOffer]
    payments: AsyncIterator[Sequence[KnownPayment]]
    events: AsyncIterator[Sequence[AnyEvent]]


#: Opens the newest snapshot of a shard, or none; and only its cursor.
OpenSnapshot = Callable[[int], AbstractAsyncContextManager[Snapshot | None]]
NewestCursor = Callable[[int], Awaitable[Cursor]]


class Recovered(NamedTuple):
    """What a recovery did: `lost` are events that Redis had decided and the journal has not."""

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
    """Where snapshots come from."""

    open: OpenSnapshot
    newest: NewestCursor


class Recovery:
    """Recovers one shard for its owner. `report` is told what was done, `progress` (events applied) while it
    is.
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

    async def newest_snapshot(self) -> Cursor:
        """The cursor of the newest snapshot; the journal's beginning when there is none."""
        if self._snapshots is None:
            return Cursor()
        try:
            return await self._snapshots.newest(self._shard.keys.shard)
        except OSError as error:
            log.warning("shard %d: no snapshot: %s", self._shard.keys.shard, error)
            return Cursor()

    async def catch_up(
        self, own: Ownership, position: Position, journal: AsyncGenerator[tuple[Cursor, Sequence[Accepted]],
        None]
    ) -> None:  # fmt: skip
        """Applies what the journal has behind the seq of Redis."""
        began = time.monotonic()
        self._applied = 0
        seq = await self.follow(own, position.seq, journal)
        await self._tell(own, position, seq, 0, began)

    async def rebuild(
        self,
        own: Ownership,
        position: Position,
        journal: Callable[[Cursor], AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]],
    ) -> None:
        """Deletes what Redis has of the shard and makes it anew; `journal` gives the events behind a
        cursor.
        """
        began = time.monotonic()
        seq, base_seq = await self.make(own, journal)
        await self._tell(own, position, seq, base_seq, began)

    async def make(
        self, own: Ownership, journal: Callable[[Cursor], AsyncGenerator[tuple[Cursor, Sequence[Accepted]],
        None]]
    ) -> tuple[int, int]:  # fmt: skip
        """Makes the shard anew, as `rebuild` does, and tells nobody; returns its seq, and that of the
        snapshot it began from.
        """
        self._seeds = {}
        try:
            return await self._make(own, journal)
        except CannotOpen as error:
            self._seeds = await self._revealed(journal(Cursor()))
            if not self._seeds:
                raise
            log.warning(
                "shard %d: %s; %d seeds are known since their envelopes closed",
                self._shard.keys.shard,
                error,
                len(self._seeds),
            )
        return await self._make(own, journal)

    async def _revealed(
        self, journal: AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]
    ) -> dict[str, str]:
        """The seeds, by offer, of envelopes that have closed: their keys need not be kept."""
        seeds: dict[str, str] = {}
        async with aclosing(journal) as reading:
            async for _, accepted in reading:
                closed = [
                    one.line for one in accepted if b'"offer.closed"' in one.line and b'"seed"' in one.line
                ]
                for event in self._decoded(closed) if closed else ():
                    if isinstance(event, OfferClosed) and event.seed is not None:
                        seeds[event.offer] = event.seed
        return seeds

    async def _make(
        self, own: Ownership, journal: Callable[[Cursor], AsyncGenerator[tuple[Cursor, Sequence[Accepted]],
        None]]
    ) -> tuple[int, int]:  # fmt: skip
        self._applied = 0
        base = Cursor()
        try:
            base = await self._from_snapshot(own)
        except (OSError, Impossible, msgspec.DecodeError) as error:
            # A trail that PostgreSQL cannot give, or that has a hole, is no reason to wait: the journal has
            # it all.
            log.warning(
                "shard %d: the snapshot cannot be used (%s): reading the journal from its beginning",
                self._shard.keys.shard,
                error,
            )
        try:
            seq = await self._from_journal(own, base, journal)
        except Impossible as error:
            if base == Cursor():
                raise
            log.warning(
                "shard %d: the journal does not go on from the snapshot (%s): reading all of it",
                self._shard.keys.shard,
                error,
            )
            base = Cursor()
            seq = await self._from_journal(own, base, journal)
        return seq, base.seq

    async def _from_journal(
        self, own: Ownership, base: Cursor, journal: Callable[[Cursor], AsyncGenerator[tuple[Cursor,
        Sequence[Accepted]], None]]
    ) -> int:  # fmt: skip
        """Applies what the journal has behind a base; behind nothing, to a shard that is empty."""
        if base == Cursor():
            await self.wipe(own)
            await self._apply(own, [], "", 0, 0)
        return await self.follow(own, base.seq, journal(base))

    async def _from_snapshot(self, own: Ownership) -> Cursor:
        if self._snapshots is None:
            return Cursor()
        async with self._snapshots.open(self._shard.keys.shard) as snapshot:
            if snapshot is None:
                return Cursor()
            await self.wipe(own)
            for start in range(0, len(snapshot.retired), RETIRED_A_STEP):
                await self._apply(own, [], "", "", "", snapshot.retired[start : start + RETIRED_A_STEP])
            for start in range(0, len(snapshot.past), RETIRED_A_STEP):
                await self._apply_past(own, snapshot.past[start : start + RETIRED_A_STEP], ())
            async for payments in snapshot.payments:
                await self._apply_past(own, (), payments)
            async for events in snapshot.events:
                await self._apply_all(own, events, None)
            await self._apply(own, [], "", snapshot.cursor.seq, snapshot.at)
            await self._shard.trim(own, snapshot.cursor)
            return snapshot.cursor

    async def follow(
        self, own: Ownership, seq: int, journal: AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]
    ) -> int:
        """Applies the events behind a seq; returns the last one's."""
        waiting: list[bytes] = []
        cursor: Cursor | None = None
        try:
            async with aclosing(journal) as reading:
                async for cursor, accepted in reading:
                    waiting += [one.line for one in accepted if one.seq > seq + len(waiting)]
                    if len(waiting) >= APPLY_EVENTS_MAX:
                        seq = await self._apply_lines(own, seq, waiting, cursor)
                        waiting = []
        except (Corrupt, Gap) as error:
            raise Impossible(str(error)) from None
        return await self._apply_lines(own, seq, waiting, cursor) if waiting and cursor is not None else seq

    async def _apply_lines(self, own: Ownership, seq: int, lines: Sequence[bytes], cursor: Cursor) -> int:
        """Applies lines up to a cursor, which is the checkpoint then: who has to go on from here need not
        begin anew.
        """
        try:
            events = self._decoded(lines)
        except Impossible as error:
            raise Impossible(f"after seq {seq}: {error}") from None
        await self._apply_all(own, events, seq)
        await self._shard.trim(own, cursor)
        return seq + len(lines)

    def _decoded(self, lines: Sequence[bytes]) -> list[AnyEvent]:
        try:
            return decode_event_list(b"[" + b",".join(lines) + b"]")
        except msgspec.DecodeError as error:
            raise Impossible(str(error)) from None

    # -- applying --------------------------------------------------------------------------------------------

    async def _apply_all(self, own: Ownership, events: Sequence[AnyEvent], seq: int | None) -> None:
        """Applies events in calls of bounded size; `seq` is the one before them, or None when they are those
        of some offers only.
        """
        for part in _parts(events):
            done = 0
            while done < len(part):
                rest = part[done:]
                after: tuple[int | str, int | str] = ("", "") if seq is None else (seq, seq + len(rest))
                applied = await self._apply(own, rest, *after, rest[-1].at)
                done += applied
                seq = None if seq is None else seq + applied
                self._applied += applied
                self._progress(self._applied)
                self._step("recovery.applied")

    async def _apply(
        self, own: Ownership, events: Sequence[AnyEvent], seq: int | str, after: int | str, at: int | str,
        retired: Sequence[str] = ()
    ) -> int:  # fmt: skip
        """Applies events in one call; returns how many of them it had room for."""
        keys = self._shard.keys
        build = partial(restoring.build, keys, events, self._sealer, retired, self._seeds)
        try:
            # Drawing the parts of a large envelope takes a while.
            draws = any(isinstance(event, OfferOpened) for event in events)
            batch = await asyncio.to_thread(build) if draws else build()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Impossible(f"an event from seq {events[0].seq} on cannot be understood: {error}") from error
        try:
            for staged in batch.staged:
                for offset, piece in pieces(staged.parts):
                    await self._shard.run("apply_parts", [keys.state, staged.key], own, offset, piece)
            return int(
                await self._shard.run(
                    "apply", [*keys.deciding(), *batch.keys], own, seq, after, at, *batch.arguments
                )
            )
        except ResponseError as error:
            raise Impossible(str(error)) from None

    async def _apply_past(
        self, own: Ownership, past: Sequence[RetiredOffer], payments: Sequence[KnownPayment]
    ) -> None:
        keys, campaigns = self._shard.keys, dict[str, int]()
        rows = [
            [(campaigns.setdefault(campaign_of(one.offer), len(campaigns) + 1), *one) for one in of_kind]
            for of_kind in (past, payments)
        ]
        names = [keys.state, keys.past]
        for campaign in campaigns:
            _, payments_key, _, state_key, _ = keys.of_campaign(campaign)
            names += (payments_key, state_key)
        await self._shard.run("apply_past", names, own, _pack(rows))

    async def wipe(self, own: Ownership) -> None:
        """Deletes the keys of the shard, but term and owner."""
        keys = self._shard.keys
        kept = {keys.state.encode(), keys.lease.encode()}
        step: list[str] = []
        weight = 0
        reason = "the shard is being rebuilt from the journal"
        await self._shard.run("wipe", [keys.state], own, reason)
        async for name in self._shard.redis.scan_iter(match=f"{literal(keys.tag)}:*", count=1_000):
            if name not in kept:
                step.append(name.decode())
                weight += WIPE_PARTS_WEIGHT if name.endswith(b"/parts") else 1
            if weight >= WIPE_KEYS_A_STEP:
                await self._shard.run("wipe", [keys.state, *step], own, reason)
                step, weight = [], 0
        await self._shard.run("wipe", [keys.state, *step], own, reason)
        self._step("recovery.wiped")

    async def _tell(
        self, own: Ownership, position: Position, journal_seq: int, snapshot_seq: int, began: float
    ) -> None:
        kind: Literal["behind", "other"] = "behind" if position.kind == "behind" else "other"
        done = Recovered(
            self._shard.keys.shard, own.term, kind, position.problem, position.seq, journal_seq, snapshot_seq,
            self._applied,
            round(time.monotonic() - began, 3), position.lost,
        )  # fmt: skip
        beginning = (
            f"Redis' seq {done.redis_seq}"
            if kind == "behind"
            else f"a snapshot of seq {snapshot_seq}"
            if snapshot_seq
            else "nothing"
        )
        log.warning(
            "shard %d recovered in %.1f s (%s): made of %s and %d events applied, up to seq %d; %d events "
            "that only Redis had are lost; "
            "living gates tell which answers given as decided are, those of gates that have died are unknown",
            done.shard, done.seconds, done.problem, beginning, done.applied, done.journal_seq, len(done.lost),
        )  # fmt: skip
        for line in done.lost:
            log.error("lost, decided by Redis and not in the journal: %s", line.decode())
        if self._report is not None:
            try:
                await self._report(done)
            except OSError as error:
                log.warning("the recovery of shard %d is not written down: %s", done.shard, error)


class _Drawn(msgspec.Struct):
    """Of terms, what says how many parts are drawn ahead."""

    parts: int = 0
    draw: str = "ahead"


_drawn = msgspec.json.Decoder(_Drawn).decode


def _cost(event: AnyEvent) -> float:
    """What an event costs the call that applies it, µs, as far as it says so itself."""
    cost = 10 + BYTE_COST * max(len(_pack(event)) - USUAL_BYTES, 0)
    if isinstance(event, OfferOpened):
        terms = _drawn(event.terms)
        return cost + 40 + (0.01 * terms.parts if terms.draw == "ahead" else 0)
    return cost + len(event.items) if isinstance(event, OfferLoaded) else cost


def _parts(events: Sequence[AnyEvent]) -> list[list[AnyEvent]]:
    """The events in calls of bounded cost; those that retire apart, since with a campaign's last offer go its
    answers.
    """
    parts: list[list[AnyEvent]] = []
    cost = 0.0
    for event in events:
        retires, of_event = isinstance(event, OfferRetired), _cost(event)
        full = bool(parts) and (len(parts[-1]) >= APPLY_EVENTS_MAX or cost + of_event > APPLY_COST_MAX)
        if not parts or full or isinstance(parts[-1][-1], OfferRetired) != retires:
            parts.append([])
            cost = 0.0
        parts[-1].append(event)
        cost += of_event
    return parts


def literal(text: str) -> str:
    """The text as a pattern of Redis that matches only itself."""
    return "".join(f"\\{one}" if one in "*?[]\\" else one for one in text)
