"""Compares the audit trail with the journal, row by row."""

from collections.abc import AsyncGenerator, Sequence
from math import inf
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.events import AnyEvent
from grabstream.models.journal import Accepted
from grabstream.models.runs import AnyRun
from grabstream.ops.verification.checks import Problems
from grabstream.projections.checking.trail import COLUMNS, TrailRow, row_of, row_read
from grabstream.projections.tables.set_aside import SetAsideRecord


class AuditTrail:
    """The audit trail of a shard up to its cursor, compared row by row with the events of the journal.

    `rows` must be closed by the caller. `compared` counts events, `sound` is whether all were equal.
    """

    def __init__(self, connection: AsyncConnection[Any], shard: int, end: int, problems: Problems) -> None:
        self.rows = self._read(connection, shard)
        self.compared = 0
        self.sound = True
        self._shard = shard
        self._end = end
        self._problems = problems
        self._next: TrailRow | None = None

    @staticmethod
    async def _read(connection: AsyncConnection[Any], shard: int) -> AsyncGenerator[TrailRow, None]:
        async with connection.cursor(f"audit_{shard}") as rows:
            rows.itersize = 5_000
            await rows.execute(
                f"SELECT {COLUMNS} FROM audit WHERE shard = %s ORDER BY seq",  # noqa: S608 - no input
                (shard,),
            )
            async for values in rows:
                yield row_read(values)

    def _add_problem(self, seq: int, what: str) -> None:
        self.sound = False
        self._problems.add(f"shard {self._shard}, seq {seq}: {what}")

    async def _row_from(self, seq: float, set_aside: Sequence[SetAsideRecord] = ()) -> TrailRow | None:
        """The next row, which has this seq or a later one: rows before it are not in the journal."""
        while row := self._next or await anext(self.rows, None):
            self._next = row
            if row.seq >= seq:
                return row
            if not any(record.has(self._shard, row.seq) for record in set_aside):
                self._add_problem(row.seq, "the audit trail has a row that is not in the journal")
            self._next = None
        return None

    async def compare(self, accepted: Accepted, event: AnyEvent | AnyRun) -> None:
        """Compares the next line of the journal with its row."""
        first_seq = accepted.seq - event.seqs + 1
        row = await self._row_from(first_seq)
        if row is None or row.seq > first_seq:
            if first_seq > self._end:
                return  # the audit trail has not applied it yet
            self.compared += event.seqs
            self._add_problem(first_seq, "the audit trail lacks this event")
            return
        self._next = None
        self.compared += event.seqs
        expected = row_of(event, accepted.line.decode(), accepted.hash)._replace(seq=first_seq)
        if row != expected:
            fields = [
                name for name, is_, was in zip(TrailRow._fields, row, expected, strict=True) if is_ != was
            ]
            self._add_problem(
                first_seq,
                f"{' and '.join(fields)} of the audit trail {'differs' if len(fields) == 1 else 'differ'} "
                "from the journal",
            )

    async def end(self, set_aside: Sequence[SetAsideRecord]) -> None:
        """Reports the remaining rows: the journal has ended. Rows of events that were set aside are left out,
        since their record may be unreadable.
        """
        await self._row_from(inf, set_aside)
