"""Signed records of the journal: which count, which are ignored, and that nothing a stranger writes stops a
reader.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.journal import (
    GENESIS,
    SIGNED_OWNER,
    Corrupt,
    Cursor,
    Gap,
    Headers,
    anchor_headers,
    block_headers,
    chain,
    marker_headers,
    parse_block,
)
from grabstream.streams.journal_keys import JournalKeys, Signer, new_key_pair

TOPIC: Final = "grab.journal"
LINES: Final = [b'{"n":%d}' % number for number in range(1, 31)]
HASHES: Final = [GENESIS, *chain(GENESIS, LINES)]
A, B, OWNER_A, OWNER_B = "k1", "k2", f"a{SIGNED_OWNER}", f"b{SIGNED_OWNER}"
PAIRS: Final = {name: new_key_pair() for name in (A, B, "stranger")}
#: What a reader knows: the public keys of both relays.
KNOWN: Final = JournalKeys.from_text("", ",".join(f"{name}:{PAIRS[name][1]}" for name in (A, B)))


class Written(NamedTuple):
    """A record that another program writes to the journal."""

    headers: Headers
    value: bytes = b""


def signer(name: str) -> Signer:
    found = JournalKeys.from_text(f"{name}:{PAIRS[name][0]}", "").signer
    assert found is not None
    return found


def signed(record: Written, name: str = A, topic: str = TOPIC, shard: int = 0) -> Written:
    return record._replace(headers=signer(name).signed(topic, shard, record.headers))


def marker(term: int, owner: str = OWNER_A, shard: int = 0) -> Written:
    return Written(marker_headers(shard, term, owner))


def block(
    first: int, last: int, term: int = 1, owner: str = OWNER_A, lines: Sequence[bytes] = LINES
) -> Written:
    of_block = lines[first - 1 : last]
    prev = HASHES[first - 1]
    headers = block_headers(0, term, owner, first, len(of_block), prev, chain(prev, of_block)[-1])
    return Written(headers, b"\n".join(of_block))


def anchor(seq: int, term: int = 1, owner: str = OWNER_A, head: bytes | None = None) -> Written:
    return Written(anchor_headers(Cursor(seq, head or HASHES[seq], 0, term, owner), 0))


def without(record: Written, *names: str) -> Written:
    return record._replace(headers=[(name, value) for name, value in record.headers if name not in names])


def changed(record: Written, **values: bytes) -> Written:
    return record._replace(headers=list({**dict(record.headers), **values}.items()))


def read(
    records: Sequence[Written], cursor: Cursor = Cursor(), keys: JournalKeys = KNOWN, shard: int = 0
) -> tuple[Cursor, list[int], list[int]]:
    """The cursor after the records, the seqs that they add, and the offsets that are ignored."""
    seqs, ignored = [], []
    for offset, record in enumerate(records, cursor.next_offset):
        found = keys.block(TOPIC, shard, record.headers, record.value)
        if cursor.ignores(found):
            ignored.append(offset)
        cursor, accepted = cursor.feed(offset, found)
        seqs += [event.seq for event in accepted]
    return cursor, seqs, ignored


#: A shard after a signed takeover: its marker, its anchor, and five events.
SIGNED: Final = [signed(marker(1)), signed(anchor(0)), signed(block(1, 5))]
FORGED_LINES: Final = [*LINES[:5], *[b'{"forged":%d}' % number for number in range(6, 31)]]

#: Records that no reader may count after SIGNED, by what the forger does.
FORGED: Final[dict[str, Callable[[], list[Written]]]] = {
    "a marker of a higher term and a self-made block": lambda: [
        marker(9, "f"), block(6, 9, 9, "f", FORGED_LINES)
    ],
    "the same, with the name of an owner that signs": lambda: [
        marker(9, f"f{SIGNED_OWNER}"), block(6, 9, 9, f"f{SIGNED_OWNER}", FORGED_LINES)
    ],
    "a block in the name of the owner": lambda: [block(6, 9, lines=FORGED_LINES)],
    "signed by an unknown key": lambda: [
        signed(marker(9), "stranger"), signed(block(6, 9, 9, lines=FORGED_LINES), "stranger")
    ],
    "signed by an unknown key under the id of a known one": lambda: [
        changed(signed(block(6, 9, lines=FORGED_LINES), "stranger"), key=A.encode())
    ],
    "the signature is cut": lambda: [changed(signed(block(6, 9)), sig=b"00")],
    "the signature is no hex": lambda: [changed(signed(block(6, 9)), sig=b"zz" * 64)],
    "the signature has bytes beyond ASCII": lambda: [changed(signed(block(6, 9)), sig=b"\xff" * 128)],
    "the header sig is stripped": lambda: [without(signed(block(6, 9)), "sig")],
    "the header key is stripped": lambda: [without(signed(block(6, 9)), "key")],
    "both headers are stripped": lambda: [without(signed(block(6, 9)), "key", "sig")],
    "the signature of the marker on a block": lambda: [
        changed(block(6, 9), key=A.encode(), sig=dict(SIGNED[0].headers)["sig"])
    ],
    "the signature of a block on a marker": lambda: [
        changed(marker(9), key=A.encode(), sig=dict(SIGNED[2].headers)["sig"])
    ],
    "a signed block with other lines": lambda: [
        signed(block(6, 9))._replace(value=b"\n".join(FORGED_LINES[5:9]))
    ],
    "a signed block without lines": lambda: [signed(block(6, 9))._replace(value=b"")],
    "a signed block with a raised term": lambda: [changed(signed(block(6, 9)), term=b"2")],
    "a signed block with another first seq": lambda: [changed(signed(block(6, 9)), first_seq=b"7")],
    "a signed block with another count of seqs": lambda: [changed(signed(block(6, 9)), seqs=b"9")],
    "a signed block of another shard": lambda: [
        signed(changed(block(6, 9), shard=b"3"), shard=3)
    ],
    "a signed block of another shard with this one's number": lambda: [signed(block(6, 9), shard=3)],
    "a signed block of another journal": lambda: [signed(block(6, 9), topic="other.journal")],
    "a signed marker of another journal": lambda: [signed(marker(9), topic="other.journal")],
    "signed, in the name of an owner that does not sign": lambda: [
        signed(marker(9, "f")), signed(block(6, 9, 9, "f", FORGED_LINES))
    ],
    "a forged anchor": lambda: [anchor(7, head=HASHES[3])],
    "an anchor with another seq": lambda: [changed(SIGNED[1], first_seq=b"20")],
    "headers that are no numbers": lambda: [changed(marker(9), term=b"x"), changed(block(6, 9), count=b"-3")],
    "no headers": lambda: [Written([]), Written([], b"text")],
    "enormous numbers": lambda: [changed(marker(9), term=b"9" * 5_000)],
    "an unsigned block after a gap": lambda: [block(20, 25)],
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_what_no_relay_signed_is_ignored_and_stops_nobody(forged: str) -> None:
    cursor, _, _ = read(SIGNED)
    records = FORGED[forged]()
    after, seqs, ignored = read(records, cursor)
    assert (after, seqs) == (cursor._replace(next_offset=3 + len(records)), [])
    assert ignored == list(range(3, 3 + len(records)))
    # The owner continues as if nothing had been between.
    assert read([signed(block(6, 9))], after)[1] == [6, 7, 8, 9]


@pytest.mark.parametrize("forged", FORGED)
def test_a_reader_from_the_beginning_ignores_the_same(forged: str) -> None:
    records = [*SIGNED, *FORGED[forged](), signed(marker(2, OWNER_B), B), signed(block(6, 9, 2, OWNER_B), B)]
    cursor, seqs, _ = read(records)
    assert seqs == list(range(1, 10))
    assert (cursor.term, cursor.owner) == (2, OWNER_B)


def test_old_records_that_are_written_again_change_nothing() -> None:
    cursor, _, _ = read([*SIGNED, signed(marker(2, OWNER_B), B)])
    after, seqs, ignored = read([*SIGNED, signed(block(6, 9))], cursor)
    assert (after.seq, after.term, seqs, ignored) == (5, 2, [], [])


def test_unsigned_history_counts_up_to_the_first_signed_marker() -> None:
    records = [
        marker(1, "a"),
        block(1, 5, 1, "a"),
        signed(marker(2)),
        block(6, 7, 1, "a"),
        block(6, 7, 2, "a"),
        signed(anchor(5, 2)),
        signed(block(6, 9, 2)),
        marker(7, "a"),
        block(10, 12, 7, "a"),
    ]
    cursor, seqs, ignored = read(records)
    assert seqs == list(range(1, 10))
    assert ignored == [3, 4, 7, 8]
    assert cursor == Cursor(9, HASHES[9], 9, 2, OWNER_A)


def test_before_that_a_forged_marker_cannot_begin_signing() -> None:
    forged = [marker(5, f"f{SIGNED_OWNER}"), signed(marker(6), "stranger")]
    assert read([marker(1, "a"), *forged, block(1, 5, 1, "a")])[1] == [1, 2, 3, 4, 5]


def test_the_beginning_of_signing_cannot_be_repeated_or_moved() -> None:
    """Two relays begin at once, one dies before its anchor, and anchors are written again."""
    records = [
        marker(1, "a"),
        block(1, 5, 1, "a"),
        signed(marker(2)),
        signed(marker(3, OWNER_B), B),
        signed(anchor(5, 2)),
        signed(anchor(5, 3, OWNER_B), B),
        signed(block(6, 9, 3, OWNER_B), B),
        signed(anchor(5, 3, OWNER_B), B),
        signed(anchor(5, 2)),
    ]
    assert read(records)[:2] == (Cursor(9, HASHES[9], 9, 3, OWNER_B), list(range(1, 10)))


def test_an_anchor_that_names_another_history_stops_the_reader() -> None:
    """The unsigned history before it was changed."""
    with pytest.raises(Corrupt, match="another history at seq 5"):
        read([marker(1, "a"), block(1, 5, 1, "a"), signed(marker(2)), signed(anchor(5, 2, head=HASHES[4]))])
    with pytest.raises(Gap, match="the anchor is at seq 7, the last is 5"):
        read([marker(1, "a"), block(1, 5, 1, "a"), signed(marker(2)), signed(anchor(7, 2))])


def test_a_real_gap_and_another_history_still_stop_the_reader() -> None:
    with pytest.raises(Gap):
        read([*SIGNED, signed(block(8, 9))])
    other = block_headers(0, 1, OWNER_A, 6, 4, HASHES[4], chain(HASHES[4], LINES[5:9])[-1])
    with pytest.raises(Corrupt, match="another history at seq 5"):
        read([*SIGNED, signed(Written(other, b"\n".join(LINES[5:9])))])
    with pytest.raises(Corrupt, match="no marker"):
        read([*SIGNED, signed(block(6, 9, 4))])


def test_after_a_rotation_both_keys_count_and_a_removed_one_does_not() -> None:
    rotated = [*SIGNED, signed(marker(2, OWNER_B), B), signed(block(6, 9, 2, OWNER_B), B)]
    assert read(rotated)[1] == list(range(1, 10))
    only_new = JournalKeys.from_text("", f"{B}:{PAIRS[B][1]}")
    cursor, _, _ = read(SIGNED)
    after, _, _ = read(rotated[3:], cursor, only_new)
    assert read([signed(marker(5)), signed(block(10, 12, 5))], after, only_new)[1:] == ([], [5, 6])


def test_without_keys_records_count_as_they_always_did() -> None:
    nobody = JournalKeys()
    records = [*SIGNED, marker(9, "f"), block(6, 9, 9, "f")]
    assert read(records, keys=nobody)[1] == list(range(1, 10))
    with pytest.raises(Corrupt):
        read([Written([])], keys=nobody)


def test_before_signing_begins_a_record_that_contradicts_itself_stops_a_reader_as_it_always_did() -> None:
    with pytest.raises(Corrupt, match="offset 1: .*headers cannot be read"):
        read([marker(1, "a"), Written([])])
    with pytest.raises(Corrupt, match="a block of shard 3 in partition 0"):
        read([marker(1, "a", shard=3)])


@given(
    st.dictionaries(
        st.sampled_from(
            ("shard", "term", "owner", "first_seq", "count", "seqs", "prev", "head", "key", "sig", "more")
        ),
        # Kafka's values may be null.
        st.none() | st.binary(max_size=140),
    ),
    st.none() | st.binary(max_size=40),
)
def test_no_record_of_a_stranger_raises_or_counts(headers: dict[str, Any], value: Any) -> None:
    cursor, _, _ = read(SIGNED)
    base = dict(SIGNED[2].headers)
    for record in (Written(list(headers.items()), value), Written(list({**base, **headers}.items()), value)):
        after, seqs, _ = read([record], cursor)
        assert (after[:2], after[3:], seqs) == (cursor[:2], cursor[3:], [])


@pytest.mark.parametrize("name", ["shard", "term", "count", "first_seq", "prev", "head"])
def test_a_null_in_the_headers_of_a_block_is_corrupt(name: str) -> None:
    headers = [*((other, value) for other, value in SIGNED[2].headers if other != name), (name, None)]
    with pytest.raises(Corrupt):
        parse_block(headers, SIGNED[2].value)  # type: ignore[arg-type]


def test_what_is_said_of_a_large_header_is_short() -> None:
    with pytest.raises(Corrupt) as raised:
        parse_block([("shard", b"0"), ("term", b"1"), ("count", b"1"), ("owner", b"\xff" * 100_000)], b"")
    assert len(str(raised.value)) < 2_000


@pytest.mark.parametrize(
    ("private", "public", "problem"),
    [
        ("k1", "", "GRAB_JOURNAL_KEYS: key 1 must be id:key"),
        ("", "k1:abc", "GRAB_JOURNAL_PUBLIC_KEYS: key 1: an Ed25519 key has 32 bytes"),
        ("", "k1:%%%", "GRAB_JOURNAL_PUBLIC_KEYS: key 1 is not base64"),
        ("", f"k1:{PAIRS[A][1]},k1:{PAIRS[B][1]}", "key 2 has the id of another key"),
        (f"k1:{PAIRS[A][0]}", f"k1:{PAIRS[B][1]}", "the key of id k1 is not that of GRAB_JOURNAL_KEYS"),
    ],
    ids=["no id", "short", "no base64", "one id twice", "another pair"],
)
def test_keys_that_cannot_be_read_are_named(private: str, public: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        JournalKeys.from_text(private, public)


def test_base64url_without_padding_is_a_key() -> None:
    raw = base64.b64decode(PAIRS[A][1])
    text = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    assert JournalKeys.from_text("", f"k1:{text}").public["k1"] == KNOWN.public[A]
