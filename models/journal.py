"""The format of the journal and the rules of reading it: blocks, markers, the hash chain, and the cursor that
accepts or ignores records (docs/protocol.md).

This module does not read Kafka. The caller passes a record as offset, headers and value, and `Cursor.feed`
returns the events that the record adds to the history.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from itertools import pairwise
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
    empty. `last_seqs` has the last seq of each line: a run of grabs takes as many seqs as it has grabs.
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
    last_seqs: Sequence[int]

    @property
    def last_seq(self) -> int:
        """The last seq of the block; that before `first_seq` for a marker."""
        return self.last_seqs[-1] if self.last_seqs else self.first_seq - 1


class Accepted(NamedTuple):
    """A line that counts: its last seq, the line in the journal, and the hash of the chain after it."""

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
    shard: int, term: int, owner: str, first_seq: int, count: int, prev: bytes, head: bytes, seqs: int = 0
) -> list[tuple[str, bytes]]:
    """Headers of a block of `count` lines; its value is the lines joined by newlines. `seqs` is the number of
    seqs that the lines take; 0: one each.
    """
    return [
        ("shard", b"%d" % shard),
        ("term", b"%d" % term),
        ("owner", owner.encode()),
        ("first_seq", b"%d" % first_seq),
        ("count", b"%d" % count),
        *([("seqs", b"%d" % seqs)] if seqs not in (0, count) else ()),
        ("prev", prev.hex().encode()),
        ("head", head.hex().encode()),
    ]


#: The seq in the text of a line. The scripts write these fields first, in this order.
_seq_in = re.compile(
    rb'\{"type":"[a-z._]{1,64}","v":[0-9]{1,9},"shard":[0-9]{1,9},"seq":([0-9]{1,15}),'
).match


def last_seqs_of(lines: Sequence[bytes], first_seq: int, seqs: int) -> Sequence[int]:
    """The last seq of each of some lines that take `seqs` seqs from `first_seq` on: the seq before that in
    the text of the next line. Raises Corrupt if the texts contradict this.
    """
    if seqs == len(lines):
        return range(first_seq, first_seq + seqs)
    found = [int(match[1]) if (match := _seq_in(line)) else 0 for line in lines]
    after = [*found[1:], first_seq + seqs]
    if found[:1] != [first_seq] or any(seq >= next_seq for seq, next_seq in pairwise([*found, after[-1]])):
        raise Corrupt(
            f"the lines from seq {first_seq} on do not take {seqs} seqs by their texts: one begins with "
            f"another seq"
        )
    return [seq - 1 for seq in after]


def parse_block(headers: Headers, value: bytes | None) -> Block:
    """Parses a record and chains its lines from its header `prev`; raises Corrupt when the record contradicts
    itself.
    """
    named = dict(headers)
    try:
        shard, term, count = int(named["shard"]), int(named["term"]), int(named["count"])
        owner = named["owner"].decode()
        if count == 0:
            return Block(shard, term, owner, 0, 0, b"", b"", (), (), ())
        first_seq, seqs = int(named["first_seq"]), int(named.get("seqs", count))
        prev, head = bytes.fromhex(named["prev"].decode()), bytes.fromhex(named["head"].decode())
    except (KeyError, ValueError) as error:
        raise Corrupt(f"headers cannot be read: {error!r}") from None
    lines = tuple((value or b"").split(b"\n"))
    if len(lines) != count:
        raise Corrupt(f"{len(lines)} lines where the header says {count}")
    hashes = tuple(chain(prev, lines))
    if hashes[-1] != head:
        raise Corrupt(
            f"the lines of seq {first_seq} to {first_seq + seqs - 1} do not lead to the head in the header"
        )
    last_seqs = last_seqs_of(lines, first_seq, seqs)
    return Block(shard, term, owner, first_seq, count, prev, head, lines, hashes, last_seqs)


class Cursor(NamedTuple):
    """The position of a reader in a shard: the last `seq` and the hash after it, the next offset, and the
    current term and owner. It stands after a whole line.
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
        if self.seq < block.first_seq - 1:
            raise Gap(f"offset {offset}: begins at seq {block.first_seq}, the last known seq is {self.seq}")
        if self.seq > block.last_seq:
            return after, ()
        # The number of lines that are known.
        known = bisect_left(block.last_seqs, self.seq) + 1 if self.seq >= block.first_seq else 0
        if known and block.last_seqs[known - 1] != self.seq:
            raise Corrupt(f"offset {offset}: seq {self.seq}, where the reader is, is within a run of grabs")
        hash_at_cursor = block.prev if known == 0 else block.hashes[known - 1]
        if hash_at_cursor != self.head:
            raise Corrupt(f"offset {offset}: another history at seq {self.seq}")
        if known == block.count:
            return after, ()
        columns = (block.last_seqs[known:], block.lines[known:], block.hashes[known:])
        news = list(map(_accepted, zip(*columns, strict=True)))
        return after._replace(seq=news[-1].seq, head=news[-1].hash), news
