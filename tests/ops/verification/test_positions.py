"""Positions that are before the end of an archive, where the journal has been cut."""

import pytest

from grabstream.models.journal import Accepted, Cursor
from grabstream.ops.verification.checks import RedisShard
from grabstream.ops.verification.journal_positions import PositionChecks

LINES = [Accepted(seq, b"", bytes([seq]) * 32) for seq in (2, 3, 5)]
END = Cursor(5, LINES[-1].hash, 40, 2, "b")


def checked(cursor: Cursor, redis: RedisShard) -> tuple[list[str], str]:
    """The problems of a cursor and of Redis' checkpoint, beside an archive that ends at offset 40."""
    positions = PositionChecks(3, {"ledger": cursor}, redis)
    positions.archived(END._replace(next_offset=0), LINES[:2])
    positions.archived(END, LINES[2:])
    positions.after(END.next_offset - 1, END, ())
    return [line for _, line in positions.cursor_problems(broken=False)], positions.checkpoint_problem(END)


def redis(seq: int, head: bytes, offset: int) -> RedisShard:
    return RedisShard(seq, seq, head, offset, 1, "a", True)


@pytest.mark.parametrize("position", [(3, LINES[1].hash, 20), (5, LINES[2].hash, 30), (0, bytes(32), 1)])
def test_positions_in_an_archive_are_compared_by_their_hash(position: tuple[int, bytes, int]) -> None:
    seq, head, offset = position
    assert checked(Cursor(seq, head, offset, 1, "a"), redis(seq, head, offset)) == ([], "")


def test_another_history_in_an_archive_is_a_problem() -> None:
    wrong = b"\xff" * 32
    problems, checkpoint = checked(Cursor(3, wrong, 20, 1, "a"), redis(3, wrong, 20))
    assert problems == ["ledger, shard 3, the cursor: the archive has another history at seq 3"]
    assert checkpoint.startswith("shard 3: the hash at seq 3 is ffffffffffffffff… in Redis")


def test_a_cursor_before_every_event_is_right() -> None:
    """The archive does not lead to its offset, which is 0."""
    problems, _ = checked(Cursor(), redis(5, LINES[2].hash, 40))
    assert problems == []


def test_a_seq_that_ends_no_line_is_a_problem() -> None:
    problems, _ = checked(Cursor(4, LINES[1].hash, 20, 1, "a"), redis(5, LINES[2].hash, 40))
    assert problems == ["ledger, shard 3, the cursor: the archive has another history at seq 4"]


def test_positions_after_an_archive_are_those_of_records() -> None:
    problems, checkpoint = checked(END._replace(owner="c"), redis(5, LINES[2].hash, 40))
    assert problems == ["ledger, shard 3, the cursor: owner is c, the journal has b at offset 40"]
    assert checkpoint.startswith("shard 3, Redis' checkpoint: term is 1, the journal has 2")
