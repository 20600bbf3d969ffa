"""The backlog of the decider: commands that share a call, offsets that are complete, and when a partition is
full. Without servers.
"""

from collections.abc import Sequence

import pytest
from aiokafka import TopicPartition

from grabstream.models.commands import Grab, basket_of
from grabstream.streams.deciding import backlog
from grabstream.streams.deciding.backlog import OpenPartition, OpenRecords, ShardBacklog, WaitingCommands

PARTITION = TopicPartition("t.commands", 3)


def grabs(names: str) -> list[Grab]:
    """A grab for each name; those with the name of a digit are of that basket."""
    return [
        Grab(id=f"{name}{at}", offer="o", user="u", basket=name if name.isdigit() else None)
        for at, name in enumerate(names)
    ]


def held(
    partition: OpenPartition, names: str, first_offset: int = 0, command_bytes: int = 10
) -> WaitingCommands:
    """Commands, each in its own record; baskets are one record."""
    commands = grabs(names)
    has_basket = any(map(basket_of, commands))
    rows = [0] * len(commands) if has_basket else list(range(len(commands)))
    indexes = list(range(len(commands))) if has_basket else [0] * len(commands)
    offsets = range(first_offset, first_offset + max(rows) + 1)
    records = partition.add(offsets, [b"key%d" % offset for offset in offsets])
    records.open += len(commands)
    return WaitingCommands(commands, records, rows, indexes, command_bytes, has_basket)


def ids(parts: Sequence[WaitingCommands]) -> list[str]:
    return [command.id for part in parts for command in part.commands]


@pytest.mark.parametrize(
    ("records", "most", "calls"),
    [
        (["aaa", "bb"], 8, ["aaabb"]),
        (["aaa", "bb"], 4, ["aaab", "b"]),
        (["aaa", "bb"], 2, ["aa", "ab", "b"]),
        (["aaa", "b11", "c"], 8, ["aaa", "b11", "c"]),
        (["1111", "a"], 2, ["1111", "a"]),
        (["a", "1122", "33"], 8, ["a", "1122", "33"]),
    ],
)
def test_calls_have_the_commands_in_order_and_whole_records_of_baskets(
    records: list[str], most: int, calls: list[str]
) -> None:
    partition, shard = OpenPartition(PARTITION), ShardBacklog(0)
    for names in records:
        shard.add(held(partition, names))
    taken = []
    while part := shard.take(most):
        taken.append("".join(id[0] for id in ids(part)))
        shard.done(part)
    assert taken == calls
    assert (shard.commands, shard.bytes) == (0, 0)


def test_parts_of_commands_know_their_records() -> None:
    partition = OpenPartition(PARTITION)
    position, index = held(partition, "abcd", first_offset=7).slice(1, 4).position(2)
    assert (position, index) == (("t.commands", 3, 10, b"key10"), 0)
    position, index = held(partition, "ab11", first_offset=20).slice(2, 4).position(1)
    assert (position, index) == (("t.commands", 3, 20, b"key20"), 3)


def test_units_are_single_commands_and_whole_baskets() -> None:
    partition = OpenPartition(PARTITION)
    units = held(partition, "a11223b").units()
    assert [[id[0] for id in ids([unit])] for unit in units] == [["a"], ["1", "1"], ["2", "2"], ["3"], ["b"]]
    assert [unit.indexes for unit in units] == [[0], [1, 2], [3, 4], [5], [6]]


def test_offsets_are_complete_up_to_the_first_open_record() -> None:
    partition = OpenPartition(PARTITION)
    first, second = held(partition, "abc", 5), held(partition, "d", 8)
    assert (partition.complete(), partition.records) == (None, 4)
    second.records.open -= 1
    first.records.open -= 2
    assert (partition.complete(), partition.records) == (None, 4)
    first.records.open -= 1
    assert (partition.complete(), partition.records) == (9, 0)
    partition.committed(9)
    assert partition.complete() is None


def test_a_partition_is_full_by_records_and_until_half_of_them_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "OPEN_RECORDS_MAX", 6)
    partition = OpenPartition(PARTITION)
    parts: list[OpenRecords] = [held(partition, names).records for names in ("aaa", "aaa", "a")]
    assert partition.is_full
    for records, is_full in zip(parts, (True, False), strict=False):
        records.open = 0
        partition.complete()
        assert partition.is_full is is_full


def test_a_shard_with_too_many_bytes_stops_its_partition_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "HELD_BYTES_MAX", 100)
    of_shard, other = OpenPartition(PARTITION), OpenPartition(TopicPartition("t.commands", 4))
    shard = ShardBacklog(0)
    shard.add(held(other, "a"))
    shard.add(held(of_shard, "abc", command_bytes=31))
    assert (of_shard.is_full, other.is_full) == (True, False)
    taken = shard.take(2)
    shard.done(taken)
    assert of_shard.is_full
    shard.done(shard.take(9))
    assert (of_shard.is_full, shard.bytes) == (False, 0)


def test_commands_of_a_revoked_partition_are_dropped() -> None:
    gone, kept = OpenPartition(PARTITION), OpenPartition(TopicPartition("t.commands", 4))
    shard = ShardBacklog(0)
    shard.add(held(gone, "ab"))
    shard.add(held(kept, "c"))
    gone.gone = True
    assert [id[0] for id in ids(shard.take(9))] == ["c"]
    assert shard.commands == 1


def test_parts_of_commands_that_were_checked_as_plain_grabs_are_so_too() -> None:
    commands = held(OpenPartition(PARTITION), "abc")
    for are_plain in (False, True):
        commands.are_plain = are_plain
        parts = [commands.slice(0, 1), commands.slice(1, 3), *commands.units()]
        assert [part.are_plain for part in parts] == [are_plain] * 5
