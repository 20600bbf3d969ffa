"""Records of the journal: whole entries of the outbox in blocks of bounded count and size.

Events decided together are in one record: all events of one command, of one basket, and of one hold that has
ended. Redis may lose what Kafka has not acknowledged, and the journal is then the truth: a part of a decision
would be a state that was never decided (half of a basket, or free units while a user waits).

The scripts know what they decide together, and write it into one entry (`append_events` in
lua/includes/decide.lua). Events do not show it: two baskets may have one name and one time. So a block ends
only where an entry ends. Scripts of early programs divided decisions between entries. Such entries are not
joined here: an outbox has them only during the upgrade, their own relay divided them as well, and their
events do not show for certain which belong together.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from grabstream.models.bounds import BASKET_GRABS_MAX, EVENT_LINE_BYTES_MAX, RECORD_BYTES_MAX
from grabstream.streams.relaying.ownership import OutboxLine

BLOCK_BYTES_MAX: Final = RECORD_BYTES_MAX // 4
#: The longest entry: decisions of 128 KiB together, and then a basket. The other decisions of many events are
#: shorter: the units that one command frees go to 25 queued grabs at most, whose events have no texts of
#: callers but ids.
ENTRY_BYTES_MAX: Final = 128 * 1024 + BASKET_GRABS_MAX * (EVENT_LINE_BYTES_MAX + 1)


def blocks_of(entries: Iterable[Sequence[OutboxLine]], events_max: int) -> list[list[OutboxLine]]:
    """The lines of the entries in blocks. A block has at most `events_max` lines and BLOCK_BYTES_MAX bytes,
    or is one entry.
    """
    blocks: list[list[OutboxLine]] = []
    size = 0
    for entry in entries:
        for lines in _fitting_a_record(entry):
            added = _size(lines)
            if blocks and len(blocks[-1]) + len(lines) <= events_max and size + added <= BLOCK_BYTES_MAX:
                blocks[-1].extend(lines)
                size += added
            else:
                blocks.append(list(lines))
                size = added
    return blocks


def _size(lines: Sequence[OutboxLine]) -> int:
    """The bytes of lines in a record, each with the character between it and the next one."""
    return sum(len(text) for text, _ in lines) + len(lines)


def _fitting_a_record(entry: Sequence[OutboxLine]) -> Iterator[Sequence[OutboxLine]]:
    """The entry; single lines of one that is longer than any script writes it, since a record that is too
    large for Kafka would stop its shard permanently.
    """
    if _size(entry) <= ENTRY_BYTES_MAX:
        yield entry
    else:
        yield from ([line] for line in entry)
