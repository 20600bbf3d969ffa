"""The decider's backlog: what was read of the commands topic and is not answered yet, by partition for
committing, by shard for deciding.

A command may stand in any partition, so the two do not match. Each shard takes its own commands in the order
they were read, and no shard waits for another: one that stands still keeps its commands here, up to a bound;
then the partitions that bring more of them are not read until it goes on. Offsets are committed up to the
first record of which anything is open.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from aiokafka import TopicPartition

from grabstream.models.commands import AnyCommand, basket_of
from grabstream.streams.deciding.understanding import Place

#: Commands, and bytes of their records, of one shard that wait here before partitions which bring more of
#: them are not read any more. One poll and one fetch a partition may come on top.
HELD_COMMANDS_MAX: Final = 20_000
HELD_BYTES_MAX: Final = 16 * 1024 * 1024
#: Records of a partition after its first open one: what another process would have to decide again.
OPEN_RECORDS_MAX: Final = 50_000
#: Read again once less than this share of a bound is in use.
READ_AGAIN_SHARE: Final = 0.5


class OpenRecord:
    """A record of which `open` parts are not answered and acknowledged yet: its commands, and what was
    refused of it at once.
    """

    __slots__ = ("open", "partition", "place")

    def __init__(self, partition: "OpenPartition", place: Place) -> None:
        self.partition = partition
        self.place = place
        self.open = 0


class HeldCommand:
    """A command that waits for its answer: where it stood, and its share of the bytes of its record."""

    __slots__ = ("command", "index", "record", "size")

    def __init__(self, command: AnyCommand, record: OpenRecord, index: int, size: int) -> None:
        self.command = command
        self.record = record
        self.index = index
        self.size = size
        record.open += 1


class OpenPartition:
    """What of a partition is open, in order. `gone` once it was taken away; `full_for` are shards for which
    no more is to be read.
    """

    def __init__(self, source: TopicPartition) -> None:
        self.source = source
        self.gone = False
        self.full_for: set[int] = set()
        self._records: deque[OpenRecord] = deque()
        self._next_offset: int | None = None
        self._committed: int | None = None
        self._is_long = False

    def add(self, place: Place) -> OpenRecord:
        """A record that was read."""
        opened = OpenRecord(self, place)
        self._records.append(opened)
        return opened

    def complete(self) -> int | None:
        """The offset up to which everything is complete, when it has moved since it was committed."""
        while self._records and self._records[0].open == 0:
            self._next_offset = self._records.popleft().place.offset + 1
        return self._next_offset if self._next_offset != self._committed else None

    def committed(self, offset: int) -> None:
        """The offset is committed."""
        self._committed = offset

    @property
    def records(self) -> int:
        """Records after the first one that is open, with it."""
        return len(self._records)

    @property
    def is_full(self) -> bool:
        """Whether no more is to be read now."""
        bound = OPEN_RECORDS_MAX * (READ_AGAIN_SHARE if self._is_long else 1)
        self._is_long = len(self._records) > bound
        return self._is_long or bool(self.full_for)


class ShardBacklog:
    """The commands of one shard in the order they were read, by record: a basket is the grabs of one
    record.
    """

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.commands = 0
        self.bytes = 0
        self._waiting: deque[list[HeldCommand]] = deque()
        self._stopped: set[OpenPartition] = set()

    def add(self, held: list[HeldCommand]) -> None:
        """What a record brings for this shard."""
        self._waiting.append(held)
        self.commands += len(held)
        self.bytes += sum(one.size for one in held)
        if self.commands > HELD_COMMANDS_MAX or self.bytes > HELD_BYTES_MAX:
            partition = held[0].record.partition
            partition.full_for.add(self.shard)
            self._stopped.add(partition)

    def take(self, most: int) -> list[HeldCommand]:
        """The next commands for one call: of several records, but a record with baskets goes alone. Those of
        partitions that were taken away are left out: who has them now decides them.
        """
        taken: list[HeldCommand] = []
        while self._waiting and len(taken) < most:
            held = self._waiting[0]
            if held[0].record.partition.gone:
                self._waiting.popleft()
                self.done(held)
                continue
            has_basket = any(basket_of(one.command) for one in held)
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
        """These are answered, or left to somebody else."""
        self.commands -= len(held)
        self.bytes -= sum(one.size for one in held)
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
        """Whether nothing waits to be sent."""
        return not self._waiting


def by_partition(held: Iterable[tuple[HeldCommand, Any]]) -> dict[int, list[Any]]:
    """What belongs to commands, by the number of the partition each came from."""
    found: dict[int, list[Any]] = {}
    for one, what in held:
        found.setdefault(one.record.partition.source.partition, []).append(what)
    return found
