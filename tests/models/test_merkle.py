"""Merkle trees: roots and proofs are those of RFC 9162, and nothing else is proved."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.merkle import Path, Root, leaf_hash, node_hash, root_of_proof

#: Leaves and roots of the test vectors of Certificate Transparency (RFC 6962 has the same trees).
VECTOR_LEAVES = [
    bytes.fromhex(text)
    for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"
    )
]  # fmt: skip
VECTOR_ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def root_of(leaves: list[bytes]) -> bytes:
    """The definition of the RFC, word by word."""
    if not leaves:
        return sha256().digest()
    if len(leaves) == 1:
        return leaf_hash(leaves[0])
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return node_hash(root_of(leaves[:half]), root_of(leaves[half:]))


def root(leaves: list[bytes]) -> bytes:
    made = Root()
    for leaf in leaves:
        made.add(leaf_hash(leaf))
    return made.hash()


def path(leaves: list[bytes], index: int) -> list[bytes]:
    made = Path(index, len(leaves))
    for leaf in leaves:
        made.add(leaf_hash(leaf))
    assert made.root.hash() == root(leaves)
    return made.hashes()


def test_roots_are_those_of_the_vectors() -> None:
    assert {size: root(VECTOR_LEAVES[:size]).hex() for size in VECTOR_ROOTS} == VECTOR_ROOTS


def test_every_leaf_of_every_small_tree_is_proved_and_no_other_leaf() -> None:
    for size in range(1, 35):
        leaves = [b"%d" % number for number in range(size)]
        assert root(leaves) == root_of(leaves)
        for index in range(size):
            proof = path(leaves, index)
            assert root_of_proof(leaf_hash(leaves[index]), index, size, proof) == root(leaves)
            for other in {0, index ^ 1, size - 1} - {index}:
                assert root_of_proof(leaf_hash(leaves[index]), other, size, proof) != root(leaves)
                wrong = leaf_hash(leaves[other % size]) if other < size else b""
                assert root_of_proof(wrong, index, size, proof) != root(leaves)


@given(st.integers(2, 300), st.data())
def test_a_changed_proof_proves_nothing(size: int, data: st.DataObject) -> None:
    leaves = [b"%d" % number for number in range(size)]
    index = data.draw(st.integers(0, size - 1))
    proof = path(leaves, index)
    place = data.draw(st.integers(0, len(proof) - 1))
    changed = [*proof[:place], sha256(proof[place]).digest(), *proof[place + 1 :]]
    for wrong in (changed, proof[:-1], [*proof, proof[0]], proof[::-1] if proof[::-1] != proof else changed):
        assert root_of_proof(leaf_hash(leaves[index]), index, size, wrong) != root(leaves)


def test_a_node_is_no_leaf() -> None:
    """The classic second preimage: the text of a node given as that of an event."""
    leaves = [b"a", b"b", b"c", b"d"]
    left, right = node_hash(leaf_hash(b"a"), leaf_hash(b"b")), node_hash(leaf_hash(b"c"), leaf_hash(b"d"))
    assert root_of_proof(leaf_hash(left + right), 0, 1, []) != root(leaves)


def test_an_index_outside_of_the_tree_has_no_proof() -> None:
    assert root_of_proof(leaf_hash(b"a"), 1, 1, []) is None
    assert root_of_proof(leaf_hash(b"a"), -1, 1, []) is None
    assert root_of_proof(leaf_hash(b"a"), 0, 0, []) is None
