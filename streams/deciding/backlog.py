"""The decider's backlog: commands that were read from the topic and are not answered yet, by partition for
committing and by shard for deciding.

A command may be in any partition, so partitions and shards do not match. Each shard takes its commands in the
order in which they were read, and no shard waits for another. The commands of a shard that decides nothing
stay here, up to a bound; then the partitions that have more of them are not read until the shard decides
again. Offsets are committed up to the first record with an open part.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from aiokafka import TopicPartition

from grabstream.models.commands import AnyCommand, basket_of
from grabstream.streams.deciding.understanding import RecordPosition

#: Commands of one shard, and bytes of their records, that wait here before partitions with more of them are
#: no longer read. One poll, and one fetch per partition, may be added.
HELD_COMMANDS_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 16 * 1024 * 1024
#: Records of a partition from its first open record on: another process would have to decide them again.
OPEN_RECORDS_MAX: Final = 50_000
#: A paused partition is read again when less than this share of the bound is in use.
READ_AGAIN_SHARE: Final = 0.5


class OpenRecord:
    """A record with `open` parts whose answers Kafka has not acknowledged yet: its commands, and the parts
    that were refused at once.
    """

    __slots__ = ("open", "partition", "position")

    def __init__(self, partition: "OpenPartition", position: RecordPosition) -> None:
        self.partition = partition
        self.position = position
        self.open = 0


class HeldCommand:
    """A command that waits for its answer: its record and its index in it, and its share of the record's
    bytes.
    """

    __slots__ = ("command", "index", "record", "size")

    def __init__(self, command: AnyCommand, record: OpenRecord, index: int, size: int) -> None:
        self.command = command
        self.record = record
        self.index = index
        self.size = size
        record.open += 1


class OpenPartition:
    """The open records of a partition, in order. `gone` is set when the partition was revoked; `full_for` are
    the shards for which no more records may be read.
    """

    def __init__(self, source: TopicPartition) -> None:
        self.source = source
        self.gone = False
        self.full_for: set[int] = set()
        self._records: deque[OpenRecord] = deque()
        self._next_offset: int | None = None
        self._committed: int | None = None
        self._is_long = False

    def add(self, position: RecordPosition) -> OpenRecord:
        """Adds a record that was read; returns it."""
        record = OpenRecord(self, position)
        self._records.append(record)
        return record

    def complete(self) -> int | None:
        """Returns the offset up to which everything is complete; None if it has not moved since it was
        committed.
        """
        while self._records and self._records[0].open == 0:
            self._next_offset = self._records.popleft().position.offset + 1
        return self._next_offset if self._next_offset != self._committed else None

    def committed(self, offset: int) -> None:
        """Records that the offset is committed."""
        self._committed = offset

    @property
    def records(self) -> int:
        """The number of records from the first open record on."""
        return len(self._records)

    @property
    def is_full(self) -> bool:
        """Whether no more records of the partition may be read now."""
        bound = OPEN_RECORDS_MAX * (READ_AGAIN_SHARE if self._is_long else 1)
        self._is_long = len(self._records) > bound
        return self._is_long or bool(self.full_for)


class ShardBacklog:
    """The commands of one shard in the order in which they were read, by record: a basket is the grabs of one
    record.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.commands = 0
        self.bytes = 0
        self._waiting: deque[list[HeldCommand]] = deque()
        self._stopped: set[OpenPartition] = set()

    def add(self, held: list[HeldCommand]) -> None:
        """Adds the commands of a record for this shard."""
        self._waiting.append(held)
        self.commands += len(held)
        self.bytes += sum(command.size for command in held)
        if self.commands > HELD_COMMANDS_MAX or self.bytes > HELD_BYTES_MAX:
            partition = held[0].record.partition
            partition.full_for.add(self.shard)
            self._stopped.add(partition)

    def take(self, most: int) -> list[HeldCommand]:
        """Removes and returns the next commands for one call, from several records; a record with baskets
        gets its own call. Commands of revoked partitions are dropped: the process that has the partition
        decides them.
        """
        taken: list[HeldCommand] = []
        while self._waiting and len(taken) < most:
            held = self._waiting[0]
            if held[0].record.partition.gone:
                self._waiting.popleft()
                self.done(held)
                continue
            has_basket = any(basket_of(entry.command) for entry in held)
            if taken and (has_basket or len(taken) + len(held) > most):
                break
            if len(held) > most and not has_basket:
                taken, self._waiting[0] = held[:most], held[most:]
                break
            taken += self._waiting.popleft()
            if has_basket:
                break
        return taken

    def done(self, held: Sequence[HeldCommand]) -> None:
        """Removes commands that are answered, or that another process decides."""
        self.commands -= len(held)
        self.bytes -= sum(command.size for command in held)
        has_room = (
            self.commands < HELD_COMMANDS_MAX * READ_AGAIN_SHARE
            and self.bytes < HELD_BYTES_MAX * READ_AGAIN_SHARE
        )
        if self._stopped and has_room:
            for partition in self._stopped:
                partition.full_for.discard(self.shard)
            self._stopped.clear()

    @property
    def is_empty(self) -> bool:
        """Whether no command waits to be sent to the gate."""
        return not self._waiting


def by_partition(held: Iterable[tuple[HeldCommand, Any]]) -> dict[int, list[Any]]:
    """Groups values that belong to commands by the number of the partition that each command came from."""
    by_number: dict[int, list[Any]] = {}
    for command, value in held:
        by_number.setdefault(command.record.partition.source.partition, []).append(value)
    return by_number
