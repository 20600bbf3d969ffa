"""Reads the journal for subscriptions, and adds their events to their deliveries, with the cursor in the same
transaction.

Subscriptions whose cursors are equal read together. One with too much to deliver stops reading until it has
less; the others continue.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from psycopg_pool import AsyncConnectionPool

from grabstream.models.journal import Corrupt, Cursor, Gap
from grabstream.projections.cursors import CursorMoved, Fact, single_facts
from grabstream.projections.tables import set_aside
from grabstream.projections.tables import webhooks as stored
from grabstream.projections.tables.webhooks import NewEvent, Queue, Webhook
from grabstream.runtime.ending import end
from grabstream.streams.clients import Trouble
from grabstream.streams.follower import RETRY_SECONDS, Chunk, Follower, Group, poll_journal
from grabstream.streams.history.chunks import Point
from grabstream.streams.history.sources import JournalSource, Start
from grabstream.streams.journal import JournalReader, open_reader

log = logging.getLogger(__name__)

#: Events that one group of subscriptions reads before the next group has its turn.
SLICE_EVENTS: Final = 5_000
#: How often the backlogs are counted again, and how long a shard rests whose journal contradicts itself.
COUNT_SECONDS: Final = 2.0
REST_SECONDS: Final = 60.0
#: New subscriptions that look for their beginning at a time.
BEGINNING_MAX: Final = 2
#: The publisher, whose records set aside webhooks lack too: they get the events of `grab.events`.
PUBLISHED: Final = "events"
_EMPTY: Final = Queue(0, 0)


class Reader:
    """Reads for all active subscriptions until cancelled. `added` is set when there are deliveries to
    send.
    """

    def __init__(
        self, pool: AsyncConnectionPool[Any], kafka: str, journal: str, shards: int, added: asyncio.Event
    ) -> None:
        self._pool = pool
        self._kafka = kafka
        self._journal = journal
        self._shards = shards
        self._added = added
        self._active: list[Webhook] = []
        self._queues: dict[str, Queue] = {}
        self._counted_at = 0.0
        #: By shard: the newest cursor that this process has read up to.
        self._confirmed: dict[int, Cursor] = {}
        #: By shard: the end of the journal that all of these subscriptions have read up to.
        self._read_up_to: dict[int, tuple[int, frozenset[str]]] = {}
        #: By shard: when it is read again.
        self._rests_until: dict[int, float] = {}
        self._beginning: dict[str, asyncio.Task[None]] = {}
        self._trouble = Trouble(log, "webhooks: reading the journal")

    async def run(self) -> None:
        """Reads until cancelled; waits while Kafka or PostgreSQL is down."""
        try:
            await poll_journal(self._kafka, self._journal, self._read_all, self._trouble, self._is_wanted)
        finally:
            await end(self._beginning.values())

    async def _is_wanted(self) -> bool:
        """Whether there are active subscriptions; the next read is for these."""
        async with self._pool.connection() as connection:
            self._active = [one for one in await stored.find_all(connection) if one.state == "active"]
        return bool(self._active)

    async def _read_all(self, reader: JournalReader) -> None:
        """Reads each shard up to its end, or a slice of it, for each group of active subscriptions."""
        await self._count(self._active)
        by_name = {one.webhook: one for one in self._active if not self._is_full(one.webhook)}
        for shard, journal_end in (await reader.ends(range(self._shards))).items():
            read = journal_end, frozenset(by_name)
            if self._read_up_to.get(shard) == read:
                continue
            if time.monotonic() < self._rests_until.get(shard, 0.0):
                continue
            async with self._pool.connection() as connection:
                cursors = await stored.cursors_of(connection, shard)
                aside = await set_aside.load(connection, PUBLISHED)
            groups: dict[Cursor, list[Webhook]] = {}
            for name, webhook in by_name.items():
                if name in self._beginning or self._is_full(name):
                    continue
                if name in cursors:
                    groups.setdefault(cursors[name], []).append(webhook)
                else:
                    self._begin(webhook)
            reached = [
                await self._read_group(reader, shard, cursor, journal_end, groups[cursor], aside)
                for cursor in sorted(groups)
                if cursor.next_offset != journal_end
            ]
            if all(reached) and sum(map(len, groups.values())) == len(by_name):
                self._read_up_to[shard] = read

    def _is_full(self, webhook: str) -> bool:
        return self._queues.get(webhook, _EMPTY).is_full

    async def _count(self, active: Sequence[Webhook]) -> None:
        """Counts the backlogs now and then; pauses a subscription that has too much parked."""
        if time.monotonic() - self._counted_at < COUNT_SECONDS:
            return
        async with self._pool.connection() as connection:
            self._queues = await stored.queues(connection)
            parked = await stored.backlogs(connection, "parked")
            for one in active:
                if (count := parked.get(one.webhook, 0)) >= stored.PARKED_MAX:
                    reason = f"{count:,} deliveries are parked"
                    await stored.set_state(connection, one.webhook, "paused", reason)
                    log.warning("webhook %s is paused: %s", one.webhook, reason)
        self._counted_at = time.monotonic()

    async def _read_group(
        self, reader: JournalReader, shard: int, cursor: Cursor, journal_end: int,
        webhooks: Sequence[Webhook], aside: Sequence[Any],
    ) -> bool:  # fmt: skip
        """Reads from a cursor up to the end, or a slice. If the journal is another one (it was filled from
        the audit trail), it is read from its beginning up to the cursor's event, whose hash must be the same.
        Returns whether it has reached the end.
        """
        is_placed = await self._confirms(reader, shard, cursor, journal_end)
        start = Start(cursor if is_placed else Cursor(), journal_end)
        chunks = JournalSource(reader, None).chunks(shard, start, aside)

        async def save(group: Group) -> None:
            nonlocal cursor
            _, after = group.moves[shard]
            await self._move(shard, cursor, after, group.facts, webhooks)
            self._confirmed[shard] = cursor = after

        try:
            await Follower(save).follow(chunks_after(cursor, chunks, is_placed), SLICE_EVENTS)
        except CursorMoved as moved:
            log.info("%s; reading it again", moved)
        except (Corrupt, Gap) as error:
            log.error(
                "webhooks, shard %d: the journal contradicts the cursor at seq %d: %s; no event after it is "
                "sent",
                shard, cursor.seq, error,
            )  # fmt: skip
            self._rests_until[shard] = time.monotonic() + REST_SECONDS
        else:
            return cursor.next_offset >= journal_end
        return False

    async def _confirms(self, reader: JournalReader, shard: int, cursor: Cursor, journal_end: int) -> bool:
        """Whether a cursor is known to belong to this journal, which may have lost its end."""
        if cursor in (Cursor(), self._confirmed.get(shard)) and cursor.next_offset <= journal_end:
            return True
        return cursor.seq > 0 and await reader.confirms(shard, cursor)

    async def _move(
        self, shard: int, before: Cursor | None, after: Cursor, facts: Sequence[Fact],
        webhooks: Sequence[Webhook],
    ) -> None:  # fmt: skip
        wanted = {one.webhook: new_events(facts, one) for one in webhooks}
        async with self._pool.connection() as connection:
            await stored.move(connection, shard, before, after, wanted)
        for name, events in wanted.items():
            if events:
                self._queues[name] = self._queues.get(name, _EMPTY).plus(len(events))
                self._added.set()

    # -- beginning -------------------------------------------------------------------------------------------

    def _begin(self, webhook: Webhook) -> None:
        """Looks for the beginning of a new subscription, while reading for the others continues."""
        if len(self._beginning) >= BEGINNING_MAX:
            return

        async def begin() -> None:
            try:
                async with (
                    open_reader(self._kafka, self._journal) as reader,
                    self._pool.connection() as books,
                ):
                    source = JournalSource(reader, books)
                    aside = await set_aside.load(books, PUBLISHED)
                    for shard in range(self._shards):
                        if time.monotonic() < self._rests_until.get(shard, 0.0):
                            continue
                        if webhook.webhook in await stored.cursors_of(books, shard):
                            continue
                        try:
                            await self._begin_shard(source, shard, webhook, aside)
                        except (Corrupt, Gap) as error:
                            # The other shards begin all the same.
                            log.error(
                                "webhook %s, shard %d: the journal contradicts itself: %s",
                                webhook.webhook, shard, error,
                            )  # fmt: skip
                            self._rests_until[shard] = time.monotonic() + REST_SECONDS
                        if self._is_full(webhook.webhook):
                            # Others may begin meanwhile. Shards that have a cursor are read like all others
                            # when there is room, and the rest begins then.
                            return
            except CursorMoved as moved:
                log.info("%s; beginning again", moved)
            except BaseException as error:
                self._trouble.met(error)
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                del self._beginning[webhook.webhook]

        self._beginning[webhook.webhook] = asyncio.create_task(begin())

    async def _begin_shard(
        self, source: JournalSource, shard: int, webhook: Webhook, aside: Sequence[Any]
    ) -> None:
        """Reads a shard from the requested time to its end, or until there is too much to deliver. What is
        read from the middle counts only once the audit trail vouches for it, so there is no cursor before the
        first such record.
        """
        start = await source.start(shard, Point(at=webhook.from_ms))
        saved: Cursor | None = None

        async def save(group: Group) -> None:
            nonlocal saved
            _, after = group.moves[shard]
            await self._move(shard, saved, after, group.facts, [webhook])
            saved = after

        chunks = source.chunks(shard, start, aside)
        new = chunks_after(None, chunks, is_enough=lambda: self._is_full(webhook.webhook))
        # When it is full, one more group has been read: with the last one, a slice.
        await Follower(save, SLICE_EVENTS // 2).follow(new)
        if saved is None:
            await self._move(shard, None, start.proved or start.cursor, [], [webhook])


async def chunks_after(
    cursor: Cursor | None, chunks: AsyncGenerator[Chunk, None], is_placed: bool = True,
    is_enough: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Chunk, None]:  # fmt: skip
    """The chunks after a cursor (None: all), until `is_enough` after one of them. The source may start, or
    start again, before the cursor. Unless `is_placed`, it must have the cursor's hash; raises Corrupt or Gap.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            if cursor is not None:
                if chunk.after.seq < cursor.seq:
                    continue
                if not is_placed and _head_at(chunk, cursor.seq) != cursor.head:
                    raise Corrupt(f"the journal has another event at seq {cursor.seq}")
                facts = [fact for fact in chunk.facts if fact.event.last_seq > cursor.seq]
                chunk = chunk._replace(before=cursor, facts=facts)
            cursor, is_placed = chunk.after, True
            yield chunk
            if is_enough():
                return
    if cursor is not None and not is_placed:
        raise Gap(f"the journal ends before seq {cursor.seq}")


def _head_at(chunk: Chunk, seq: int) -> bytes:
    """The hash of the chain after the event of a seq, which a chunk has, or begins after."""
    if chunk.before.seq == seq:
        return chunk.before.head
    if chunk.after.seq == seq:
        return chunk.after.head
    return next((fact.hash for fact in chunk.facts if fact.event.last_seq == seq), b"")


def new_events(facts: Sequence[Fact], webhook: Webhook) -> list[NewEvent]:
    """The single events of facts that a subscription wants, with their texts as on `grab.events`."""
    # All grabs of a run have its type, offer and time.
    wanted = [
        fact
        for fact in facts
        if fact.event.at >= webhook.from_ms
        and webhook.wants(str(fact.event.__struct_config__.tag), fact.event.offer)
    ]
    return [
        NewEvent(
            single.event.seq, single.event.offer, str(single.event.__struct_config__.tag), single.event.at,
            single.line.decode(),
        )
        for single in single_facts(wanted)
    ]  # fmt: skip
