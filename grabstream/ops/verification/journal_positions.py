"""Compares positions with the journal: those of the read models' cursors and of Redis' checkpoint."""

from collections.abc import Mapping, Sequence

from grabstream.models.journal import GENESIS, Accepted, Cursor
from grabstream.ops.verification.checks import UNREADABLE, RedisShard


class PositionChecks:
    """Compares the cursors of the read models, and Redis' checkpoint, with one shard's journal."""

    def __init__(self, shard: int, cursors: Mapping[str, Cursor], redis: RedisShard) -> None:
        self._shard = shard
        self._cursors = cursors
        self._redis = redis
        #: Offset → the cursor to which the journal leads there, for the offsets that are compared.
        self._in_journal = {0: Cursor()}
        self._offsets = {redis.journaled_offset, *(cursor.next_offset for cursor in cursors.values())}
        self._head = b"" if redis.journaled_seq else redis.journaled_head
        #: What an archive has, up to the offset where the journal is read: the hashes at the seqs of cursors.
        self._archived_offset = 0
        self._archived_heads = {0: GENESIS}
        self._seqs = {cursor.seq for cursor in cursors.values()}

    def archived(self, end: Cursor, events: Sequence[Accepted]) -> None:
        """Takes lines of an archive, which has no offsets, but for its `end`."""
        self._archived_offset = end.next_offset
        self._archived_heads.update((line.seq, line.hash) for line in events if line.seq in self._seqs)
        self._find_checkpoint(events)

    def after(self, offset: int, cursor: Cursor, events: Sequence[Accepted]) -> None:
        """Takes the next record: its offset, the cursor after it, and its events."""
        if offset + 1 in self._offsets:
            self._in_journal[offset + 1] = cursor
        self._find_checkpoint(events)

    def _find_checkpoint(self, events: Sequence[Accepted]) -> None:
        """Keeps the hash at the seq of Redis' checkpoint, if one of these lines ends there."""
        if events and events[0].seq <= self._redis.journaled_seq <= events[-1].seq:
            found = [line.hash for line in events if line.seq == self._redis.journaled_seq]
            self._head = found[0] if found else self._head

    def cursor_problems(self, broken: bool) -> list[tuple[str, str]]:
        """(projection, problem) of each cursor that differs from the journal at its offset. Where the journal
        is `broken`, cursors after the break are not compared.
        """
        problems = []
        for name, cursor in self._cursors.items():
            offset = cursor.next_offset
            in_journal = self._in_journal.get(offset)
            if in_journal is not None:
                if what := _differences(cursor._asdict(), in_journal):
                    problems.append((name, f"{name}, shard {self._shard}, the cursor: {what}"))
            elif offset < self._archived_offset:
                if self._archived_heads.get(cursor.seq) != cursor.head:
                    what = f"the archive has another history at seq {cursor.seq}"
                    problems.append((name, f"{name}, shard {self._shard}, the cursor: {what}"))
            elif not broken:
                what = f"no record of the journal ends at offset {offset}"
                problems.append((name, f"{name}, shard {self._shard}: {what}"))
        return problems

    def checkpoint_problem(self, end: Cursor) -> str:
        """The fault of Redis' checkpoint; '' when there is none. `end` is the cursor at the journal's end."""
        if self._redis.journaled_seq == UNREADABLE:
            return f"shard {self._shard}: the journaled seq in Redis is not a number"
        if self._redis.journaled_seq > end.seq:
            return (
                f"shard {self._shard}: Redis counts seq {self._redis.journaled_seq} as journaled, but the "
                f"journal ends at seq {end.seq}"
            )
        if self._head != self._redis.journaled_head:
            return (
                f"shard {self._shard}: the hash at seq {self._redis.journaled_seq} is "
                f"{as_hex(self._redis.journaled_head)} in Redis, {as_hex(self._head)} in the journal"
            )
        # While a shard is being recovered, its checkpoint moves under the term of the new owner.
        return self._checkpoint_offset() if self._redis.journaled_seq and self._redis.decides else ""

    def _checkpoint_offset(self) -> str:
        """The fault in offset, term and owner of Redis' checkpoint; '' when there is none."""
        redis = self._redis
        in_journal = self._in_journal.get(redis.journaled_offset)
        if in_journal is None and 0 < redis.journaled_offset < self._archived_offset:
            return ""
        if in_journal is None or not redis.journaled_offset:
            return (
                f"shard {self._shard}: no record of the journal ends at offset {redis.journaled_offset}, "
                "where Redis' checkpoint is"
            )
        named = {"seq": redis.journaled_seq, "term": redis.journaled_term, "owner": redis.journaled_owner}
        what = _differences(named, in_journal)
        return what and f"shard {self._shard}, Redis' checkpoint: {what}"


def _differences(position: Mapping[str, object], in_journal: Cursor) -> str:
    """What of a position differs from the journal at its offset; '' if nothing does."""
    differences = [
        f"{name} is {as_hex(is_)}, the journal has {as_hex(was)}"
        for name, is_ in position.items()
        if (was := getattr(in_journal, name)) != is_
    ]
    return f"{', '.join(differences)} at offset {in_journal.next_offset}" if differences else ""


def as_hex(value: object) -> object:
    """The first 16 hex digits of a hash; other values unchanged."""
    return f"{value.hex()[:16]}…" if isinstance(value, bytes) else value
