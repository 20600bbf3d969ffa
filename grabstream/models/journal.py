"""The format of the journal and the rules of reading it: blocks, markers, the hash chain, and the cursor that
accepts or ignores records (docs/protocol.md).

This module does not read Kafka. The caller passes a record as offset, headers and value, and `Cursor.feed`
returns the events that the record adds to the history.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from grabstream.models.bounds import shortened

GENESIS: Final = bytes(32)
#: The end of the owner id of a relay that signs. A cursor has this owner from the first signed marker of a
#: shard on, so it records permanently that unsigned records no longer count.
SIGNED_OWNER: Final = "-signed"
#: The digits of a number in the headers.
NUMBER_DIGITS_MAX: Final = 15
#: What a signature is for: the first line of the text that is signed.
SIGNATURE_PURPOSE: Final = b"grabstream journal record 1"

Headers = Sequence[tuple[str, bytes]]
#: Whether a relay signed a record. `unchecked`: the process knows no public keys, and records count as if
#: there were no signatures. `forged`: it claims to be signed, and is not.
Authority = Literal["unchecked", "signed", "unsigned", "forged"]


class Corrupt(Exception):
    """The journal contradicts itself: the shard must stop, and neither this nor any later record may be
    used.
    """


class Gap(Exception):
    """Events are missing between the cursor and a block that counts. The caller must read from the offset of
    the cursor first.
    """


class Block(NamedTuple):
    """One journal record. A block of count 0 is a marker: it has no lines, and `prev` and `head` are empty;
    the `head` of an anchor is the hash at the seq before its `first_seq`. `last_seqs` has the last seq of
    each line: a run of grabs takes as many seqs as it has grabs.
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
    authority: Authority = "unchecked"
    #: Why the record is forged, or why one that is not signed cannot be read; '' if neither.
    fault: str = ""

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


def anchor_headers(cursor: "Cursor", shard: int) -> list[tuple[str, bytes]]:
    """Headers of an anchor, a record of count 0 that a relay signs after its marker: it names the history up
    to the marker, which may be unsigned, by its last seq and hash. The cursor is that after the marker.
    """
    return [
        *marker_headers(shard, cursor.term, cursor.owner),
        ("first_seq", b"%d" % (cursor.seq + 1)),
        ("head", cursor.head.hex().encode()),
    ]


def named(headers: Headers) -> dict[str, bytes]:
    """Headers by name; of several with one name, the last one. A value may be null in Kafka, and any writer
    of the topic can write such a record: it counts as empty, and stops no reader.
    """
    return {name: value or b"" for name, value in headers}


def is_signed_owner(owner: str) -> bool:
    """Whether an owner signs its records: after its marker, unsigned records do not count."""
    return owner.endswith(SIGNED_OWNER)


def signed_text(journal: str, shard: int, headers: Mapping[str, bytes]) -> bytes:
    """What the signature of a record covers: purpose, topic, partition, and every header that decides what
    the record means. `head` covers the lines.
    """
    names = ("term", "owner", "first_seq", "count", "seqs", "prev", "head")
    fields = [headers.get(name, b"") for name in names]
    # Headers may hold anything: with their lengths, no two records have one text.
    return b"\n".join(
        [SIGNATURE_PURPOSE, journal.encode(), b"%d" % shard, *(b"%d:%b" % (len(one), one) for one in fields)]
    )


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


#: How each line begins.
LINE_BEGINS: Final = b'{"type":"'
#: The seq in the text of a line. The scripts write these fields first, in this order.
_seq_in = re.compile(
    rb'\{"type":"[a-z._]{1,64}","v":[0-9]{1,9},"shard":[0-9]{1,9},"seq":([0-9]{1,15}),'
).match


def last_seqs_of(lines: Sequence[bytes], first_seq: int, seqs: int) -> Sequence[int]:
    """The last seq of each of some lines that take `seqs` seqs from `first_seq`: the seq before that in the
    text of the next line. Raises Corrupt if the texts contradict this.
    """
    if seqs == len(lines):
        return range(first_seq, first_seq + seqs)
    found = [int(match[1]) if (match := _seq_in(line)) else 0 for line in lines]
    after = [*found[1:], first_seq + seqs]
    if found[:1] != [first_seq] or any(seq >= next_seq for seq, next_seq in pairwise([*found, after[-1]])):
        raise Corrupt(
            f"the lines from seq {first_seq} on do not cover {seqs} seqs by their texts: one begins with "
            "another seq"
        )
    return [seq - 1 for seq in after]


_is_digest = re.compile(rb"[0-9a-f]{64}").fullmatch


def _number(text: bytes) -> int:
    """A number of the headers. What `int` takes beyond digits, readers in other languages would refuse."""
    if not text.isdigit() or len(text) > NUMBER_DIGITS_MAX:
        raise ValueError(f"not a number: {text!r}")
    return int(text)


def _digest(text: bytes) -> bytes:
    """A hash of the headers."""
    if not _is_digest(text):
        raise ValueError(f"not a hash: {text!r}")
    return bytes.fromhex(text.decode())


def parse_block(headers: Headers, value: bytes | None) -> Block:
    """Parses a record and chains its lines from its header `prev`; raises Corrupt when the record contradicts
    itself.
    """
    given = named(headers)
    try:
        shard, term, count = (_number(given[name]) for name in ("shard", "term", "count"))
        owner = given["owner"].decode()
        if count == 0:
            return Block(shard, term, owner, 0, 0, b"", b"", (), (), ())
        first_seq, seqs = _number(given["first_seq"]), _number(given["seqs"]) if "seqs" in given else count
        prev, head = _digest(given["prev"]), _digest(given["head"])
    except (KeyError, ValueError) as error:
        # The error may quote a header of a megabyte.
        raise Corrupt(f"headers cannot be read: {shortened(repr(error))}") from None
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


def parse_signed(headers: Headers, value: bytes | None, shard: int, authority: Authority, why: str) -> Block:
    """Parses a record of a partition after the check of its signature; `why` is the reason if no relay signed
    it. Raises nothing: an unsigned record may be anything, and must not stop a reader. Signed headers with
    lines of another record are forged.
    """
    try:
        block = parse_block(headers, value)
        if block.shard != shard:
            raise Corrupt(f"a block of shard {block.shard} in partition {shard}")
        if block.count == 0 and authority == "signed" and (head := named(headers).get("head")):
            block = block._replace(first_seq=_number(named(headers)["first_seq"]), head=_digest(head))
    except (Corrupt, KeyError, ValueError) as error:
        authority = "forged" if authority == "signed" else authority
        fault = f"{why}; {error}".removeprefix("; ")
        return Block(shard, 0, "", 0, 0, b"", b"", (), (), (), authority, fault)
    return block._replace(authority=authority, fault=why if authority == "forged" else "")


class Cursor(NamedTuple):
    """The position of a reader in a shard: the last `seq` and the hash after it, the next offset, and the
    current term and owner. It is after a whole line.
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
        if self.ignores(block):
            return after, ()
        if block.authority == "unsigned" and block.fault:
            raise Corrupt(f"offset {offset}: {block.fault}")
        if block.count == 0:
            if block.term > self.term:
                after = after._replace(term=block.term, owner=block.owner)
            elif block.authority == "signed" and (block.term, block.owner) == (self.term, self.owner):
                self._check_anchor(offset, block)
            return after, ()
        if block.term > self.term:
            raise Corrupt(
                f"offset {offset}: a block of term {block.term}, but no marker of this term before it"
            )
        if block.term < self.term or block.owner != self.owner:
            return after, ()
        return self._accept(offset, block, after)

    def ignores(self, block: Block) -> bool:
        """Whether a record does not count here because no known relay signed it, whatever it contains."""
        return block.authority == "forged" or (block.authority == "unsigned" and is_signed_owner(self.owner))

    def _check_anchor(self, offset: int, block: Block) -> None:
        """Compares an anchor of the present owner with the history that was read."""
        if not block.head or block.first_seq <= self.seq:
            return
        if block.first_seq - 1 > self.seq:
            raise Gap(f"offset {offset}: the anchor is at seq {block.first_seq - 1}, the last is {self.seq}")
        if block.head != self.head:
            raise Corrupt(f"offset {offset}: another history at seq {self.seq} than the anchor has")

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
