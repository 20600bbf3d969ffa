"""Merkle trees of RFC 9162 (section 2.1): a root for the events of a shard, and proofs that one event is
among them.

A leaf is the text of an event as `grab.events` has it, one for each seq: the leaf of seq n has index n - 1.
The tree is never held: its root is made from a stream of leaves with one hash for each power of two.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

#: What begins the bytes that are hashed: a leaf cannot be taken for a node.
LEAF: Final = b"\x00"
NODE: Final = b"\x01"
#: More siblings than a tree of 2^64 leaves has.
SIBLINGS_MAX: Final = 64


def leaf_hash(text: bytes) -> bytes:
    """The hash of a leaf."""
    return sha256(LEAF + text).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node."""
    return sha256(NODE + left + right).digest()


class Root:
    """Makes the root of a tree from the hashes of its leaves, in order; keeps at most 64 hashes."""

    def __init__(self) -> None:
        self.size = 0
        self._hashes: list[bytes] = []

    def add(self, leaf: bytes) -> None:
        """Adds the hash of the next leaf."""
        self.size += 1
        rest = self.size
        while rest % 2 == 0:
            leaf = node_hash(self._hashes.pop(), leaf)
            rest //= 2
        self._hashes.append(leaf)

    def hash(self) -> bytes:
        """The root; without leaves, the hash of nothing."""
        if not self._hashes:
            return sha256().digest()
        *rest, root = self._hashes
        for left in reversed(rest):
            root = node_hash(left, root)
        return root


class LeafRange(NamedTuple):
    """The leaves from index `start` up to `end`, excluded: those below one node of a tree."""

    start: int
    end: int


def siblings(index: int, size: int) -> list[LeafRange]:
    """The spans whose roots prove the leaf of an index in a tree of a size, from the leaf up."""
    start, end, found = 0, size, list[LeafRange]()
    while end - start > 1:
        middle = start + (1 << ((end - start - 1).bit_length() - 1))
        if index < middle:
            found.append(LeafRange(middle, end))
            end = middle
        else:
            found.append(LeafRange(start, middle))
            start = middle
    return found[::-1]


class Path:
    """Makes the proof of one leaf from the hashes of all leaves, in order, and the root."""

    def __init__(self, index: int, size: int) -> None:
        self.root = Root()
        self._spans = siblings(index, size)
        self._roots = [Root() for _ in self._spans]
        #: The spans in the order of their leaves.
        self._order = sorted(range(len(self._spans)), key=lambda place: self._spans[place])

    def add(self, leaf: bytes) -> None:
        """Adds the hash of the next leaf."""
        index = self.root.size
        self.root.add(leaf)
        while self._order and self._spans[self._order[0]].end <= index:
            self._order.pop(0)
        if self._order and self._spans[self._order[0]].start <= index:
            self._roots[self._order[0]].add(leaf)

    def hashes(self) -> list[bytes]:
        """The hashes of the proof, from the leaf up, when all leaves were added."""
        return [root.hash() for root in self._roots]


def root_of_proof(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """The root to which a proof leads from the hash of a leaf; None if no tree of this size has such a proof.
    RFC 9162, section 2.1.3.2.
    """
    if not 0 <= index < size:
        return None
    spans = siblings(index, size)
    if len(spans) != len(path):
        return None
    root = leaf
    for span, sibling in zip(spans, path, strict=True):
        root = node_hash(sibling, root) if span.start < index else node_hash(root, sibling)
    return root
