"""Records that the scripts keep in Redis, read by Python: the other side of includes/records.lua."""

from typing import Any, Final

import msgspec

#: Where the times in records begin: 2020-01-01 UTC.
EPOCH_MS: Final = 1_577_836_800_000
#: Place 3, amount 6, seq 5 bytes.
_PART_BYTES: Final = (3, 6, 5)
GRAB_FIELDS: Final = (
    "user", "place", "quantity", "held", "taken", "redeemed", "lapsed", "deadline", "grace", "extensions", "price", "status", "ended_seq",
    "ended_at", "confirmed_seq", "confirmed_at", "under", "counted", "payments", "orders", "codes",
)  # fmt: skip
GRAB_STATES: Final = ("active", "released", "expired", "waiting")

_unpack = msgspec.msgpack.Decoder().decode


def read_answer(record: bytes) -> tuple[int, int]:
    """Seq and time (ms since 1970 UTC) of the event that an answer is about."""
    return int.from_bytes(record[1:7], "big"), int.from_bytes(record[7:12], "big") + EPOCH_MS


def read_part(record: bytes) -> dict[str, int]:
    """A user's part of an envelope: `place`, `amount`, `seq`."""
    values, at = [], 0
    for width in _PART_BYTES:
        values.append(int.from_bytes(record[at : at + width], "big"))
        at += width
    return dict(zip(("place", "amount", "seq"), values, strict=True))


def read_grab(record: bytes) -> dict[str, Any]:
    """A grab of pieces; `status` in words. Codes are sealed there, and left out here."""
    grab = dict(zip(GRAB_FIELDS, _unpack(record), strict=True))
    del grab["codes"]
    return grab | {"status": GRAB_STATES[grab["status"]]}
