"""Records that the scripts keep in Redis, read by Python: the other side of includes/records.lua."""

from typing import Any, Final

import msgspec

#: Where the times in records begin: 2020-01-01 UTC.
EPOCH_MS: Final = 1_577_836_800_000
#: Place 3, amount 6, seq 5 bytes.
_PART_BYTES: Final = (3, 6, 5)
GRAB_FIELDS: Final = (
    "user", "place", "quantity", "held", "taken", "redeemed", "lapsed", "deadline", "grace", "extensions",
    "price", "status", "ended_seq",
    "ended_at", "confirmed_seq", "confirmed_at", "under", "counted", "payments", "codes",
)  # fmt: skip
GRAB_STATES: Final = ("active", "released", "expired", "waiting")

#: An answer's fixed part, whose last byte is the length of the digest after it; then a name, or a row that is
#: kept whole (MessagePack).
ANSWER_BYTES: Final = 23

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


def unpacked(record: bytes) -> Any:
    """A record in a form in which two that say the same are equal: Lua packs the fields of a table in any
    order.
    """
    whole = _packed(record)
    if whole is not None:
        return whole
    if len(record) < ANSWER_BYTES:
        return record
    end = ANSWER_BYTES + record[ANSWER_BYTES - 1]
    tail = _packed(record[end:])
    return record if tail is None else (record[:end], tail)


def _packed(record: bytes) -> Any:
    """What stands there in MessagePack, when it is a list or a map."""
    if not record or record[0] < 128:
        return None
    try:
        found = _unpack(record)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, list | dict) else None


def offer_of_answer(record: bytes, campaign: str) -> str:
    """The offer that an answer of a campaign is about."""
    known = unpacked(record)
    return (
        str(known[1][0])
        if isinstance(known, tuple)
        else record[ANSWER_BYTES + record[ANSWER_BYTES - 1] :].decode() or campaign
    )


def offer_of_payment(record: bytes) -> str:
    """The offer that a payment was for."""
    return str(_unpack(record)[0])


def in_fields(one: bytes, other: bytes) -> list[tuple[str, Any, Any]]:
    """Where two records of a grab differ, by their fields; nothing when they are not such records."""
    a, b = unpacked(one), unpacked(other)
    if not (isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == len(GRAB_FIELDS)):
        return []
    return [(name, left, right) for name, left, right in zip(GRAB_FIELDS, a, b, strict=True) if left != right]
