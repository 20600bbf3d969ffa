"""Old events remain readable: every type and version of an event has a file that is never edited.

A new version of a type gets a new file, and so does a version that gets another optional field. `python -m
tests.models.test_golden_events` writes missing files. A file contains the transfers of the version when it
was current, so a test fails if an upcaster moves other money.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grabstream.models.events import CURRENT_VERSIONS, decode_event, encode_event
from grabstream.models.transfers import transfers_of
from grabstream.models.upcasting import FIRST_VERSION

FOLDER = Path(__file__).parents[1] / "golden" / "events"
SUMS = FOLDER / "SHA256SUMS"
VERSIONS = [
    (type_, version)
    for type_, current in CURRENT_VERSIONS.items()
    for version in range(FIRST_VERSION, current + 1)
]

HEAD: dict[str, Any] = {
    "shard": 3,
    "seq": 41,
    "offer_seq": 7,
    "offer": "sale:a",
    "at": 1800000000123,
    "command": "c-1",
}
GRAB: dict[str, Any] = {
    "grab": "g-1",
    "user": "ann",
    "quantity": 2,
    "amount": 2,
    "asset": "sku:sale:a",
    "place": 5,
    "left": 9,
}
METADATA = {"app:id": 'a "b" \\ 你好', "form_id": "f-1"}
ASKED: dict[str, Any] = {"asked": 3, "attributes": {"card": "k:1"}, "ticket": "t-1", "basket": "b-1"}
#: An example of each type, with all the fields that it had when its file was written.
EXAMPLES: dict[str, dict[str, Any]] = {
    "offer.opened": {
        "kind": "envelope", "issuer": "shop", "funding": "pay-1", "asset": "CNY", "total": 1000,
        "opens_at": 1800000000123,
        "closes_at": 1800086400123, "terms": {"kind": "envelope", "parts": 10, "title": 'a "b" \\ 你好'},
        "offsets": [[1799971200000, 28800000]], "seed_sha256": "ab" * 32, "sealed_seed": "k1:c2VhbGVk",
        "digest": "AbCd+/01",
    },
    "offer.loaded": {
        "what": "codes", "chunk": 1, "chunks": 2, "count": 2, "items": ["k1:YQ==", "k1:Yg=="],
        "operator": "olga", "digest": "AbCd+/01",
    },
    "offer.amended": {
        "changes": {"total": 12, "title": "more"}, "asset": "sku:sale:a", "source": "issuer:shop", "added": 2,
        "left": 11,
        "operator": "olga", "digest": "AbCd+/01",
    },
    "offer.paused": {"operator": "olga", "digest": "AbCd+/01"},
    "offer.resumed": {"operator": "olga", "digest": "AbCd+/01"},
    "offer.closed": {
        "reason": "command", "asset": "CNY", "amount": 400, "left": 4, "refund_to": "wallet:shop",
        "seed": "5eed" * 16, "operator": "olga",
        "digest": "AbCd+/01",
    },
    "offer.retired": {},
    "grab.granted": {**GRAB, **ASKED, "codes": ["k1:YQ=="], "digest": "AbCd+/01"},
    "grab.held": {
        **GRAB, "asked": 3, "deadline_at": 1800000900123, "due": 500, "currency": "CNY", "waited": True,
        "attributes": {"card": "k:1"},
        "ticket": "t-1", "basket": "b-1", "digest": "AbCd+/01",
    },
    "grab.queued": {**GRAB, "amount": 0, "attributes": {"card": "k:1"}, "ticket": "t-1",
    "digest": "AbCd+/01"},
    "grab.extended": {**GRAB, "deadline_at": 1800001800123, "digest": "AbCd+/01"},
    "grab.confirmed": {
        **GRAB, "held": 1, "payment": "pay-2", "paid": 500, "currency": "CNY", "issuer": "shop",
        "retaken": True, "codes": ["k1:YQ=="],
        "digest": "AbCd+/01",
    },
    "grab.released": {**GRAB, "reason": "expired", "to": "offer:sale:a", "digest": "AbCd+/01"},
    "grab.returned": {
        **GRAB, "reason": 'too "small"', "to": "issuer:shop", "refunds": [["pay-2", 250], ["pay-3", 250]],
        "currency": "CNY",
        "issuer": "shop", "restored": True, "digest": "AbCd+/01",
    },
    "grab.redeemed": {**GRAB, "order": "o-1", "digest": "AbCd+/01"},
    "grab.unredeemed": {**GRAB, "order": "o-1", "digest": "AbCd+/01"},
    "payment.refund_due": {"grab": "g-1", "payment": "pay-4", "amount": 500, "asset": "CNY",
    "outcome": "expired", "digest": "AbCd+/01"},
    "ledger.adjusted": {
        "transfers": [{"asset": "CNY", "debit": "issuer:shop", "credit": "wallet:ann", "amount": 5}],
        "reason": "a mistake",
        "approved_by": "boss", "operator": "olga", "digest": "AbCd+/01",
    },
}  # fmt: skip
#: Examples with optional fields that a version got later, by the name of their file. They stay when the type
#: gets another version.
LATER: dict[str, dict[str, Any]] = {
    "payment.refund_due.v1.user": {
        "type": "payment.refund_due", "v": 1, **HEAD, "grab": "g-1", "user": "ann", "payment": "pay-4",
        "amount": 500, "asset": "CNY", "outcome": "expired", "digest": "AbCd+/01",
    },
    "grab.granted.v1.metadata": {
        "type": "grab.granted", "v": 1, **HEAD, **GRAB, "attributes": {"card": "k:1"}, "metadata": METADATA,
        "ticket": "t-1", "digest": "AbCd+/01",
    },
    "grab.held.v1.metadata": {
        "type": "grab.held", "v": 1, **HEAD, **GRAB, "deadline_at": 1800000900123, "waited": True,
        "metadata": METADATA,
    },
    "grab.queued.v1.metadata": {
        "type": "grab.queued", "v": 1, **HEAD, **GRAB, "amount": 0, "metadata": METADATA,
        "digest": "AbCd+/01",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("type_", "version", "name"),
    [
        *((type_, version, f"{type_}.v{version}") for type_, version in VERSIONS),
        *((example["type"], example["v"], name) for name, example in LATER.items()),
    ],
)
def test_old_event_moves_the_same_money(type_: str, version: int, name: str) -> None:
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    assert json.loads(golden["line"])["v"] == version
    event = decode_event(golden["line"].encode())
    assert event.v == CURRENT_VERSIONS[type_]
    assert [list(transfer) for transfer in transfers_of(event)] == golden["transfers"]


@pytest.mark.parametrize(
    "name",
    [
        *(f"{type_}.v{version}" for type_, version in CURRENT_VERSIONS.items()),
        *(name for name, example in LATER.items() if example["v"] == CURRENT_VERSIONS[example["type"]]),
    ],
)
def test_current_event_decodes_and_encodes_to_the_same_bytes(name: str) -> None:
    """The decoded event has all fields of the line, and encodes to the same bytes."""
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    event = decode_event(golden["line"].encode())
    assert encode_event(event).decode() == golden["line"]
    fields = json.loads(golden["line"])
    assert {
        name: json.loads(msgspec.json.encode(getattr(event, name))) for name in fields if name != "type"
    } == {name: value for name, value in fields.items() if name != "type"}


def test_golden_files_are_unchanged() -> None:
    sums = dict(line.split("  ")[::-1] for line in SUMS.read_text().splitlines())
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.glob("*.json")}
    assert files == sums
    assert {f"{type_}.v{version}.json" for type_, version in VERSIONS} | {
        f"{name}.json" for name in LATER
    } == files.keys()


def _write_missing() -> None:
    FOLDER.mkdir(exist_ok=True)
    examples = {
        f"{type_}.v{version}": {"type": type_, "v": version, **HEAD, **EXAMPLES[type_]}
        for type_, version in CURRENT_VERSIONS.items()
    }
    for name, example in (examples | LATER).items():
        path = FOLDER / f"{name}.json"
        if not path.exists():
            line = json.dumps(example, separators=(",", ":"), ensure_ascii=False)
            transfers = transfers_of(decode_event(line.encode()))
            path.write_text(
                json.dumps({"line": line, "transfers": transfers}, ensure_ascii=False, indent=1) + "\n"
            )
    sums = sorted(
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in FOLDER.glob("*.json")
    )
    SUMS.write_text("".join(f"{digest}  {name}\n" for name, digest in sums))


if __name__ == "__main__":
    _write_missing()
