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


@pytest.mark.parametrize(("name", "value"), [("count", b"3"), ("term", b"x"), ("prev", b"")])
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


# -- runs ----------------------------------------------------------------------------------------------------

#: The seqs that each line takes, from seq 1 on.
SEQS = (1, 3, 1, 1000, 2, 1)


def lines_of(seqs: Sequence[int]) -> list[bytes]:
    """Lines that take these numbers of seqs, with the fields of their texts that say so."""
    firsts = [1 + sum(seqs[:i]) for i in range(len(seqs))]
    return [
        b'{"type":"grab.granted","v":2,"shard":0,"seq":%d,"n":%d}' % pair
        for pair in zip(firsts, seqs, strict=True)
    ]


def block_of(first: int, last: int, change: tuple[bytes, bytes] = (b"", b"")) -> Block:
    """A block with the lines from index `first` to index `last` of SEQS."""
    lines = [line.replace(*change) for line in lines_of(SEQS)]
    hashes = [GENESIS, *chain(GENESIS, lines)]
    seqs, first_seq = sum(SEQS[first : last + 1]), 1 + sum(SEQS[:first])
    count = last + 1 - first
    headers = block_headers(0, 1, "a", first_seq, count, hashes[first], hashes[last + 1], seqs)
    return parse_block(headers, b"\n".join(lines[first : last + 1]))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted), max_size=6))
def test_a_reader_of_runs_gets_each_line_once_with_its_last_seq(blocks: list[list[int]]) -> None:
    cursor, found, reached = Cursor(0, GENESIS, 0, 1, "a"), [], 0
    for offset, (first, last) in enumerate(blocks):
        if first > reached:
            with pytest.raises(Gap):
                cursor.feed(offset, block_of(first, last))
            return
        cursor, accepted = cursor.feed(offset, block_of(first, last))
        found += accepted
        reached = max(reached, last + 1)
        assert cursor.seq == sum(SEQS[:reached])
    lines = lines_of(SEQS)[:reached]
    assert [(event.seq, event.line) for event in found] == [
        (sum(SEQS[: i + 1]), line) for i, line in enumerate(lines)
    ]
    assert [event.hash for event in found] == chain(GENESIS, lines)


def test_headers_say_how_many_seqs_a_block_takes_only_if_it_has_runs() -> None:
    assert dict(block_headers(0, 1, "a", 1, 2, GENESIS, GENESIS, 5))["seqs"] == b"5"
    assert "seqs" not in dict(block_headers(0, 1, "a", 1, 2, GENESIS, GENESIS, 2))
    assert "seqs" not in dict(block_headers(0, 1, "a", 1, 2, GENESIS, GENESIS))


def test_a_cursor_within_a_run_contradicts_the_journal() -> None:
    within = Cursor(2, GENESIS, 0, 1, "a")
    with pytest.raises(Corrupt, match="seq 2, where the reader is, is within a run of grabs"):
        within.feed(0, block_of(0, 3))


@pytest.mark.parametrize(
    "change",
    [
        (b'"seq":2,', b'"seq":1,'), (b'"seq":5', b'"sek":5'), (b'"seq":1,', b'"seq":0,'),
        (b'"seq":1008', b'"seq":99999999999'),
    ],
)  # fmt: skip
def test_lines_with_other_seqs_than_their_headers_say_are_corrupt(change: tuple[bytes, bytes]) -> None:
    assert block_of(0, 5).last_seq == sum(SEQS)
    with pytest.raises(Corrupt, match="do not cover 1008 seqs by their texts"):
        block_of(0, 5, change)


def test_a_header_that_says_fewer_seqs_than_lines_is_corrupt() -> None:
    headers = block_headers(0, 1, "a", 1, 2, GENESIS, chain(GENESIS, LINES[:2])[-1], 1)
    with pytest.raises(Corrupt, match="do not cover 1 seqs"):
        parse_block(headers, b"\n".join(LINES[:2]))
