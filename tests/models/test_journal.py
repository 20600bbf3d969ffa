"""Reading the journal: which blocks count, which are ignored, and where a reader must stop."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.journal import (
    GENESIS,
    Block,
    Corrupt,
    Cursor,
    Gap,
    block_headers,
    chain,
    marker_headers,
    parse_block,
)

LINES = [b'{"n":%d}' % number for number in range(1, 31)]
HASHES = [GENESIS, *chain(GENESIS, LINES)]


def block(first: int, last: int, term: int = 1, owner: str = "a", lines: Sequence[bytes] = LINES) -> Block:
    """A block with the events from seq `first` to seq `last`."""
    of_block = lines[first - 1 : last]
    prev = HASHES[first - 1]
    headers = block_headers(0, term, owner, first, len(of_block), prev, chain(prev, of_block)[-1])
    return parse_block(headers, b"\n".join(of_block))


def marker(term: int, owner: str) -> Block:
    return parse_block(marker_headers(0, term, owner), b"")


def read(blocks: Sequence[Block], cursor: Cursor = Cursor()) -> tuple[Cursor, list[int]]:
    seqs = []
    for offset, next_block in enumerate(blocks, cursor.next_offset):
        cursor, accepted = cursor.feed(offset, next_block)
        seqs += [event.seq for event in accepted]
    return cursor, seqs


def test_cursor_accepts_blocks_in_order() -> None:
    cursor, seqs = read([marker(1, "a"), block(1, 5), block(6, 6), block(7, 30)])
    assert seqs == list(range(1, 31))
    assert cursor == Cursor(30, HASHES[30], 4, 1, "a")


def test_cursor_drops_known_events() -> None:
    assert read([marker(1, "a"), block(1, 5), block(1, 5), block(3, 8), block(2, 4)])[1] == list(range(1, 9))


def test_cursor_accepts_only_blocks_of_the_last_counting_marker() -> None:
    blocks = [
        marker(1, "a"),
        block(1, 5),
        marker(3, "b"),
        block(6, 9),
        marker(2, "c"),
        marker(3, "d"),
        block(6, 7, 3, "b"),
        block(8, 9, 3, "d"),
    ]
    cursor, seqs = read(blocks)
    assert seqs == [1, 2, 3, 4, 5, 6, 7]
    assert (cursor.term, cursor.owner, cursor.next_offset) == (3, "b", 8)


def test_record_below_the_cursor_changes_nothing() -> None:
    cursor, _ = read([marker(1, "a"), block(1, 5)])
    assert cursor.feed(0, marker(9, "z")) == (cursor, ())


def test_missing_events_raise_gap() -> None:
    with pytest.raises(Gap, match="seq 7, the last known seq is 5"):
        read([marker(1, "a"), block(1, 5), block(7, 8)])


def test_another_history_raises_corrupt() -> None:
    other = [b"x", *LINES[1:]]
    with pytest.raises(Corrupt, match="another history at seq 1"):
        read([marker(1, "a"), block(1, 1), block(1, 2, lines=other)])


def test_block_without_marker_raises_corrupt() -> None:
    with pytest.raises(Corrupt, match="no marker"):
        read([block(1, 2)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", b"3"),
        ("head", b"00" * 32),
        ("prev", b"11" * 32),
        ("term", b"x"),
        ("first_seq", b""),
        ("owner", b"\xff"),
    ],
)
def test_block_that_contradicts_itself_raises_corrupt(name: str, value: bytes) -> None:
    headers = dict(block_headers(0, 1, "a", 1, 2, GENESIS, HASHES[2]))
    headers[name] = value
    with pytest.raises(Corrupt):
        parse_block(list(headers.items()), b"\n".join(LINES[:2]))


def test_changed_byte_raises_corrupt() -> None:
    headers = block_headers(0, 1, "a", 1, 2, GENESIS, HASHES[2])
    with pytest.raises(Corrupt, match="do not lead to the head"):
        parse_block(headers, b'{"n":1}\n{"n":3}')


cuts = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8), st.booleans()), max_size=10)


@given(cuts)
def test_any_cut_and_repetition_gives_the_same_history(cuts: list[tuple[int, int, bool]]) -> None:
    """Each cut: how many known events a block repeats, its number of events, and whether an earlier block is
    repeated after it.
    """
    blocks, last = [marker(1, "a")], 0
    for known, length, repeat in cuts:
        first = max(last + 1 - known, 1)
        end = min(first + length - 1, len(LINES))
        if end >= first:
            blocks.append(block(first, end))
            last = max(last, end)
        if repeat:
            blocks.append(blocks[len(blocks) // 2])
    if last < len(LINES):
        blocks.append(block(last + 1, len(LINES)))
    cursor, seqs = read(blocks)
    assert seqs == list(range(1, len(LINES) + 1))
    assert cursor.head == HASHES[-1]
