"""Records of the journal do not divide what was decided together: Redis may lose the rest of it."""

from collections.abc import Sequence

import pytest

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.streams.relaying.blocks import BLOCK_BYTES_MAX, ENTRY_BYTES_MAX, blocks_of
from grabstream.streams.relaying.ownership import OutboxLine


def line(command: str, rest: str = "") -> bytes:
    """An event's text."""
    return f'{{"type":"grab.held","v":1,"seq":1,"offer":"o","at":1,"command":"{command}"{rest}}}'.encode()


def bytes_of(block: Sequence[OutboxLine]) -> int:
    """The bytes of a block in its record."""
    return len(b"\n".join(text for text, _ in block))


def entries_of(*counts: int) -> list[list[OutboxLine]]:
    """Entries of these numbers of lines, all alike."""
    return [[(line("c", ',"basket":"x"'), 1)] * count for count in counts]


def of(*texts: bytes) -> list[OutboxLine]:
    """An entry of these lines."""
    return [(text, 1) for text in texts]


def sizes(entries: Sequence[Sequence[OutboxLine]], events_max: int) -> list[int]:
    blocks = blocks_of(entries, events_max)
    assert [one for block in blocks for one in block] == [one for entry in entries for one in entry]
    return [len(block) for block in blocks]


@pytest.mark.parametrize(
    ("counts", "events_max", "expected"),
    [
        ([], 3, []),
        ([1] * 7, 3, [3, 3, 1]),
        ([2, 2, 1, 3], 3, [2, 3, 3]),
        # An entry above the bound is a separate block.
        ([1, 5, 1], 3, [1, 5, 1]),
        ([1_010, 1, 999], 1_000, [1_010, 1_000]),
        # The rest of an entry whose first events are journaled already.
        ([1, 3], 3, [1, 3]),
    ],
)
def test_a_block_is_full_of_whole_entries(
    counts: Sequence[int], events_max: int, expected: Sequence[int]
) -> None:
    assert sizes(entries_of(*counts), events_max) == expected


def test_decisions_that_look_alike_are_not_divided() -> None:
    """Many users may name their baskets alike, and the clock of a shard may stand still."""
    singles = of(*[line(str(number)) for number in range(905)])
    baskets = of(*[line(f"{name}.{n}", ',"basket":"cart"') for name in range(20) for n in range(10)])
    assert sizes([singles, *(baskets[at : at + 10] for at in range(0, 200, 10))], 1_000) == [995, 110]
    # Calls of several baskets.
    assert sizes([singles, baskets[:100], baskets[100:]], 1_000) == [905, 200]


def test_what_a_caller_writes_and_what_cannot_be_read_is_relayed_too() -> None:
    assert sizes([of(b"{"), of(b"\xff", b""), of(line("a"), line("b"))], 2) == [1, 2, 2]


def test_blocks_are_bounded_in_size() -> None:
    entries = [of(line(str(number), f',"title":"{"x" * 10_000}"')) * 2 for number in range(150)]
    blocks = blocks_of(entries, 1_000)
    assert len(blocks) > 2
    assert all(bytes_of(block) <= BLOCK_BYTES_MAX for block in blocks)
    assert all(len(block) % 2 == 0 for block in blocks)


def test_the_longest_entry_fits_a_record_and_is_not_divided() -> None:
    of_bytes = of(b"x" * 131_072, b"x" * (ENTRY_BYTES_MAX - 131_072 - 11))
    assert sizes([of(b"y"), of_bytes, of(b"z")], 1_000) == [1, 2, 1]
    # With headers, and with what Kafka adds to a record.
    assert ENTRY_BYTES_MAX + 64 * 1024 < RECORD_BYTES_MAX


def test_an_entry_that_no_record_could_hold_is_divided() -> None:
    """No script writes one. The shard would otherwise stand still permanently."""
    entry = of(*[line(str(number), f',"title":"{"x" * 9_000}"') for number in range(1_500)])
    blocks = blocks_of([of(line("a")), entry, of(line("b"))], 1_000)
    assert [one for block in blocks for one in block] == [*of(line("a")), *entry, *of(line("b"))]
    assert max(map(bytes_of, blocks)) <= BLOCK_BYTES_MAX
