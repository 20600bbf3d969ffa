"""Restoring a lost journal from the audit trail: the same events with the same chain, at new offsets.

1. Check that nothing has more events than the audit trail.
2. Per shard: raise the term, append a marker, and then the events, in blocks that end wherever a cursor is.
3. Anchor every cursor by its seq and hash, that is, give it its new offset: the cursors of the read models,
the checkpoint in Redis, and the publisher's cursor, by repeating the last event that it published.

Every step may be repeated after an interruption.

Events that a read model or Redis has, but not the audit trail, are given up only if that is accepted. Then
the shard in Redis is fenced, and its relay rebuilds it from the journal. A version of a read model that had
such events is dropped; a live one starts over, empty.
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

from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.lua.server import raise_term
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import (
    SIGNED_OWNER,
    Corrupt,
    Cursor,
    Gap,
    block_headers,
    is_signed_owner,
    marker_headers,
)
from grabstream.models.runs import decode_line
from grabstream.models.transfers import transfers_of
from grabstream.projections import versions
from grabstream.projections.checking import trail
from grabstream.projections.cursors import Fact
from grabstream.projections.database.locks import LockTaken, lock_or_raise
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import Version
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.history.sources import AuditSource
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.journal_keys import journal_keys
from grabstream.streams.projecting.publisher import Publisher, newest_cursor
from grabstream.streams.rebuilding.reading import RebuildStopped, Servers, UnreadableSource
from grabstream.streams.rebuilding.rebuild import RebuildProgress, ReportRebuild, hold_projection
from grabstream.streams.rebuilding.switching import LOCK_SECONDS
from grabstream.streams.relaying.leases import text_of
from grabstream.streams.topics import delete_command

OWNER: Final = "restored-"
BLOCK_EVENTS: Final = 1_000
BLOCK_BYTES: Final = RECORD_BYTES_MAX // 4


class VersionCursor(NamedTuple):
    """The cursor of a read model version in a shard. The restored journal must contain its seq and hash."""

    version: Version
    cursor: Cursor


class ShardPlan(NamedTuple):
    """The restore of a shard, up to the cursor `end` of the audit trail.

    `version_cursors`, `checkpoint` (of Redis) and `published` (on `grab.events`) are anchored. `restored` is
    the cursor that an interrupted attempt has reached, and `anchored` are the anchors in what it wrote.
    `acknowledged` is the seq of the checkpoint in Redis. `given_up` is the number of events after `end` that
    a read model, Redis or `grab.events` has, and `restarted` are the versions that have such events, in any
    shard.
    """

    shard: int
    end: Cursor
    version_cursors: tuple[VersionCursor, ...]
    checkpoint: Cursor
    published: Cursor
    restored: Cursor = Cursor()
    anchored: Mapping[int, Cursor] = {}
    acknowledged: int = 0
    given_up: int = 0
    restarted: tuple[Version, ...] = ()

    @property
    def cursors(self) -> list[tuple[str, Cursor]]:
        """Every cursor that is anchored, after the name of its owner in words."""
        named = [
            (f"{version.projection} ({version.schema})", cursor) for version, cursor in self.version_cursors
        ]
        return [
            *named,
            ("the checkpoint in Redis", self.checkpoint),
            ("the events topic", self.published),
        ]

    @property
    def marks(self) -> set[int]:
        """The seqs of these cursors, at which blocks end."""
        return {cursor.seq for _, cursor in self.cursors if cursor.seq}


class Restore:
    """The restore of one system's journal: `plan` only checks, `run` writes.

    `redis` must not decode replies. With `republish`, `grab.events` was lost too, and is rebuilt from the
    beginning. With `accept_loss`, events that the audit trail lacks are given up.
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

    # -- planning --------------------------------------------------------------------------------------------

    async def plan(self) -> list[ShardPlan]:
        """The plan of the restore. Raises RebuildStopped, which names what has more events than the audit
        trail, or another history.
        """
        async with (
            await connect(self._where.postgres, self._where.schema) as connection,
            open_reader(self._where.kafka, self._where.journal) as journal,
            open_reader(self._where.kafka, self._events) as events,
        ):
            await use_schema(connection, self._where.schema)
            problems: list[str] = []
            delete = (
                f"delete the topic (`{delete_command(self._where.kafka, self._where.journal)}`), and "
                "begin again"
            )
            existing = await self._existing(connection)
            plans = [
                await self._shard_plan(connection, events, shard, existing)
                for shard in range(self._where.shards)
            ]
            if self._accept_loss:
                plans = _accepting_loss(plans)
            for index, plan in enumerate(plans):
                problems += await _problems(connection, plan, self._events)
                plans[index] = await _with_restored(journal, plan, delete)
        if journal_keys().signer is None and any(
            is_signed_owner(cursor.owner) for plan in plans for _, cursor in plan.cursors
        ):
            problems.append(
                "the journal was signed: set GRAB_JOURNAL_KEYS, so that the new one is signed too"
            )
        if problems:
            if not self._accept_loss and any(
                cursor.seq > plan.end.seq for plan in plans for _, cursor in plan.cursors
            ):
                problems.append(
                    "--accept-loss gives up the events that the audit trail lacks: "
                    "read models and shards that have them are rebuilt without them"
                )
            raise RebuildStopped(
                "the journal cannot be restored without losing events:\n  " + "\n  ".join(problems)
            )
        return plans

    async def _existing(self, connection: AsyncConnection[Any]) -> list[Version]:
        """The versions of read models that have tables. Raises RebuildStopped if the audit trail has none."""
        existing = [
            version
            for version in await versions.versions(connection, self._where.schema)
            if version.projection in PROJECTIONS
        ]
        gone = await versions.lost(connection, existing)
        if any((version.projection, version.state) == ("audit", "live") for version in gone):
            raise RebuildStopped(
                "the tables of the audit trail are gone "
                f"({', '.join(version.schema for version in gone)}): restore their backup"
            )
        return [version for version in existing if version not in gone]

    async def _shard_plan(
        self, connection: AsyncConnection[Any], events: JournalReader, shard: int, existing: Sequence[Version]
    ) -> ShardPlan:
        """The state of a shard, before what is to be restored is known. Raises RebuildStopped while a worker
        relays it.
        """
        holder = await self._redis.get(self._keys.shard(shard).lease)
        if holder is not None:
            raise RebuildStopped(f"shard {shard} is relayed by {text_of(holder)}: stop the workers first")
        cursors = [
            await _load_cursor(connection, version, shard)
            for version in existing
            if version.state != "discarded"
        ]
        [end] = [
            cursor for version, cursor in cursors if (version.projection, version.state) == ("audit", "live")
        ]
        checkpoint, published = await self._checkpoint(shard), await self._published(events, shard, end)
        return ShardPlan(shard, end, tuple(cursors), checkpoint, published, acknowledged=checkpoint.seq)

    async def _published(self, reader: JournalReader, shard: int, end: Cursor) -> Cursor:
        """The cursor of the events topic. If the topic is empty, the audit trail's end, so that nothing is
        published again, unless `republish` is set.
        """
        if self._republish and await reader.end(shard):
            raise RebuildStopped(
                f"--republish: topic {self._events} is not empty; its events would be published twice"
            )
        # The journal that its offset belongs to is lost: the audit trail shows whether it is of this history.
        newest = await newest_cursor(reader, shard, self._source)
        return newest if newest.seq or self._republish else end

    async def _checkpoint(self, shard: int) -> Cursor:
        fields = await self._redis.hmget(self._keys.shard(shard).state, ["journaled_seq", "journaled_head"])
        if fields[0] is None:
            return Cursor()
        return Cursor(int(fields[0]), bytes.fromhex(fields[1].decode()))

    # -- restoring -------------------------------------------------------------------------------------------

    async def run(self, plans: Sequence[ShardPlan], report: ReportRebuild = lambda progress: None) -> int:
        """Restores and anchors; returns the number of events written. Raises RebuildStopped if the chain of
        the audit trail is broken.
        """
        progress = _Counter(
            sum(plan.end.seq for plan in plans), sum(plan.restored.seq for plan in plans), report
        )
        async with await connect(self._where.postgres, self._where.schema) as connection:
            await use_schema(connection, self._where.schema)
            try:
                await lock_or_raise(connection, f"grabstream-restore-{self._where.schema}", "rebuild journal")
            except LockTaken as held:
                raise RebuildStopped(f"the journal is being restored already: {held}") from None
            for projection in PROJECTIONS:
                await hold_projection(connection, self._where.schema, projection, "rebuild journal")
            last: dict[int, tuple[Fact, Cursor]] = {}
            producer = AIOKafkaProducer(
                **brokers.at(self._where.kafka),
                enable_idempotence=True,
                acks="all",
                max_request_size=RECORD_BYTES_MAX,
            )
            async with started(producer):
                for plan in plans:
                    owner, term, server_epoch = await self._raise_term(plan)
                    writer = _ShardWriter(producer, self._where.journal, plan, term, owner)
                    await writer.write(connection, progress)
                    await _anchor_read_models(connection, plan, writer.anchors)
                    await self._anchor_redis(
                        plan, (term, owner, server_epoch), writer.anchors[plan.checkpoint.seq]
                    )
                    if plan.published.seq:
                        last[plan.shard] = (
                            await _fact(connection, plan.shard, plan.published.seq),
                            writer.anchors[plan.published.seq],
                        )
            await self._restart_versions(connection, plans)
        publisher = Publisher(
            kafka=self._where.kafka, events=self._events, shards=self._where.shards, source=self._source,
            postgres=self._where.postgres, schema=self._where.schema, journal=self._where.journal,
        )  # fmt: skip
        await publisher.repeat(last)
        return progress.done - progress.first

    async def _raise_term(self, plan: ShardPlan) -> tuple[str, int, str]:
        """Takes the shard from any relay that may still run, by a term above every known one."""
        owner = OWNER + secrets.token_hex(8) + (SIGNED_OWNER if journal_keys().signer else "")
        floor = max(cursor.term for _, cursor in [*plan.cursors, ("", plan.restored)])
        (term, server_epoch, *_), _ = await raise_term(
            self._redis, self._keys.shard(plan.shard).state, floor, owner
        )
        return owner, int(term), server_epoch.decode()

    async def _restart_versions(self, connection: AsyncConnection[Any], plans: Sequence[ShardPlan]) -> None:
        """Drops the versions that have events which are given up. A live version starts again, empty."""
        schema = self._where.schema
        for version in plans[0].restarted if plans else ():
            try:
                if version.state == "live":
                    async with connection.transaction():
                        # Readers queue behind a session that waits for the views.
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
                raise RebuildStopped(str(error)) from None
            except LockNotAvailable:
                raise RebuildStopped(
                    f"the views of {version.projection} are in use by open transactions: start again after "
                    "they have ended"
                ) from None

    async def _anchor_redis(self, plan: ShardPlan, ownership: tuple[int, str, str], anchor: Cursor) -> None:
        state = self._keys.shard(plan.shard).state
        arguments = (
            *ownership,
            anchor.seq,
            anchor.head.hex(),
            anchor.next_offset,
            anchor.term,
            anchor.owner,
            plan.acknowledged,
        )
        try:
            if plan.acknowledged > anchor.seq:
                # After the new checkpoint it has a hole: its relay rebuilds the shard from the journal.
                reason = (
                    f"the journal was restored to seq {anchor.seq}, acknowledged events after it are given up"
                )
                await run_script(self._redis, "fence", [state], [*ownership, reason])
            await run_script(self._redis, "anchor", [state], arguments)
        except ResponseError as error:
            if str(error).startswith("LOST"):
                raise RebuildStopped(
                    f"shard {plan.shard}: {error}: stop the workers, and start again"
                ) from None
            raise


class _Counter:
    """Counts the events written, and reports them with their rate."""

    def __init__(self, total: int, first: int, report: ReportRebuild) -> None:
        self.first = self.done = first
        self._total, self._report, self._began = total, report, time.monotonic()

    def add(self, events: int) -> None:
        self.done += events
        rate = (self.done - self.first) / max(time.monotonic() - self._began, 1e-6)
        self._report(RebuildProgress("restoring the journal", self.done, self._total, rate))


class _ShardWriter:
    """Writes one partition: a marker, and blocks that end at the marks of the plan."""

    def __init__(
        self, producer: AIOKafkaProducer, topic: str, plan: ShardPlan, term: int, owner: str
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._plan = plan
        self._term = term
        self._owner = owner
        self._cursor = plan.restored
        #: For each mark, the cursor after that seq in the restored journal. A cursor at seq 0 has read
        #: nothing yet.
        self.anchors: dict[int, Cursor] = {0: Cursor(), **plan.anchored}

    async def write(self, connection: AsyncConnection[Any], progress: _Counter) -> None:
        """Writes the events that are not restored yet."""
        shard, end = self._plan.shard, self._plan.end
        offset = await self._send(b"", marker_headers(shard, self._term, self._owner))
        self._cursor = self._cursor._replace(next_offset=offset + 1, term=self._term, owner=self._owner)
        try:
            async with aclosing(AuditSource(connection).lines(shard, self._cursor, end.seq)) as lists:
                async for _, lines, hashes, last_seqs in lists:
                    for first, last in self._cuts(lines, last_seqs):
                        before = self._cursor.seq
                        await self._block(lines[first:last], hashes[last - 1], last_seqs[last - 1])
                        progress.add(self._cursor.seq - before)
        except (Corrupt, Gap) as error:
            raise UnreadableSource(str(error)) from None
        if (self._cursor.seq, self._cursor.head) != (end.seq, end.head):
            raise RebuildStopped(
                f"audit trail, shard {shard}: its events lead to seq {self._cursor.seq}, its cursor is at "
                f"seq {end.seq}"
            )

    def _cuts(self, lines: Sequence[bytes], last_seqs: Sequence[int]) -> list[tuple[int, int]]:
        """The first and last index of each block of these lines."""
        cuts, first, size = [], 0, 0
        for index, (line, last_seq) in enumerate(zip(lines, last_seqs, strict=True), 1):
            size += len(line) + 1
            if (
                index - first >= BLOCK_EVENTS
                or size >= BLOCK_BYTES
                or last_seq in self._plan.marks
                or index == len(lines)
            ):
                cuts.append((first, index))
                first, size = index, 0
        return cuts

    async def _block(self, lines: Sequence[bytes], head: bytes, last_seq: int) -> None:
        shard, before = self._plan.shard, self._cursor
        headers = block_headers(
            shard, self._term, self._owner, before.seq + 1, len(lines), before.head, head,
            last_seq - before.seq,
        )  # fmt: skip
        offset = await self._send(b"\n".join(lines), headers)
        self._cursor = Cursor(last_seq, head, offset + 1, self._term, self._owner)
        if self._cursor.seq in self._plan.marks:
            self.anchors[self._cursor.seq] = self._cursor

    async def _send(self, value: bytes, headers: list[tuple[str, bytes]]) -> int:
        if signer := journal_keys().signer:
            headers = signer.signed(self._topic, self._plan.shard, headers)
        metadata = await self._producer.send_and_wait(
            self._topic, value, partition=self._plan.shard, headers=headers
        )
        return int(metadata.offset)


async def _load_cursor(connection: AsyncConnection[Any], version: Version, shard: int) -> VersionCursor:
    table = sql.Identifier(version.schema, "projection_cursors")
    query = sql.SQL(
        "SELECT seq, head, next_offset, term, owner FROM {} WHERE projection = %s AND shard = %s"
    ).format(table)
    row = await (await connection.execute(query, (version.projection, shard))).fetchone()
    if row is None:
        raise RebuildStopped(
            f"{version.schema} has no cursor of shard {shard}: GRAB_SHARDS differs from the system's "
            "number of shards"
        )
    return VersionCursor(version, Cursor(row[0], bytes(row[1]), *row[2:]))


def _accepting_loss(plans: Sequence[ShardPlan]) -> list[ShardPlan]:
    """The plans with the loss accepted: versions ahead of the audit trail are restarted, not anchored.
    Published events cannot be taken back.
    """
    restarted = tuple(
        {
            version.schema: version
            for plan in plans
            for version, cursor in plan.version_cursors
            if cursor.seq > plan.end.seq
        }.values()
    )
    return [
        plan._replace(
            version_cursors=tuple(each for each in plan.version_cursors if each.version not in restarted),
            checkpoint=plan.end if plan.checkpoint.seq > plan.end.seq else plan.checkpoint,
            given_up=max(0, *(cursor.seq - plan.end.seq for _, cursor in plan.cursors)),
            restarted=restarted,
        )
        for plan in plans
    ]


async def _problems(connection: AsyncConnection[Any], plan: ShardPlan, events: str) -> list[str]:
    """The cursors that are ahead of the audit trail, or have another history, in words."""
    problems = []
    for owner, cursor in plan.cursors:
        if cursor.seq > plan.end.seq:
            seqs = f"seq {plan.end.seq + 1} to {cursor.seq}"
            where = "exists nowhere else"
            if plan.published.seq >= cursor.seq:
                where = (
                    f"is on {events} only, and its readers may have it. To give it up, delete that topic "
                    "too, and add --republish"
                )
            problems.append(
                f"shard {plan.shard}: {owner} is at seq {cursor.seq}, the audit trail ends at "
                f"{plan.end.seq}; "
                f"the text of {seqs} {where}"
            )
        elif cursor.seq and await trail.hash_at(connection, plan.shard, cursor.seq) != cursor.head:
            problems.append(
                f"shard {plan.shard}: {owner} has another history than the audit trail at seq {cursor.seq}"
            )
    return problems


async def _with_restored(reader: JournalReader, plan: ShardPlan, delete: str) -> ShardPlan:
    """The plan with the cursor and anchors of an interrupted attempt; raises RebuildStopped if the partition
    contains events that no restore wrote.

    Markers of relays whose takeover failed are allowed. Their terms count, so the term of the restore is
    above them. `delete` is the command that deletes the topic.
    """
    if beginning := await reader.beginning(plan.shard):
        raise RebuildStopped(
            f"shard {plan.shard}: the journal begins at offset {beginning}, earlier records were deleted: "
            f"{delete}"
        )
    cursor, anchored = Cursor(), {}
    try:
        async with aclosing(reader.read(plan.shard, 0, await reader.end(plan.shard))) as lists:
            async for records in lists:
                for record in records:
                    block = reader.block(record)
                    if block.count and not cursor.ignores(block) and not block.owner.startswith(OWNER):
                        raise RebuildStopped(
                            f"shard {plan.shard}: the journal contains events, seq {block.first_seq} to "
                            f"{block.last_seq} at offset {record.offset}. "
                            "If they are the truth, nothing has to be restored. If they are the rest of a "
                            f"lost journal, {delete}; events that the audit trail lacks are then lost"
                        )
                    cursor, accepted = cursor.feed(record.offset, block)
                    if accepted and cursor.seq in plan.marks:
                        anchored[cursor.seq] = cursor
    except (Corrupt, Gap) as error:
        raise RebuildStopped(
            f"shard {plan.shard}: the interrupted restore cannot be continued ({error}): {delete}"
        ) from None
    if missing := sorted(seq for seq in plan.marks if seq <= cursor.seq and seq not in anchored):
        raise RebuildStopped(
            f"shard {plan.shard}: cursors have moved to seq {missing[0]} since the last attempt: {delete}"
        )
    return plan._replace(restored=cursor, anchored=anchored)


async def _anchor_read_models(
    connection: AsyncConnection[Any], plan: ShardPlan, anchors: Mapping[int, Cursor]
) -> None:
    """Gives the cursors of all versions, and their stopped shards, the offsets of the restored journal."""
    async with connection.transaction():
        for version, cursor in plan.version_cursors:
            anchor = anchors[cursor.seq]
            updated = await connection.execute(
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
            if updated.rowcount != 1:
                raise RebuildStopped(
                    f"{version.schema}, shard {plan.shard}: the cursor moved: stop the workers, and start "
                    "again"
                )
            await connection.execute(
                sql.SQL("UPDATE {} SET journal_offset = %s WHERE shard = %s").format(
                    sql.Identifier(version.schema, "stopped_shards")
                ),
                (anchor.next_offset, plan.shard),
            )


async def _fact(connection: AsyncConnection[Any], shard: int, seq: int) -> Fact:
    line = await trail.line_at(connection, shard, seq)
    assert line is not None, "the plan has read it"
    event = decode_line(line.text)
    return Fact(line.text, line.hash, event, transfers_of(event))
