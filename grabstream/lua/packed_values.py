"""Reads the records that the scripts store in Redis; includes/packed_values.lua writes them."""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec

from grabstream.models.identifiers import NO_OFFER, encoded_payment, is_id
from grabstream.models.outcomes import Outcome

#: Times in records count from 2020-01-01 UTC.
EPOCH_MS: Final = 1_577_836_800_000
#: Bytes of the place, the amount and the seq of a part, and of the time that follows. Then come the length of
#: the grab's id, the id and its digest.
_PART_BYTES: Final = (3, 6, 5)
_AT_BYTES: Final = 5
#: Bytes of the units, the seq and the time of an order.
_ORDER_BYTES: Final = (6, 5, 5)
#: Offer, grab, code, seq, time, quantity, paid and currency of a payment; a basket may follow.
PAYMENT_FIELDS_MIN: Final = 8
GRAB_FIELDS: Final = (
    "user", "place", "quantity", "held", "taken", "redeemed", "lapsed", "deadline", "grace", "extensions",
    "price", "status", "ended_seq",
    "ended_at", "confirmed_seq", "confirmed_at", "under", "counted", "payments", "codes",
)  # fmt: skip
#: Fields that few grabs have: the fields for its events (or false), only while it waits; its basket.
RARE_FIELDS: Final = ("carried", "basket")
_NUMBERS: Final = ("place", "quantity", "held", "taken", "redeemed", "lapsed", "status")
GRAB_STATES: Final = ("active", "released", "expired", "waiting")

#: The fixed part of an answer. Its last byte is the length of the digest that follows; then comes a name, or
#: a whole row (MessagePack).
ANSWER_BYTES: Final = 23

#: A field of the counts of refusals: second, code and offer. And a count that fits into SQL.
_counted = re.compile(rb"([0-9]{1,12}):([0-9]{1,3}):([!-~]+)").fullmatch
_is_count = re.compile(rb"[0-9]{1,18}").fullmatch

_decode = msgspec.msgpack.Decoder().decode
_event_at = re.compile(rb'"at":(\d+)').search


class Damaged(ValueError):
    """A record is not in the form that the scripts write."""


def _unpack(record: bytes) -> Any:
    try:
        return _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"not MessagePack: {error}") from error


def read_answer(record: bytes) -> tuple[int, int]:
    """Returns seq and time (ms since 1970 UTC) of the event that an answer is about."""
    return int.from_bytes(record[1:7], "big"), int.from_bytes(record[7:12], "big") + EPOCH_MS


def read_part(record: bytes) -> dict[str, int]:
    """Returns a user's part of an envelope: `place`, `amount`, `seq`. Raises Damaged."""
    if len(record) < sum(_PART_BYTES):
        raise Damaged(f"a part of {len(record)} bytes instead of {sum(_PART_BYTES)}")
    values, at = [], 0
    for width in _PART_BYTES:
        values.append(int.from_bytes(record[at : at + width], "big"))
        at += width
    return dict(zip(("place", "amount", "seq"), values, strict=True))


def read_grab_of_part(record: bytes) -> tuple[str, int, int] | None:
    """Returns id, seq and time (ms since 1970 UTC) of the grab that got a part of an envelope; None if the
    record is too short to have them.
    """
    at, id_at = sum(_PART_BYTES), sum(_PART_BYTES) + _AT_BYTES + 1
    if len(record) < id_at:
        return None
    grab = record[id_at : id_at + record[id_at - 1]].decode(errors="replace")
    seq = int.from_bytes(record[at - _PART_BYTES[-1] : at], "big")
    return grab, seq, int.from_bytes(record[at : at + _AT_BYTES], "big") + EPOCH_MS


def read_grab(record: bytes) -> dict[str, Any]:
    """Returns the fields of a grab of pieces, `status` in words, without the codes, which are sealed.

    Raises Damaged.
    """
    fields = _unpack(record)
    if not _are_fields_of_grab(fields):
        raise Damaged(f"not a list of the {len(GRAB_FIELDS)} fields of a grab")
    grab = dict(zip((*GRAB_FIELDS, *RARE_FIELDS), fields, strict=False))
    del grab["codes"]
    for name in _NUMBERS:
        if type(grab[name]) is not int:
            raise Damaged(f"{name} is not a number")
    if grab["status"] not in range(len(GRAB_STATES)):
        raise Damaged(f"status {grab['status']!r}")
    return grab | {"status": GRAB_STATES[grab["status"]]}


def event_of_grab(record: bytes, code: int) -> tuple[int, int] | None:
    """Returns seq and time (ms since 1970 UTC) of the last event that released, or that confirmed, a grab of
    pieces, by the code of that outcome; None if there was none. Raises Damaged.
    """
    grab = read_grab(record)
    if code == Outcome.released and grab["status"] == "released":
        return _event(grab["ended_seq"], grab["ended_at"])
    if code == Outcome.confirmed and grab["confirmed_seq"] != 0:
        return _event(grab["confirmed_seq"], grab["confirmed_at"])
    return None


def _event(seq: Any, at: Any) -> tuple[int, int]:
    if type(seq) is not int or type(at) is not int:
        raise Damaged("the seq or the time of an event is not a number")
    return seq, at


def read_order(record: bytes) -> tuple[int, int]:
    """Returns seq and time (ms since 1970 UTC) of the last event of an order. Raises Damaged."""
    if len(record) != sum(_ORDER_BYTES):
        raise Damaged(f"an order of {len(record)} bytes instead of {sum(_ORDER_BYTES)}")
    units, seq, _ = _ORDER_BYTES
    return (
        int.from_bytes(record[units : units + seq], "big"),
        int.from_bytes(record[units + seq :], "big") + EPOCH_MS,
    )


def payment_fields(payment: str, offer: str, grab: str, currency: str | None) -> list[str]:
    """Returns the fields in which a payment for a grab may be recorded: its own, that of the grab in a
    basket, and that of money beyond what is recorded (`payment_field` in includes/packed_values.lua).
    """
    field = encoded_payment(payment)
    of_grab = f"{field}\n{offer}/{grab}"
    return [field, of_grab, *([f"{of_grab}\n{currency}"] if currency else [])]


def event_of_payment(record: bytes, offer: str, grab: str, code: int) -> tuple[int, int] | None:
    """Returns seq and time (ms since 1970 UTC) of the event of a recorded payment, if it was for the grab and
    had this outcome; else None. Raises Damaged.
    """
    fields = _fields_of_payment(record)
    return _event(*fields[3:5]) if fields[:3] == [offer, grab, code] else None


def _are_fields_of_grab(value: Any) -> bool:
    return isinstance(value, list) and 0 <= len(value) - len(GRAB_FIELDS) <= len(RARE_FIELDS)


def unpacked(record: bytes) -> Any:
    """Returns a record in a form that compares equal for equal records: Lua packs the fields of a table in
    any order.
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
    """Decodes a list or a map of MessagePack; returns None for anything else."""
    if not record or record[0] < 128:
        return None
    try:
        value = _unpack(record)
    except Damaged:
        return None
    return value if isinstance(value, list | dict) else None


def offer_of_answer(record: bytes, campaign: str) -> str:
    """Returns the offer that an answer of a campaign is about. Raises Damaged."""
    known = unpacked(record)
    if isinstance(known, tuple) and isinstance(known[1], list) and known[1]:
        return str(known[1][0])
    if len(record) < ANSWER_BYTES:
        raise Damaged(f"an answer of {len(record)} bytes, fewer than {ANSWER_BYTES}")
    try:
        return record[ANSWER_BYTES + record[ANSWER_BYTES - 1] :].decode("ascii") or campaign
    except UnicodeDecodeError as error:
        raise Damaged(f"the name of an offer: {error}") from error


def offer_of_payment(record: bytes) -> str:
    """Returns the offer that a payment was for. Raises Damaged."""
    return str(_fields_of_payment(record)[0])


def _fields_of_payment(record: bytes) -> list[Any]:
    fields = _unpack(record)
    if not isinstance(fields, list) or len(fields) < PAYMENT_FIELDS_MIN:
        raise Damaged("not a list of the fields of a payment")
    return fields


def demand_row(field: bytes, count: bytes) -> tuple[int, int, str, int] | None:
    """A field of the hash of demand: the second, the code of the outcome, the offer, the count. None if it is
    damaged.
    """
    counted = _counted(field)
    if counted is None or not _is_count(count):
        return None
    second, code, offer = (group.decode() for group in counted.groups())
    return (int(second), int(code), offer, int(count)) if offer == NO_OFFER or is_id(offer) else None


def in_fields(record: bytes, other: bytes) -> list[tuple[str, Any, Any]]:
    """Returns the fields in which two records of a grab differ, with both values; [] if they are not such
    records.
    """
    a, b = unpacked(record), unpacked(other)
    if not (_are_fields_of_grab(a) and _are_fields_of_grab(b)):
        return []
    pairs = zip_longest((*GRAB_FIELDS, *RARE_FIELDS), a, b)
    return [(name, left, right) for name, left, right in pairs if left != right]


def first_event_at(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> int | None:
    """Returns the time of the first event of entries of an outbox, ms since 1970 UTC, without decoding it;
    None without one.
    """
    at = _event_at(next(iter(entries[0][1].values()))) if entries else None
    return int(at.group(1)) if at else None
