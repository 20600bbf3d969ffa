"""Golden vectors of the journal: records as a broker has them, and what a reader must find in them.

`python -m tests.support.journal_vectors` writes the files of vectors that have none yet. A file is never
edited: readers in other languages are tested with them (docs/journal.md).
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
)
from grabstream.models.runs import decode_line
from grabstream.streams.follower import Decoded
from grabstream.streams.journal import JournalRecord
from grabstream.streams.journal_keys import JournalKeys, Signer
from tests.support.runs import as_lines

FOLDER: Final = Path(__file__).parents[1] / "golden" / "journal"
EVENTS: Final = Path(__file__).parents[1] / "golden" / "events"
SUMS: Final = FOLDER / "SHA256SUMS"
TOPIC: Final = "grab.journal"


class Stored(NamedTuple):
    """A record of the topic."""

    headers: Headers
    value: bytes | None = b""
    shard: int = 0
    offset: int = -1  # the one after the record before


class Vector(NamedTuple):
    """Records, the public keys that the reader knows, and what it must find, by shard: the verdict, the last
    seq, and the offsets of the records that no known relay signed.
    """

    records: Sequence[Stored]
    keys: Sequence[str] = ()
    expected: dict[int, tuple[str, int, list[int]]] = {}


# -- records -------------------------------------------------------------------------------------------------

#: Keys that may be public: with them, the vectors are the same each time they are made.
PRIVATE: Final = {
    name: Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"vector key {name}".encode()).digest())
    for name in ("k1", "k2", "stranger")
}
#: The public keys by id. The stranger's is not known to readers.
PUBLIC: Final = {
    name: base64.b64encode(key.public_key().public_bytes_raw()).decode() for name, key in PRIVATE.items()
}
A, B = f"a{SIGNED_OWNER}", f"b{SIGNED_OWNER}"
RUN: Final = (
    '{"type":"grab.granted","v":2,"shard":%d,"seq":%d,"offer_seq":%d,"offer":"sale:a","at":1800000000123,'
    '"grabs":[%s],"users":[%s],"asset":"sku:sale:a","place":1,"left":90}'
)


def event(seq: int, type_: str, shard: int = 0) -> bytes:
    """A single event: that of its golden file, at another place."""
    golden = json.loads((EVENTS / f"{type_}.v1.json").read_text())["line"]
    here = golden.replace('"shard":3,"seq":41,', f'"shard":{shard},"seq":{seq},', 1)
    assert here != golden
    return str(here).encode()


def single(seq: int, type_: str, shard: int = 0) -> bytes:
    """The line of a single event."""
    [line] = as_lines([event(seq, type_, shard)])
    return line


def run(seq: int, grabs: int, shard: int = 0) -> bytes:
    """The line of a run of `grabs` grabs."""
    ids, users = (",".join(f'"{letter}-{n}"' for n in range(seq, seq + grabs)) for letter in ("g", "u"))
    return (RUN % (shard, seq, seq + 6, ids, users)).encode()


SINGLES: Final = [
    single(seq, type_)
    for seq, type_ in enumerate(
        ("offer.opened", "grab.granted", "grab.held", "grab.confirmed", "grab.released", "grab.returned",
         "grab.redeemed", "payment.refund_due", "ledger.adjusted", "offer.closed", "offer.retired"),
        start=1,
    )
]  # fmt: skip
#: seqs 1 · 2 to 4 · 5 · 6 to 10 · 11
RUNS: Final = [single(1, "offer.opened"), run(2, 3), run(5, 1), run(6, 5), single(11, "grab.returned")]


def hash_at(seq: int, lines: Sequence[bytes] = SINGLES) -> bytes:
    """The hash after a seq of lines of which each takes one."""
    return [GENESIS, *chain(GENESIS, lines)][seq]


def marker(term: int, owner: str, shard: int = 0) -> Stored:
    """A marker."""
    return Stored(marker_headers(shard, term, owner), b"", shard)


def block(
    first: int, last: int, term: int = 1, owner: str = "a", lines: Sequence[bytes] = SINGLES, shard: int = 0
) -> Stored:
    """A block with the lines number `first` to `last`, from 1, of lines from seq 1 on."""
    given = lines[first - 1 : last]
    prev = hash_at(first - 1, lines)
    events = [decode_line(line) for line in given]
    headers = block_headers(
        shard, term, owner, events[0].seq, len(given), prev, chain(prev, given)[-1],
        sum(event.seqs for event in events),
    )  # fmt: skip
    return Stored(headers, b"\n".join(given), shard)


def anchor(seq: int, term: int = 1, owner: str = A, head: bytes | None = None) -> Stored:
    """An anchor after a seq of SINGLES."""
    return Stored(anchor_headers(Cursor(seq, head or hash_at(seq), 0, term, owner), 0))


def signed(record: Stored, key: str = "k1", topic: str = TOPIC, shard: int = 0) -> Stored:
    """A record with a signature."""
    return record._replace(headers=Signer(key, PRIVATE[key]).signed(topic, shard, record.headers))


def changed(record: Stored, **headers: bytes | None) -> Stored:
    """A record with other headers."""
    return record._replace(headers=list({**dict(record.headers), **headers}.items()))


def without(record: Stored, *names: str) -> Stored:
    """A record that lacks headers."""
    return record._replace(headers=[(name, value) for name, value in record.headers if name not in names])


# -- vectors -------------------------------------------------------------------------------------------------

BEGIN: Final = [marker(1, "a"), block(1, 3)]
SIGNED: Final = [signed(marker(1, A)), signed(anchor(0)), signed(block(1, 5, 1, A))]
OTHER: Final = [SINGLES[0], single(2, "grab.held"), *SINGLES[2:]]
FORGED: Final = [
    marker(9, "f"),
    block(6, 9, 9, "f"),
    marker(9, f"f{SIGNED_OWNER}"),
    block(6, 9, 1, A),
    signed(marker(9, A), "stranger"),
    changed(signed(block(6, 9, 1, A), "stranger"), key=b"k1"),
    changed(signed(block(6, 9, 1, A)), sig=b"00"),
    changed(signed(block(6, 9, 1, A)), sig=b"zz" * 64),
    changed(signed(block(6, 9, 1, A)), sig=b"\xff" * 128),
    without(signed(block(6, 9, 1, A)), "sig"),
    without(signed(block(6, 9, 1, A)), "key"),
    changed(signed(block(6, 9, 1, A)), first_seq=b"5"),
    signed(block(6, 9, 1, A))._replace(value=b"x"),
    signed(marker(9, "f")),
    signed(marker(9, A), shard=1),
    signed(marker(9, A), topic="other.journal"),
    Stored([("owner", b"\xff\xfe"), ("count", None)], b"\xff"),
    Stored([], None),
]


def _vectors() -> dict[str, Vector]:
    known = ("k1", "k2")
    corrupt: dict[str, tuple[int, Sequence[Stored]]] = {
        "wrong-hash": (3, [*BEGIN, block(4, 6)._replace(value=b"\n".join(OTHER[1:4]))]),
        "wrong-head": (3, [*BEGIN, changed(block(4, 6), head=b"00" * 32)]),
        "wrong-prev": (3, [*BEGIN, changed(block(4, 6), prev=b"11" * 32)]),
        "other-history": (3, [*BEGIN, block(1, 5, lines=OTHER)]),
        "no-marker": (3, [*BEGIN, block(4, 6, 2, "b")]),
        "wrong-count": (3, [*BEGIN, changed(block(4, 6), count=b"2")]),
        "wrong-seqs": (
            1, [marker(1, "a"), block(1, 1, lines=RUNS), changed(block(2, 3, lines=RUNS), seqs=b"3")]
        ),
        "wrong-seq-in-text": (
            3, [*BEGIN, block(4, 5, lines=[*SINGLES[:4], single(6, "grab.released")])]
        ),
        "wrong-shard-in-text": (3, [*BEGIN, block(4, 4, lines=[*SINGLES[:3], single(4, "grab.held", 1)])]),
        "null-as-text": (
            3,
            [*BEGIN, Stored(
                block_headers(0, 1, "a", 4, 1, hash_at(3), chain(hash_at(3), [b"null"])[-1], 1), b"null"
            )],
        ),
        "grab-without-run": (
            3,
            [*BEGIN, Stored(
                block_headers(
                    0, 1, "a", 4, 1, hash_at(3), chain(hash_at(3), [event(4, "grab.held")])[-1], 1
                ),
                event(4, "grab.held"),
            )],
        ),
        "within-a-run": (
            4,
            [marker(1, "a"), block(1, 2, lines=RUNS), Stored(block_headers(
                0, 1, "a", 3, 2, hash_at(2, RUNS), chain(hash_at(2, RUNS), [run(3, 3), run(6, 1)])[-1], 4
            ), b"\n".join([run(3, 3), run(6, 1)]))],
        ),
        "number-of-another-notation": (3, [*BEGIN, changed(block(4, 6), first_seq=b"+4")]),
        "number-too-long": (3, [*BEGIN, marker(10**15, "b")]),
        "hash-of-another-notation": (
            3, [*BEGIN, changed(block(4, 6), prev=hash_at(3).hex().upper().encode())]
        ),
        "owner-beyond-utf8": (3, [*BEGIN, changed(block(4, 6), owner=b"\xff")]),
        "no-headers": (3, [*BEGIN, Stored([], None)]),
        "another-partition": (3, [*BEGIN, marker(2, "b", 1)._replace(shard=0)]),
        "beginning-deleted": (0, [block(4, 6)]),
    }  # fmt: skip
    found = {name: Vector(records, (), {0: ("corrupt", seq, [])}) for name, (seq, records) in corrupt.items()}
    whole: dict[str, tuple[int, Sequence[Stored]]] = {
        "singles": (11, [*BEGIN, block(4, 4), block(5, 11)]),
        "runs": (11, [marker(1, "a"), block(1, 2, lines=RUNS), block(3, 5, lines=RUNS)]),
        "doubled-blocks": (
            11,
            [*BEGIN, block(1, 3), block(2, 5), block(2, 4), block(1, 7), block(8, 11), block(4, 4)],
        ),
        "doubled-runs": (
            11,
            [marker(1, "a"), block(1, 2, lines=RUNS), block(1, 3, lines=RUNS), block(2, 5, lines=RUNS),
             block(1, 1, lines=RUNS)],
        ),
        "foreign-markers": (
            8,
            [*BEGIN, marker(3, "b"), block(4, 9), marker(2, "c"), marker(3, "d"), block(4, 6, 3, "b"),
             block(7, 9, 3, "d"), block(7, 9, 2, "c"), block(7, 8, 3, "b")],
        ),
        "foreign-block-of-another-history": (
            6, [*BEGIN, marker(2, "b"), block(1, 5, lines=OTHER), block(4, 6, 2, "b")]
        ),
        "offsets-with-holes": (
            5, [marker(1, "a"), block(1, 3)._replace(offset=7), block(4, 5)._replace(offset=8)]
        ),
        # What other languages take for the end of a line.
        "separators-in-texts": (
            2,
            [marker(1, "a"),
             block(1, 2, lines=[SINGLES[0].replace(b"a ", "\u2028\u2029\u0085\x7f".encode()), SINGLES[1]])],
        ),
        "headers-null-twice-and-more": (
            4,
            [
                *BEGIN,
                Stored([("term", b"x"), *block(4, 4).headers, ("more", None), ("seqs", b"1")],
                       block(4, 4).value),
            ],
        ),
    }  # fmt: skip
    found |= {name: Vector(records, (), {0: ("whole", seq, [])}) for name, (seq, records) in whole.items()}
    other_shard = [single(1, "offer.opened", 1), run(2, 4, 1)]
    found |= {
        "empty": Vector([]),
        "shards": Vector(
            [marker(1, "a"), marker(4, "b", 1), block(1, 2, 4, "b", other_shard, 1), block(1, 3)],
            (), {0: ("whole", 3, []), 1: ("whole", 5, [])},
        ),
        "one-shard-stops": Vector(
            [marker(1, "a"), block(1, 1, 4, "b", other_shard, 1), block(1, 3)],
            (), {0: ("whole", 3, []), 1: ("corrupt", 0, [])},
        ),
        "gap": Vector([*BEGIN, block(5, 6), block(4, 6)], (), {0: ("gap", 3, [])}),
        "gap-at-the-beginning": Vector([marker(1, "a"), block(4, 6)], (), {0: ("gap", 0, [])}),
        "signed": Vector([*SIGNED, signed(block(6, 9, 1, A))], known, {0: ("whole", 9, [])}),
        "signed-read-without-keys": Vector(
            [*SIGNED, signed(block(6, 9, 1, A))], (), {0: ("whole", 9, [])}
        ),
        "signed-runs": Vector(
            [*SIGNED[:2], signed(block(1, 4, 1, A, RUNS)),
             changed(signed(block(5, 5, 1, A, RUNS)), seqs=b"1")],
            known, {0: ("whole", 10, [3])},
        ),
        "signing-begins": Vector(
            [*BEGIN, signed(marker(2, A)), signed(anchor(3, 2)), block(4, 6), signed(block(4, 5, 2, A)),
             marker(3, "b"), block(6, 7, 3, "b"), signed(block(6, 6, 2, A))],
            known, {0: ("whole", 6, [4, 6, 7])},
        ),
        "forged-before-signing-begins": Vector(
            [*BEGIN, marker(9, f"f{SIGNED_OWNER}"), signed(marker(9, A), "stranger"), block(4, 6)],
            known, {0: ("whole", 6, [2, 3])},
        ),
        "unreadable-before-signing-begins": Vector(
            [*BEGIN, Stored([], b"x"), signed(marker(2, A))], known, {0: ("corrupt", 3, [])}
        ),
        "forged": Vector(
            [*SIGNED, *FORGED, signed(block(6, 9, 1, A))], known,
            {0: ("whole", 9, list(range(3, 3 + len(FORGED))))},
        ),
        "rotated-key": Vector(
            [*SIGNED, signed(marker(2, B), "k2"), signed(anchor(5, 2, B), "k2"),
             signed(block(6, 9, 2, B), "k2")],
            known, {0: ("whole", 9, [])},
        ),
        "removed-key": Vector(
            [*SIGNED, signed(marker(2, B), "k2"), signed(block(6, 9, 2, B), "k2")],
            ("k1",), {0: ("whole", 5, [3, 4])},
        ),
        "anchor-of-another-history": Vector(
            [marker(1, "a"), block(1, 3, lines=OTHER), signed(marker(2, A)), signed(anchor(3, 2)),
             signed(block(4, 5, 2, A))],
            known, {0: ("corrupt", 3, [])},
        ),
        "anchor-after-a-gap": Vector(
            [*BEGIN, signed(marker(2, A)), signed(anchor(4, 2))], known, {0: ("gap", 3, [])}
        ),
        "signed-gap": Vector([*SIGNED, signed(block(7, 9, 1, A))], known, {0: ("gap", 5, [])}),
    }  # fmt: skip
    return found


VECTORS: Final = _vectors()

# -- files ---------------------------------------------------------------------------------------------------


def as_json(data: bytes | None) -> Any:
    """Bytes in a dump: a text, or `{"base64": …}` if they are not UTF-8."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def dump_of(records: Iterable[Stored]) -> str:
    """The lines of a dump."""
    lines, next_offset = [], dict[int, int]()
    for record in records:
        offset = record.offset if record.offset >= 0 else next_offset.get(record.shard, 0)
        next_offset[record.shard] = offset + 1
        headers = [one for name, value in record.headers for one in (name, as_json(value))]
        lines.append(json.dumps(
            {"topic": TOPIC, "partition": record.shard, "offset": offset, "headers": headers,
             "payload": as_json(record.value)},
            ensure_ascii=False,
        ) + "\n")  # fmt: skip
    return "".join(lines)


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return None if value is None else str(value).encode()


def read_dump(text: str) -> list[JournalRecord]:
    """The records of a dump, as a consumer returns them."""
    records = []
    for line in text.split("\n")[:-1]:
        found = json.loads(line)
        flat = iter(found["headers"])
        headers: Any = [(name, _bytes(value)) for name, value in zip(flat, flat, strict=True)]
        records.append(
            JournalRecord(found["partition"], found["offset"], headers, _bytes(found["payload"]) or b"")
        )
    return records


def keys_text(names: Iterable[str]) -> str:
    """Public keys as GRAB_JOURNAL_PUBLIC_KEYS has them."""
    return ",".join(f"{name}:{PUBLIC[name]}" for name in names)


def verdict_of(records: Iterable[JournalRecord], keys: str, topic: str = TOPIC) -> dict[str, Any]:
    """What the readers of this project find in records: they decode them so, and follow them so."""
    known = JournalKeys.from_text("", keys)
    cursors: dict[int, Cursor] = {}
    shards: dict[int, dict[str, Any]] = {}
    for record in records:
        found = shards.setdefault(record.shard, {"verdict": "whole", "lines": 0, "ignored": []})
        cursor = cursors.setdefault(record.shard, Cursor())
        if found["verdict"] != "whole":
            continue
        try:
            decoded = Decoded(record, known.block(topic, record.shard, record.headers, record.value))
            is_ignored = cursor.ignores(decoded.block)
            after, accepted = cursor.feed(record.offset, decoded.block)
            if accepted:
                assert decoded.facts[-1].hash == after.head
        except (Corrupt, Gap) as error:
            found["verdict"] = type(error).__name__.lower()
            continue
        cursors[record.shard] = after
        found["lines"] += len(accepted)
        if is_ignored:
            found["ignored"].append(record.offset)
    return {
        "topic": topic,
        "keys": keys,
        "shards": {
            str(shard): {
                "verdict": found["verdict"],
                "seq": cursors[shard].seq,
                "head": cursors[shard].head.hex(),
                "lines": found["lines"],
                "next_offset": cursors[shard].next_offset,
                "term": cursors[shard].term,
                "owner": cursors[shard].owner,
                "ignored": found["ignored"],
            }
            for shard, found in sorted(shards.items())
        },
    }


def _write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, vector in VECTORS.items():
        dump, verdict = FOLDER / f"{name}.jsonl", FOLDER / f"{name}.verdict.json"
        if not dump.exists():
            text = dump_of(vector.records)
            dump.write_text(text)
            found = verdict_of(read_dump(text), keys_text(vector.keys))
            verdict.write_text(json.dumps(found, indent=1) + "\n")
    names = sorted(path for path in FOLDER.iterdir() if path.suffix in (".jsonl", ".json"))
    SUMS.write_text(
        "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in names)
    )


if __name__ == "__main__":
    _write()
