"""The decider's backlog: commands that were read from the topic and are not answered yet, by partition for
committing and by shard for deciding.

A command may be in any partition, so partitions and shards do not match. Each shard takes its commands in the
order in which they were read, and no shard waits for another. The commands of a shard that decides nothing
stay here, up to a bound; then partitions with more of them are not read until the shard decides again.
Offsets are committed up to the first record with an open part.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from aiokafka import TopicPartition

from grabstream.models.commands import AnyCommand, basket_of
from grabstream.streams.deciding.decoding import RecordPosition

#: Commands of one shard, and bytes of their records, that wait here before partitions with more of them are
#: no longer read. One poll, and one fetch per partition, may be added.
HELD_COMMANDS_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 16 * 1024 * 1024
#: Maximum records of a partition from its first open record: another process would have to decide them again.
OPEN_RECORDS_MAX: Final = 50_000
#: A paused partition is read again when less than this share of the bound is in use.
READ_AGAIN_SHARE: Final = 0.5


class OpenRecords:
    """Consecutive records of a partition, with their offsets, keys and, in a process that traces, their
    `traceparents`. Kafka has not acknowledged the answers to `open` parts of them yet: to commands, and to
    elements refused at once.
    """

    __slots__ = ("keys", "offsets", "open", "partition", "traceparents")

    def __init__(
        self,
        partition: "OpenPartition",
        offsets: Sequence[int],
        keys: Sequence[bytes | None],
        traceparents: Sequence[str],
    ) -> None:
        self.partition = partition
        self.offsets = offsets
        self.keys = keys
        self.traceparents = traceparents
        self.open = 0

    def position(self, row: int) -> RecordPosition:
        """The position of one of the records, counted from 0."""
        source = self.partition.source
        return RecordPosition(source.topic, source.partition, self.offsets[row], self.keys[row])


class WaitingCommands:
    """Commands of one shard that wait for their answers: their records; for each, the number of its record
    among these, its index in that record, and the bytes of records that it counts for. `has_basket`: some are
    in baskets. A basket is within one record. `are_plain`: all were decoded, and checked, as plain grabs.
    """

    __slots__ = ("are_plain", "command_bytes", "commands", "has_basket", "indexes", "records", "rows")

    def __init__(
        self,
        commands: Sequence[AnyCommand],
        records: OpenRecords,
        rows: Sequence[int],
        indexes: Sequence[int],
        command_bytes: int,
        has_basket: bool,
        are_plain: bool = False,
    ) -> None:
        self.commands = commands
        self.records = records
        self.rows = rows
        self.indexes = indexes
        self.command_bytes = command_bytes
        self.has_basket = has_basket
        self.are_plain = are_plain

    def __len__(self) -> int:
        return len(self.commands)

    def slice(self, start: int, end: int) -> "WaitingCommands":
        """Some of the commands."""
        return WaitingCommands(
            self.commands[start:end], self.records, self.rows[start:end], self.indexes[start:end],
            self.command_bytes, self.has_basket, self.are_plain,
        )  # fmt: skip

    def units(self) -> "list[WaitingCommands]":
        """The commands one by one, those of a basket together."""
        starts: list[int] = []
        for at, command in enumerate(self.commands):
            basket = basket_of(command)
            if not starts or basket is None or basket_of(self.commands[at - 1]) != basket:
                starts.append(at)
        return [self.slice(start, end) for start, end in pairwise([*starts, len(self.commands)])]

    def position(self, at: int) -> tuple[RecordPosition, int]:
        """The position of a command's record, and its index in the record."""
        return self.records.position(self.rows[at]), self.indexes[at]

    def traceparents(self) -> Sequence[str]:
        """The `traceparent` of each command's record; '' where there is none."""
        record_traceparents = self.records.traceparents
        return [record_traceparents[row] for row in self.rows] if record_traceparents else [""] * len(self)


class OpenPartition:
    """The records of a partition from the first open one, `records` of them. `gone` is set when the partition
    was revoked; `full_for` are the shards for which no more records may be read.
    """

    def __init__(self, source: TopicPartition) -> None:
        self.source = source
        self.gone = False
        self.full_for: set[int] = set()
        self._open: deque[OpenRecords] = deque()
        #: The number of all of them.
        self.records = 0
        #: The offset after the last record that was read; None before the first one. Kafka's own records,
        #: which mark the ends of transactions, may precede it.
        self.read_to: int | None = None
        self._next_offset: int | None = None
        self._committed: int | None = None
        self._is_long = False

    def add(
        self, offsets: Sequence[int], keys: Sequence[bytes | None], traceparents: Sequence[str] = ()
    ) -> OpenRecords:
        """Adds consecutive records that were read; returns them."""
        records = OpenRecords(self, offsets, keys, traceparents)
        self._open.append(records)
        self.records += len(offsets)
        self.read_to = offsets[-1] + 1
        return records

    def complete(self, position: int | None = None) -> int | None:
        """Returns the offset up to which everything is complete; None if it has not moved since it was
        committed. `position` is that of the consumer, if all records before it were added.
        """
        while self._open and self._open[0].open == 0:
            complete = self._open.popleft()
            self.records -= len(complete.offsets)
            self._next_offset = complete.offsets[-1] + 1
        if position and not self._open:
            self._next_offset = self.read_to = max(self._next_offset or 0, position)
        return self._next_offset if self._next_offset != self._committed else None

    def committed(self, offset: int) -> None:
        """Records that the offset is committed."""
        self._committed = offset

    @property
    def is_full(self) -> bool:
        """Whether no more records of the partition may be read now."""
        bound = OPEN_RECORDS_MAX * (READ_AGAIN_SHARE if self._is_long else 1)
        self._is_long = self.records > bound
        return self._is_long or bool(self.full_for)


class ShardBacklog:
    """The commands of one shard in the order in which they were read, by their records: a basket is the grabs
    of one record.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.commands = 0
        self.bytes = 0
        self._waiting: deque[WaitingCommands] = deque()
        self._stopped: set[OpenPartition] = set()

    def add(self, held: WaitingCommands) -> None:
        """Adds commands of one record, or of several without baskets, for this shard."""
        self._waiting.append(held)
        self.commands += len(held)
        self.bytes += len(held) * held.command_bytes
        if self.commands > HELD_COMMANDS_MAX or self.bytes > HELD_BYTES_MAX:
            partition = held.records.partition
            partition.full_for.add(self.shard)
            self._stopped.add(partition)

    def take(self, most: int) -> list[WaitingCommands]:
        """Removes and returns the next commands for one call, from several records; a record with baskets
        gets its own call. Commands of revoked partitions are dropped: the process that has the partition
        decides them.
        """
        taken: list[WaitingCommands] = []
        room = most
        while self._waiting and room > 0:
            held = self._waiting[0]
            if held.records.partition.gone:
                self.done([self._waiting.popleft()])
                continue
            if held.has_basket:
                if not taken:
                    taken.append(self._waiting.popleft())
                break
            if len(held) > room:
                taken.append(held.slice(0, room))
                self._waiting[0] = held.slice(room, len(held))
                break
            taken.append(self._waiting.popleft())
            room -= len(held)
        return taken

    def done(self, done: Iterable[WaitingCommands]) -> None:
        """Removes commands that are answered, or that another process decides."""
        for held in done:
            self.commands -= len(held)
            self.bytes -= len(held) * held.command_bytes
        has_room = (
            self.commands < HELD_COMMANDS_MAX * READ_AGAIN_SHARE
            and self.bytes < HELD_BYTES_MAX * READ_AGAIN_SHARE
        )
        if self._stopped and has_room:
            for partition in self._stopped:
                partition.full_for.discard(self.shard)
            self._stopped.clear()
