"""Restoring the journal from the audit trail, when Kafka has lost it: the same events under the same chain,
at new offsets.

1. check that nothing knows more than the audit trail · 2. per shard: raise the term, append a marker and then
   the events in blocks, cut wherever a cursor stands · 3. anchor every cursor anew by its seq and hash: those
   of the read models, the checkpoint in Redis, and the publisher's, in a repeat of the last event it
   published. Every step may be done again after it was cut off.

Events that somebody knows and the audit trail has not may be given up, when that is accepted: then Redis'
shard is fenced, and its relay makes it anew from the journal; a version of a read model that had them is
dropped, and the live one begins anew, empty.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection, sql
from psycopg.errors import LockNotAvailable
from redis.exceptions import ResponseError

from grabstream.lua.gate.calls import run_script
from grabstream.lua.keys import KeySpace
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.events import decode_event
from grabstream.models.journal import Corrupt, Cursor, Gap, block_headers, marker_headers, parse_block
from grabstream.models.transfers import transfers_of
from grabstream.projections import versions
from grabstream.projections.cursors import Fact
from grabstream.projections.database.locks import Held, hold
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import Version
from grabstream.streams.clients import started
from grabstream.streams.history.sources import AuditSource
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.publisher import Publisher, newest_cursor
from grabstream.streams.rebuilding.reading import RebuildRefused, Servers, Unreadable
from grabstream.streams.rebuilding.rebuild import RebuildProgress, ReportRebuild, hold_projection
from grabstream.streams.rebuilding.switching import LOCK_SECONDS
from grabstream.streams.topics import delete_command

OWNER: Final = "restored-"
BLOCK_EVENTS: Final = 1_000
BLOCK_BYTES: Final = RECORD_BYTES_MAX // 4


class Standing(NamedTuple):
    """A version's place in a shard; it has to be found in the restored journal by seq and hash."""

    version: Version
    cursor: Cursor


class ShardPlan(NamedTuple):
    """What is restored of a shard: up to `end`, by the audit trail.

    `standings`, `checkpoint` (of Redis) and `published` (on `grab.events`) are anchored anew. `restored` is
    how far the topic is already, after an attempt that was cut off, and `found` the anchors in it.
    `acknowledged` is the seq that Redis' checkpoint has, `given_up` the number of events behind `end` that
    somebody knows, and `anew` the versions that have such events, in this shard or another.
    """

    shard: int
    end: Cursor
    standings: tuple[Standing, ...]
    checkpoint: Cursor
    published: Cursor
    restored: Cursor = Cursor()
    found: Mapping[int, Cursor] = {}
    acknowledged: int = 0
    given_up: int = 0
    anew: tuple[Version, ...] = ()

    @property
    def places(self) -> list[tuple[str, Cursor]]:
        """Everybody who stands somewhere, in words, and where."""
        named = [(f"{one.version.projection} ({one.version.schema})", one.cursor) for one in self.standings]
        return [
            *named,
            ("Redis' checkpoint", self.checkpoint),
            ("what is published on the events topic", self.published),
        ]

    @property
    def marks(self) -> set[int]:
        """The seqs at which blocks end, because somebody stands there."""
        return {cursor.seq for _, cursor in self.places if cursor.seq}


class Restore:
    """The restoring of one system's journal: `plan` checks and changes nothing, `run` does it.

    `redis` must not decode replies. `republish` says that `grab.events` was lost too and shall be filled
    again from the beginning, `accept_loss` that events which the audit trail has not are given up.
    """

    def __init__(
        self, where: Servers, redis: Any, keys: KeySpace, events: str, source: str, republish: bool = False,
        accept_loss: bool = False
    ) -> None:  # fmt: skip
        self._where = where
        self._redis = redis
        self._keys = keys
        self._events = events
        self._source = source
        self._republish = republish
        self._accept_loss = accept_loss

    # -- looking ---------------------------------------------------------------------------------------------

    async def plan(self) -> list[ShardPlan]:
        """What will be restored; raises RebuildRefused, and names what knows more than the audit trail, or is
        of another history.
        """
        async with (
            await connect(self._where.postgres, self._where.schema) as connection,
            open_reader(self._where.kafka, self._where.journal) as journal,
            open_reader(self._where.kafka, self._events) as events,
        ):
            await use_schema(connection, self._where.schema)
            plans: list[ShardPlan] = []
            problems: list[str] = []
            delete = (
                f"delete the topic (`{delete_command(self._where.kafka, self._where.journal)}`), and "
                "begin again"
            )
            known = [
                one
                for one in await versions.versions(connection, self._where.schema)
                if one.projection in PROJECTIONS
            ]
            gone = await versions.lost(connection, known)
            if any((one.projection, one.state) == ("audit", "live") for one in gone):
                raise RebuildRefused(
                    f"the tables of the audit trail are gone ({', '.join(one.schema for one in gone)}): "
                    "restore their backup"
                )
            known = [one for one in known if one not in gone]
            for shard in range(self._where.shards):
                holder = await self._redis.get(self._keys.shard(shard).lease)
                if holder is not None:
                    raise RebuildRefused(
                        f"shard {shard} is relayed by {holder.decode()}: stop the workers first"
                    )
                standings = [
                    await _standing(connection, one, shard) for one in known if one.state != "discarded"
                ]
                [end] = [
                    one.cursor
                    for one in standings
                    if (one.version.projection, one.version.state) == ("audit", "live")
                ]
                checkpoint, published = (
                    await self._checkpoint(shard),
                    await self._published(events, shard, end),
                )
                plans.append(
                    ShardPlan(
                        shard, end, tuple(standings), checkpoint, published, acknowledged=checkpoint.seq
                    )
                )
            if self._accept_loss:
                plans = _without_what_is_lost(plans)
            for place, plan in enumerate(plans):
                problems += await _problems(connection, plan, self._events)
                plans[place] = await _with_restored(journal, plan, delete)
        if problems:
            if not self._accept_loss and any(
                cursor.seq > plan.end.seq for plan in plans for _, cursor in plan.places
            ):
                problems.append(
                    "--accept-loss gives up what the audit trail has not: who had it is made anew without it"
                )
            raise RebuildRefused(
                "the journal cannot be restored without losing events:\n  " + "\n  ".join(problems)
            )
        return plans

    async def _published(self, reader: JournalReader, shard: int, end: Cursor) -> Cursor:
        """How far the events topic is. When it was lost too, nothing is published a second time, unless that
        was asked for.
        """
        if self._republish and await reader.end(shard):
            raise RebuildRefused(
                f"--republish: topic {self._events} is not empty, what is in it would come twice"
            )
        found = await newest_cursor(reader, shard)
        return found if found.seq or self._republish else end

    async def _checkpoint(self, shard: int) -> Cursor:
        fields = await self._redis.hmget(self._keys.shard(shard).state, ["journaled_seq", "journaled_head"])
        if fields[0] is None:
            return Cursor()
        return Cursor(int(fields[0]), bytes.fromhex(fields[1].decode()))

    # -- doing -----------------------------------------------------------------------------------------------

    async def run(self, plans: Sequence[ShardPlan], report: ReportRebuild = lambda progress: None) -> int:
        """Restores and anchors; returns the number of events written. Raises Refused when the audit trail's
        chain is broken.
        """
        progress = _Counter(
            sum(plan.end.seq for plan in plans), sum(plan.restored.seq for plan in plans), report
        )
        async with await connect(self._where.postgres, self._where.schema) as connection:
            await use_schema(connection, self._where.schema)
            try:
                await hold(connection, f"grabstream-restore-{self._where.schema}", "rebuild journal")
            except Held as held:
                raise RebuildRefused(f"the journal is being restored already: {held}") from None
            for projection in PROJECTIONS:
                await hold_projection(connection, self._where.schema, projection, "rebuild journal")
            last: dict[int, tuple[Fact, Cursor]] = {}
            producer = AIOKafkaProducer(
                bootstrap_servers=self._where.kafka,
                enable_idempotence=True,
                acks="all",
                max_request_size=RECORD_BYTES_MAX,
            )
            async with started(producer):
                for plan in plans:
                    owner, term, server_epoch = await self._raise_term(plan)
                    writer = _ShardWriter(producer, self._where.journal, plan, term, owner)
                    await writer.write(connection, progress)
                    await _anchor_read_models(connection, self._where.schema, plan, writer.anchors)
                    await self._anchor_redis(
                        plan, (term, owner, server_epoch), writer.anchors[plan.checkpoint.seq]
                    )
                    if plan.published.seq:
                        last[plan.shard] = (
                            await _fact(connection, plan.shard, plan.published.seq),
                            writer.anchors[plan.published.seq],
                        )
            await self._make_anew(connection, plans)
        publisher = Publisher(
            kafka=self._where.kafka, events=self._events, shards=self._where.shards, source=self._source,
            postgres=self._where.postgres, schema=self._where.schema, journal=self._where.journal,
        )  # fmt: skip
        await publisher.repeat(last)
        return progress.done - progress.first

    async def _raise_term(self, plan: ShardPlan) -> tuple[str, int, str]:
        """Takes the shard from any relay that may still run; its term is above every one that anybody
        knows.
        """
        owner = OWNER + secrets.token_hex(8)
        floor = max(cursor.term for _, cursor in [*plan.places, ("", plan.restored)])
        term, server_epoch, *_ = await run_script(
            self._redis, "raise_term", [self._keys.shard(plan.shard).state], [floor, owner]
        )
        return owner, int(term), server_epoch.decode()

    async def _make_anew(self, connection: AsyncConnection[Any], plans: Sequence[ShardPlan]) -> None:
        """Drops the versions that have events which are given up; what is shown begins anew, empty."""
        schema = self._where.schema
        for version in plans[0].anew if plans else ():
            try:
                if version.state == "live":
                    async with connection.transaction():
                        # Readers queue behind who waits for the views.
                        await connection.execute(
                            "SELECT set_config('lock_timeout', %s, true)", (f"{LOCK_SECONDS:.0f}s",)
                        )
                        await versions.replace_with_empty(
                            connection, schema, version.projection, self._where.shards
                        )
                    await use_schema(connection, schema)
                else:
                    await versions.discard(connection, schema, version)
            except versions.ViewsInUse as error:
                raise RebuildRefused(str(error)) from None
            except LockNotAvailable:
                raise RebuildRefused(
                    f"the views of {version.projection} are in use by open transactions: begin again when "
                    "these end"
                ) from None

    async def _anchor_redis(self, plan: ShardPlan, own: tuple[int, str, str], anchor: Cursor) -> None:
        state = self._keys.shard(plan.shard).state
        arguments = (
            *own,
            anchor.seq,
            anchor.head.hex(),
            anchor.next_offset,
            anchor.term,
            anchor.owner,
            plan.acknowledged,
        )
        try:
            if plan.acknowledged > anchor.seq:
                # Behind the new checkpoint it has a hole: its relay makes the shard anew from the journal.
                reason = (
                    f"the journal was restored to seq {anchor.seq}, what was acknowledged behind it is "
                    "given up"
                )
                await run_script(self._redis, "fence", [state], [*own, reason])
            await run_script(self._redis, "anchor", [state], arguments)
        except ResponseError as error:
            if str(error).startswith("LOST"):
                raise RebuildRefused(
                    f"shard {plan.shard}: {error}: stop the workers, and begin again"
                ) from None
            raise


class _Counter:
    """Events written so far, reported with their rate."""

    def __init__(self, total: int, first: int, report: ReportRebuild) -> None:
        self.first = self.done = first
        self._total, self._report, self._began = total, report, time.monotonic()

    def add(self, events: int) -> None:
        self.done += events
        rate = (self.done - self.first) / max(time.monotonic() - self._began, 1e-6)
        self._report(RebuildProgress("restoring the journal", self.done, self._total, rate))


class _ShardWriter:
    """Writes one partition: a marker, and blocks that end wherever somebody stands."""

    def __init__(
        self, producer: AIOKafkaProducer, topic: str, plan: ShardPlan, term: int, owner: str
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._plan = plan
        self._term = term
        self._owner = owner
        self._cursor = plan.restored
        #: seq → the cursor behind it in the restored journal, for each mark; who stands at 0 has read nothing
        #: yet
        self.anchors: dict[int, Cursor] = {0: Cursor(), **plan.found}

    async def write(self, connection: AsyncConnection[Any], progress: _Counter) -> None:
        """Writes what is not there yet."""
        shard, end = self._plan.shard, self._plan.end
        offset = await self._send(b"", marker_headers(shard, self._term, self._owner))
        self._cursor = self._cursor._replace(next_offset=offset + 1, term=self._term, owner=self._owner)
        try:
            async with aclosing(AuditSource(connection).lines(shard, self._cursor, end.seq)) as lists:
                async for _, lines, hashes in lists:
                    for first, last in self._cuts(lines):
                        await self._block(lines[first:last], hashes[last - 1])
                        progress.add(last - first)
        except (Corrupt, Gap) as error:
            raise Unreadable(str(error)) from None
        if (self._cursor.seq, self._cursor.head) != (end.seq, end.head):
            raise RebuildRefused(
                f"audit trail, shard {shard}: its events lead to seq {self._cursor.seq}, its cursor is at "
                f"seq {end.seq}"
            )

    def _cuts(self, lines: Sequence[bytes]) -> list[tuple[int, int]]:
        """Where blocks of these lines begin and end."""
        cuts, first, size = [], 0, 0
        for place, line in enumerate(lines, 1):
            size += len(line) + 1
            if (
                place - first >= BLOCK_EVENTS
                or size >= BLOCK_BYTES
                or self._cursor.seq + place in self._plan.marks
                or place == len(lines)
            ):
                cuts.append((first, place))
                first, size = place, 0
        return cuts

    async def _block(self, lines: Sequence[bytes], head: bytes) -> None:
        shard, before = self._plan.shard, self._cursor
        headers = block_headers(shard, self._term, self._owner, before.seq + 1, len(lines), before.head, head)
        offset = await self._send(b"\n".join(lines), headers)
        self._cursor = Cursor(before.seq + len(lines), head, offset + 1, self._term, self._owner)
        if self._cursor.seq in self._plan.marks:
            self.anchors[self._cursor.seq] = self._cursor

    async def _send(self, value: bytes, headers: list[tuple[str, bytes]]) -> int:
        metadata = await self._producer.send_and_wait(
            self._topic, value, partition=self._plan.shard, headers=headers
        )
        return int(metadata.offset)


async def _standing(connection: AsyncConnection[Any], version: Version, shard: int) -> Standing:
    table = sql.Identifier(version.schema, "projection_cursors")
    query = sql.SQL(
        "SELECT seq, head, next_offset, term, owner FROM {} WHERE projection = %s AND shard = %s"
    ).format(table)
    row = await (await connection.execute(query, (version.projection, shard))).fetchone()
    if row is None:
        raise RebuildRefused(
            f"{version.schema} has no cursor of shard {shard}: GRAB_SHARDS is not what the system was made "
            "with"
        )
    return Standing(version, Cursor(row[0], bytes(row[1]), *row[2:]))


def _without_what_is_lost(plans: Sequence[ShardPlan]) -> list[ShardPlan]:
    """The plans without those who are ahead of the audit trail: they are made anew. What is published cannot
    be taken back.
    """
    anew = tuple(
        {
            one.version.schema: one.version
            for plan in plans
            for one in plan.standings
            if one.cursor.seq > plan.end.seq
        }.values()
    )
    return [
        plan._replace(
            standings=tuple(one for one in plan.standings if one.version not in anew),
            checkpoint=plan.end if plan.checkpoint.seq > plan.end.seq else plan.checkpoint,
            given_up=max(0, *(cursor.seq - plan.end.seq for _, cursor in plan.places)),
            anew=anew,
        )
        for plan in plans
    ]


async def _problems(connection: AsyncConnection[Any], plan: ShardPlan, events: str) -> list[str]:
    """Who is ahead of the audit trail, or of another history, in words."""
    problems = []
    for who, cursor in plan.places:
        if cursor.seq > plan.end.seq:
            seqs = f"seq {plan.end.seq + 1} to {cursor.seq}"
            where = "is nowhere else"
            if plan.published.seq >= cursor.seq:
                where = (
                    f"stands on {events} only: its readers know it. To give it up, delete that topic "
                    "too, and add --republish"
                )
            problems.append(
                f"shard {plan.shard}: {who} is at seq {cursor.seq}, the audit trail ends at {plan.end.seq}; "
                f"the text of {seqs} {where}"
            )
        elif cursor.seq and await _hash(connection, plan.shard, cursor.seq) != cursor.head:
            problems.append(
                f"shard {plan.shard}: {who} is of another history than the audit trail at seq {cursor.seq}"
            )
    return problems


async def _hash(connection: AsyncConnection[Any], shard: int, seq: int) -> bytes | None:
    row = await (
        await connection.execute("SELECT hash FROM audit WHERE shard = %s AND seq = %s", (shard, seq))
    ).fetchone()
    return None if row is None else bytes(row[0])


async def _with_restored(reader: JournalReader, plan: ShardPlan, delete: str) -> ShardPlan:
    """The plan with what an earlier attempt wrote; raises Refused when events that are not from there are in
    the partition.

    Markers are no events: relays that took over in vain have left them. Their terms count, so the restore's
    own is above them. `delete` is the command that deletes the topic.
    """
    if beginning := await reader.beginning(plan.shard):
        raise RebuildRefused(
            f"shard {plan.shard}: the journal begins at offset {beginning}, what stood before was deleted: "
            f"{delete}"
        )
    cursor, found = Cursor(), {}
    try:
        async with aclosing(reader.read(plan.shard, 0, await reader.end(plan.shard))) as lists:
            async for records in lists:
                for record in records:
                    block = parse_block(record.headers, record.value)
                    if block.count and not block.owner.startswith(OWNER):
                        last = block.first_seq + block.count - 1
                        raise RebuildRefused(
                            f"shard {plan.shard}: events stand in the journal, seq {block.first_seq} to "
                            f"{last} at offset {record.offset}. "
                            "If they are the truth, nothing has to be restored. If they are what is left of "
                            "a lost journal, "
                            f"{delete}; what stands there and not in the audit trail is gone then"
                        )
                    cursor, accepted = cursor.feed(record.offset, block)
                    if accepted and cursor.seq in plan.marks:
                        found[cursor.seq] = cursor
    except (Corrupt, Gap) as error:
        raise RebuildRefused(
            f"shard {plan.shard}: what was restored before cannot be gone on with ({error}): {delete}"
        ) from None
    if missing := sorted(seq for seq in plan.marks if seq <= cursor.seq and seq not in found):
        raise RebuildRefused(
            f"shard {plan.shard}: cursors have moved to seq {missing[0]} since the last attempt: {delete}"
        )
    return plan._replace(restored=cursor, found=found)


async def _anchor_read_models(
    connection: AsyncConnection[Any], schema: str, plan: ShardPlan, anchors: Mapping[int, Cursor]
) -> None:
    """Gives the cursors of all versions, and the places where they stopped, their offsets in the restored
    journal.
    """
    async with connection.transaction():
        for version, cursor in plan.standings:
            anchor = anchors[cursor.seq]
            done = await connection.execute(
                sql.SQL(
                    "UPDATE {} SET next_offset = %s, term = %s, owner = %s, moved_at = now() "
                    "WHERE projection = %s AND shard = %s AND seq = %s AND head = %s"
                ).format(sql.Identifier(version.schema, "projection_cursors")),
                (
                    anchor.next_offset,
                    anchor.term,
                    anchor.owner,
                    version.projection,
                    plan.shard,
                    cursor.seq,
                    cursor.head,
                ),
            )
            if done.rowcount != 1:
                raise RebuildRefused(
                    f"{version.schema}, shard {plan.shard}: the cursor moves: stop the workers, and begin "
                    "again"
                )
            await connection.execute(
                sql.SQL("UPDATE {} SET journal_offset = %s WHERE shard = %s").format(
                    sql.Identifier(version.schema, "stopped_shards")
                ),
                (anchor.next_offset, plan.shard),
            )


async def _fact(connection: AsyncConnection[Any], shard: int, seq: int) -> Fact:
    found = await connection.execute(
        "SELECT body, hash FROM audit WHERE shard = %s AND seq = %s", (shard, seq)
    )
    row = await found.fetchone()
    assert row is not None, "the plan has found it"
    event = decode_event(row[0])
    return Fact(row[0].encode(), bytes(row[1]), event, transfers_of(event))
