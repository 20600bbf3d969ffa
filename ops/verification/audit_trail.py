"""Compares the audit trail with the journal, row by row."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.journal import Accepted
from grabstream.models.runs import AnyLine
from grabstream.ops.verification.checks import Problems
from grabstream.projections.checking.trail import Row, row_of, row_read
from grabstream.projections.records.set_aside import SetAside


class SetAsideEvents:
    """The events that one projection lacks because operators set them aside."""

    def __init__(self, records: Sequence[SetAside], projection: str) -> None:
        self._spans = [
            (record.shard, record.first_seq, record.last_seq)
            for record in records
            if record.projection == projection and record.event_count
        ]

    def has(self, shard: int, seq: int) -> bool:
        """Whether the event was set aside."""
        return any(of == shard and first <= seq <= last for of, first, last in self._spans)


class AuditTrail:
    """The audit trail of a shard up to its cursor, compared row by row with the events of the journal.

    `rows` must be closed by the caller. `compared` counts events, `sound` is whether none differed.
    """

    def __init__(self, connection: AsyncConnection[Any], shard: int, end: int, problems: Problems) -> None:
        self.rows = self._read(connection, shard)
        self.compared = 0
        self.sound = True
        self._shard = shard
        self._end = end
        self._problems = problems
        self._next: Row | None = None
        self._began = False
        self._active = True

    @staticmethod
    async def _read(connection: AsyncConnection[Any], shard: int) -> AsyncGenerator[Row, None]:
        async with connection.cursor(f"audit_{shard}") as rows:
            rows.itersize = 5_000
            await rows.execute(
                "SELECT seq, offer, type, at, body, hash, seqs FROM audit WHERE shard = %s ORDER BY seq",
                (shard,),
            )
            async for values in rows:
                yield row_read(values)

    def stop_comparing(self) -> None:
        """Makes `compare` do nothing from now on."""
        self._active = False

    async def _row(self) -> Row | None:
        if not self._began:
            self._began = True
            await self._step()
        return self._next

    async def _step(self) -> None:
        self._next = await anext(self.rows, None)

    def _add_problem(self, seq: int, what: str) -> None:
        self.sound = False
        self._problems.add(f"shard {self._shard}, seq {seq}: {what}")

    async def compare(self, accepted: Accepted, event: AnyLine) -> None:
        """Compares the next line of the journal with its row."""
        if not self._active:
            return
        seqs = event.seqs
        first_seq = accepted.seq - seqs + 1
        while (row := await self._row()) is not None and row.seq < first_seq:
            self._add_problem(row.seq, "the audit trail has a row that is not in the journal")
            await self._step()
        if row is None or row.seq > first_seq:
            if first_seq > self._end:
                return  # the audit trail has not applied it yet
            self.compared += seqs
            self._add_problem(first_seq, "the audit trail lacks this event")
            return
        self.compared += seqs
        expected = row_of(event, accepted.line.decode(), accepted.hash)._replace(seq=first_seq)
        if row != expected:
            fields = [name for name, is_, was in zip(Row._fields, row, expected, strict=True) if is_ != was]
            self._add_problem(
                first_seq,
                f"{' and '.join(fields)} of the audit trail {'differs' if len(fields) == 1 else 'differ'} "
                "from the journal",
            )
        await self._step()

    async def end(self, set_aside: SetAsideEvents) -> None:
        """Reports the remaining rows: the journal has ended. Rows of events that were set aside are left out,
        since their record may be unreadable.
        """
        while (row := await self._row()) is not None:
            if not set_aside.has(self._shard, row.seq):
                self._add_problem(row.seq, "the audit trail has a row that is not in the journal")
            await self._step()

    async def rest(self, seq: int) -> AsyncGenerator[Row, None]:
        """The rows after a seq."""
        while (row := await self._row()) is not None:
            if row.seq > seq:
                yield row
            await self._step()
