"""Records that operators set aside: journal records that a projection could not apply, with their bytes, and
the amounts that the read model therefore lacks.

This concerns the version of the read model whose cursor was moved. Another version may have been built with
these events, and then lacks nothing; after a switch back, they are missing again.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.models.journal import Cursor, Headers
from grabstream.projections import cursors

#: Accounts that one line names.
SUMS_SHOWN_MAX: Final = 4


class SetAsideRecord(NamedTuple):
    """A record that was set aside: `event_count` events from `first_seq`, and the cursor after it.

    `offers` are the offers of its events, and `missing` the amounts that accounts lack (account, asset,
    amount). If some events cannot be read, `readable` is false, and both cover the other events only.
    """

    id: int
    projection: str
    shard: int
    journal_offset: int
    first_seq: int
    event_count: int
    after: Cursor
    value: bytes
    offers: Sequence[str]
    readable: bool
    missing: Sequence[tuple[str, str, int]]
    refused_because: str
    reason: str
    operator: str
    at: datetime

    @property
    def last_seq(self) -> int:
        """The seq of its last event."""
        return self.first_seq + self.event_count - 1

    def has(self, shard: int, seq: int) -> bool:
        """Whether an event is among its events."""
        return self.shard == shard and self.first_seq <= seq <= self.last_seq

    def in_words(self) -> str:
        """What the read model lacks, in one line."""
        where = f"{self.projection}, shard {self.shard}"
        if not self.event_count:
            return (
                f"a record without events of the history set aside in {where} by {self.operator}: "
                f"{self.reason}"
            )
        events = (
            f"1 event ({self.first_seq})"
            if self.event_count == 1
            else f"{self.event_count} events ({self.first_seq} to {self.last_seq})"
        )
        offers = ", ".join(self.offers) or "offers that cannot be read"
        more = "" if self.readable or not self.offers else " and others that cannot be read"
        sums = "; ".join(
            f"{account} {amount:+,} {asset}" for account, asset, amount in self.missing[:SUMS_SHOWN_MAX]
        )
        rest = (
            f" and {len(self.missing) - SUMS_SHOWN_MAX:,} more" if len(self.missing) > SUMS_SHOWN_MAX else ""
        )
        lacks = f" ({sums}{rest})" if sums and self.projection in ("ledger", "balances") else ""
        by = f"by {self.operator} ({self.reason})"
        return (
            f"{events} set aside in {where} {by}: {self.projection} lacks what it says of "
            f"{offers}{more}{lacks}"
        )


_COLUMNS = (
    "id, projection, shard, journal_offset, first_seq, count, head, term, owner, value, offers, readable, "
    "missing, "
    "refused_because, reason, operator, at"
)


async def load(connection: AsyncConnection[Any], projection: str | None = None) -> list[SetAsideRecord]:
    """The records that the live versions lack, in the order of the journal."""
    rows = await connection.execute(
        f"SELECT {_COLUMNS} FROM set_aside_records "  # noqa: S608 - the columns are those above
        "WHERE read_model IN (SELECT schema FROM read_models WHERE state = 'live') "
        "AND (%s::text IS NULL OR projection = %s) ORDER BY projection, shard, journal_offset",
        (projection, projection),
    )
    return [_from_row(*row) for row in await rows.fetchall()]


def _from_row(
    id: int, projection: str, shard: int, offset: int, first_seq: int, count: int, head: bytes, term: int,
    owner: str, value: bytes,
    *rest: Any,
) -> SetAsideRecord:  # fmt: skip
    after = Cursor(first_seq + count - 1, bytes(head), offset + 1, term, owner)
    return SetAsideRecord(id, projection, shard, offset, first_seq, count, after, bytes(value), *rest)


def _as_json(headers: Headers) -> str:
    """Headers as the table keeps them. Any client may have written them: PostgreSQL has no zero byte in
    texts, and a value may be null.
    """
    return json.dumps([[name.replace("\0", "\\x00"), bytes(text or b"").hex()] for name, text in headers])


async def set_aside(
    connection: AsyncConnection[Any], projection: str, shard: int, before: Cursor, after: Cursor,
    headers: Headers, value: bytes,
    offers: Sequence[str], readable: bool, missing: Sequence[tuple[str, str, int]], refused_because: str,
    reason: str, operator: str,
    cursor_in_postgres: bool,
) -> None:  # fmt: skip
    """In one transaction, stores a record as set aside, moves the cursor after it, and resumes the
    projection.

    The connection must use the version of the read model that stopped. `cursor_in_postgres` is false for a
    projection whose cursor is elsewhere: it reads these rows to continue after the record. Raises CursorMoved
    when the projection has moved or was resumed.
    """
    async with connection.transaction():
        if cursor_in_postgres:
            await cursors.advance(connection, projection, {shard: (before, after)})
        await connection.execute(
            "INSERT INTO set_aside_records (projection, read_model, shard, journal_offset, first_seq, count, "
            "head, term, owner, headers, "
            "value, value_sha256, offers, readable, missing, refused_because, reason, operator) "
            "VALUES (%s, current_schema(), %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                projection, shard, after.next_offset - 1, before.seq + 1, after.seq - before.seq,
                after.head, after.term, after.owner,
                _as_json(headers), value,
                sha256(value).digest(),
                list(offers), readable, json.dumps(missing), refused_because, reason, operator,
            ),
        )  # fmt: skip
        if not await cursors.resume(connection, projection, shard):
            raise cursors.CursorMoved(f"{projection}, shard {shard}: is no longer stopped")


async def carry_over(connection: AsyncConnection[Any], records: Sequence[SetAsideRecord]) -> None:
    """Records, in the caller's transaction, that the version used by the connection lacks these records too,
    for the same reasons.
    """
    columns = (
        "shard, journal_offset, first_seq, count, head, term, owner, headers, value, value_sha256, offers, "
        "readable, missing, "
        "refused_because, reason, operator, at"
    )
    await connection.execute(
        f"INSERT INTO set_aside_records (projection, read_model, {columns}) "  # noqa: S608 - the columns are those above
        f"SELECT projection, current_schema(), {columns} FROM set_aside_records WHERE id = ANY(%s)",
        ([record.id for record in records],),
    )


def past(records: Sequence[SetAsideRecord], shard: int, cursor: Cursor) -> Cursor:
    """The cursor, moved after all records that were set aside directly after it."""
    for record in records:
        # Markers may be between the cursor and the record; they have no events.
        if (
            record.shard == shard
            and record.first_seq == cursor.seq + 1
            and record.journal_offset >= cursor.next_offset
        ):
            cursor = record.after
    return cursor
