"""Places in the journal that cursors and Redis name: whether they exist there, with the same hash."""

from collections.abc import Mapping, Sequence

from grabstream.models.journal import Accepted, Cursor
from grabstream.ops.verification.checks import RedisShard


class Marks:
    """Places in a shard's journal that others know of: the cursors of the read models, and Redis'
    checkpoint.
    """

    def __init__(self, shard: int, cursors: Mapping[str, Cursor], redis: RedisShard) -> None:
        self._shard = shard
        self._cursors = cursors
        self._met: dict[str, Cursor] = {
            name: Cursor() for name, cursor in cursors.items() if cursor.next_offset == 0
        }
        self._redis = redis
        self._head = b"" if redis.journaled_seq else redis.journaled_head
        self._at_checkpoint: Cursor | None = None

    def after(self, offset: int, cursor: Cursor, accepted: Sequence[Accepted]) -> None:
        """The next record: its offset, the cursor behind it, and its events."""
        for name, one in self._cursors.items():
            if one.next_offset == offset + 1:
                self._met[name] = cursor
        if self._redis.journaled_offset == offset + 1:
            self._at_checkpoint = cursor
        if accepted and accepted[0].seq <= self._redis.journaled_seq <= accepted[-1].seq:
            self._head = accepted[self._redis.journaled_seq - accepted[0].seq].hash

    def problems(self, broken: bool) -> list[tuple[str, str]]:
        """Cursors that are not as the journal has them at their offset: whose, and what is wrong."""
        lines = []
        for name, one in self._cursors.items():
            there = self._met.get(name)
            if there is None and not broken:
                lines.append(
                    (
                        name,
                        f"{name}, shard {self._shard}: no record of the journal ends at offset "
                        f"{one.next_offset}",
                    )
                )
            elif there is not None and there != one:
                fields = [
                    (name_, is_, was)
                    for name_, is_, was in zip(Cursor._fields, one, there, strict=True)
                    if is_ != was
                ]
                what = ", ".join(
                    f"{field} is {as_hex(is_)}, the journal has {as_hex(was)}" for field, is_, was in fields
                )
                lines.append(
                    (name, f"{name}, shard {self._shard}, the cursor: {what} at offset {one.next_offset}")
                )
        return lines

    def checkpoint(self, end: Cursor) -> str:
        """What is wrong with Redis' checkpoint; '' when nothing is."""
        if self._redis.journaled_seq > end.seq:
            return (
                f"shard {self._shard}: Redis knows seq {self._redis.journaled_seq} as journaled, the "
                f"journal ends at {end.seq}"
            )
        if self._head != self._redis.journaled_head:
            seq, known = self._redis.journaled_seq, as_hex(self._redis.journaled_head)
            return (
                f"shard {self._shard}: the hash that Redis knows at seq {seq} is {known}, the journal's "
                f"is {as_hex(self._head)}"
            )
        # While a shard is being recovered its checkpoint moves under the new owner's term.
        return self._checkpoint_place() if self._redis.journaled_seq and self._redis.decides else ""

    def _checkpoint_place(self) -> str:
        """What is wrong with where the checkpoint says that the journal goes on."""
        known, there = self._redis, self._at_checkpoint
        if there is None:
            return (
                f"shard {self._shard}: no record of the journal ends at offset {known.journaled_offset}, "
                "where Redis' checkpoint is"
            )
        said = {"seq": known.journaled_seq, "term": known.journaled_term, "owner": known.journaled_owner}
        wrong = [
            f"{name} is {is_}, the journal has {was}"
            for name, is_ in said.items()
            if (was := getattr(there, name)) != is_
        ]
        where = f"at offset {known.journaled_offset}"
        return f"shard {self._shard}, Redis' checkpoint: {', '.join(wrong)} {where}" if wrong else ""


def as_hex(value: object) -> object:
    """The beginning of a hash, for people."""
    return f"{value.hex()[:16]}…" if isinstance(value, bytes) else value
