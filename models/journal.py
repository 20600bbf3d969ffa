"""The format of the journal and the rules of reading it: blocks, markers, the hash chain, and the cursor that
accepts or ignores records (docs/protocol.md).

This module does not read Kafka. The caller passes a record as offset, headers and value, and `Cursor.feed`
returns the events that the record adds to the history.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple

GENESIS: Final = bytes(32)

Headers = Sequence[tuple[str, bytes]]


class Corrupt(Exception):
    """The journal contradicts itself: the shard must stop, and no record from this one on may be used."""


class Gap(Exception):
    """Events are missing between the cursor and a block that counts. The caller must read from the offset of
    the cursor first.
    """


class Block(NamedTuple):
    """One journal record. A block of count 0 is a marker: it has no lines, and `prev` and `head` are
    empty.
    """

    shard: int
    term: int
    owner: str
    first_seq: int
    count: int  # type: ignore[assignment]  # the name of the header; hides tuple.count
    prev: bytes
    head: bytes
    lines: tuple[bytes, ...]
    hashes: tuple[bytes, ...]


class Accepted(NamedTuple):
    """An event that counts: its seq, its line in the journal, and the hash of the chain after it."""

    seq: int
    line: bytes
    hash: bytes


#: Makes an Accepted from a tuple, in a third of the time of its constructor.
_accepted = partial(tuple.__new__, Accepted)


def chain(head: bytes, lines: Iterable[bytes]) -> list[bytes]:
    """The hash after each line: hash(n) = sha256(hash(n-1) ‖ line), raw digests of 32 bytes."""
    hashes = []
    for line in lines:
        head = sha256(head + line).digest()
        hashes.append(head)
    return hashes


def marker_headers(shard: int, term: int, owner: str) -> list[tuple[str, bytes]]:
    """Headers of a marker; its value is empty, not null."""
    return [("shard", b"%d" % shard), ("term", b"%d" % term), ("owner", owner.encode()), ("count", b"0")]


def block_headers(
    shard: int, term: int, owner: str, first_seq: int, count: int, prev: bytes, head: bytes
) -> list[tuple[str, bytes]]:
    """Headers of a block of events; its value is the lines joined by newlines."""
    return [
        ("shard", b"%d" % shard),
        ("term", b"%d" % term),
        ("owner", owner.encode()),
        ("first_seq", b"%d" % first_seq),
        ("count", b"%d" % count),
        ("prev", prev.hex().encode()),
        ("head", head.hex().encode()),
    ]


def parse_block(headers: Headers, value: bytes | None) -> Block:
    """Parses a record and chains its lines from its header `prev`; raises Corrupt when the record contradicts
    itself.
    """
    named = dict(headers)
    try:
        shard, term, count = int(named["shard"]), int(named["term"]), int(named["count"])
        owner = named["owner"].decode()
        if count == 0:
            return Block(shard, term, owner, 0, 0, b"", b"", (), ())
        first_seq = int(named["first_seq"])
        prev, head = bytes.fromhex(named["prev"].decode()), bytes.fromhex(named["head"].decode())
    except (KeyError, ValueError) as error:
        raise Corrupt(f"headers cannot be read: {error!r}") from None
    lines = tuple((value or b"").split(b"\n"))
    if len(lines) != count:
        raise Corrupt(f"{len(lines)} lines where the header says {count}")
    hashes = tuple(chain(prev, lines))
    if hashes[-1] != head:
        raise Corrupt(
            f"the lines of seq {first_seq} to {first_seq + count - 1} do not lead to the head in the header"
        )
    return Block(shard, term, owner, first_seq, count, prev, head, lines, hashes)


class Cursor(NamedTuple):
    """The position of a reader in a shard: the last `seq` and the hash after it, the next offset, and the
    current term and owner.
    """

    seq: int = 0
    head: bytes = GENESIS
    next_offset: int = 0
    term: int = 0
    owner: str = ""

    def feed(self, offset: int, block: Block) -> "tuple[Cursor, Sequence[Accepted]]":
        """Returns the cursor after a record, and the events that the record adds. A record below the cursor
        adds nothing.

        Raises Gap when events are missing before a block that counts, Corrupt when such a block contradicts
        the cursor.
        """
        if offset < self.next_offset:
            return self, ()
        after = self._replace(next_offset=offset + 1)
        if block.count == 0:
            if block.term > self.term:
                after = after._replace(term=block.term, owner=block.owner)
            return after, ()
        if block.term > self.term:
            raise Corrupt(
                f"offset {offset}: a block of term {block.term}, but no marker of this term before it"
            )
        if block.term < self.term or block.owner != self.owner:
            return after, ()
        return self._accept(offset, block, after)

    def _accept(self, offset: int, block: Block, after: "Cursor") -> "tuple[Cursor, Sequence[Accepted]]":
        known = self.seq - block.first_seq + 1
        if known < 0:
            raise Gap(f"offset {offset}: begins at seq {block.first_seq}, the last known seq is {self.seq}")
        if known > block.count:
            return after, ()
        hash_at_cursor = block.prev if known == 0 else block.hashes[known - 1]
        if hash_at_cursor != self.head:
            raise Corrupt(f"offset {offset}: another history at seq {self.seq}")
        if known == block.count:
            return after, ()
        seqs = range(self.seq + 1, block.first_seq + block.count)
        news = list(map(_accepted, zip(seqs, block.lines[known:], block.hashes[known:], strict=True)))
        return after._replace(seq=news[-1].seq, head=news[-1].hash), news
