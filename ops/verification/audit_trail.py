"""The audit trail against the journal, row by row."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from grabstream.models.events import AnyEvent
from grabstream.models.journal import Accepted
from grabstream.ops.verification.checks import Problems
from grabstream.projections.records.set_aside import SetAside


class Lacks:
    """The events that one projection lacks, as operators decided."""

    def __init__(self, aside: Sequence[SetAside], projection: str) -> None:
        self._spans = [
            (one.shard, one.first_seq, one.last_seq)
            for one in aside
            if one.projection == projection and one.event_count
        ]

    def has(self, shard: int, seq: int) -> bool:
        """Whether it lacks this one."""
        return any(of == shard and first <= seq <= last for of, first, last in self._spans)


class TrailRow(NamedTuple):
    """A row of the audit trail."""

    seq: int
    offer: str
    type: str
    at: int
    body: str
    hash: bytes


class AuditTrail:
    """The audit trail of a shard up to its cursor, held row by row against what the journal has."""

    def __init__(self, connection: AsyncConnection[Any], shard: int, end: int, problems: Problems) -> None:
        self.rows = self._read(connection, shard)
        self.compared = 0
        self.sound = True
        self._shard = shard
        self._end = end
        self._problems = problems
        self._next: TrailRow | None = None
        self._began = False
        self._active = True

    @staticmethod
    async def _read(connection: AsyncConnection[Any], shard: int) -> AsyncGenerator[TrailRow, None]:
        async with connection.cursor(f"audit_{shard}") as rows:
            rows.itersize = 5_000
            await rows.execute(
                "SELECT seq, offer, type, at, body, hash FROM audit WHERE shard = %s ORDER BY seq", (shard,)
            )
            async for seq, offer, type_, at, body, hash_ in rows:
                yield TrailRow(seq, offer, type_, at, body, bytes(hash_))

    @property
    def ended(self) -> "AuditTrail":
        """The same, with nothing more to be compared."""
        self._active = False
        return self

    async def _row(self) -> TrailRow | None:
        if not self._began:
            self._began = True
            await self._step()
        return self._next

    async def _step(self) -> None:
        self._next = await anext(self.rows, None)

    def _wrong(self, seq: int, what: str) -> None:
        self.sound = False
        self._problems.add(f"shard {self._shard}, seq {seq}: {what}")

    async def compare(self, one: Accepted, event: AnyEvent) -> None:
        """The row of the next event."""
        if not self._active:
            return
        while (row := await self._row()) is not None and row.seq < one.seq:
            self._wrong(row.seq, "the audit trail has a row that the journal has not")
            await self._step()
        if row is None or row.seq > one.seq:
            if one.seq > self._end:
                return  # still to come
            self.compared += 1
            self._wrong(one.seq, "the audit trail lacks this event")
            return
        self.compared += 1
        said = TrailRow(
            one.seq, event.offer, str(event.__struct_config__.tag), event.at, one.line.decode(), one.hash
        )
        if row != said:
            fields = [name for name, is_, was in zip(TrailRow._fields, row, said, strict=True) if is_ != was]
            self._wrong(
                one.seq,
                f"{' and '.join(fields)} of the audit trail {'differs' if len(fields) == 1 else 'differ'} "
                "from the journal",
            )
        await self._step()

    async def end(self, lacks: Lacks) -> None:
        """What is left belongs to nothing; but where events were set aside, the row may be of a record that
        cannot be read.
        """
        while (row := await self._row()) is not None:
            if not lacks.has(self._shard, row.seq):
                self._wrong(row.seq, "the audit trail has a row that the journal has not")
            await self._step()

    async def rest(self, seq: int) -> AsyncGenerator[TrailRow, None]:
        """The rows behind a seq."""
        while (row := await self._row()) is not None:
            if row.seq > seq:
                yield row
            await self._step()
