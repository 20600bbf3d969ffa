"""Records in Redis that no script has written are reported as damaged; they never raise anything else."""

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grabstream.lua import packed_values
from grabstream.lua.packed_values import Damaged
from grabstream.models.outcomes import Outcome

packed = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
).map(msgspec.msgpack.encode)
any_record = (
    st.binary(max_size=80) | packed | st.builds(bytes.__add__, st.binary(min_size=23, max_size=23), packed)
)


@given(any_record)
@example(b"\xb6\x00\x00\x00\x00\x00\x9d\x00\x00\x00\x00\x01\x07\x00\x00\x00\x00\x00(\x00\x00\x00\x00")
@example(b"\x91" * 5_000)
@example(b"")
@example(msgspec.msgpack.encode([None] * len(packed_values.GRAB_FIELDS)))
@example(msgspec.msgpack.encode([[]] * len(packed_values.GRAB_FIELDS)))
@example(msgspec.msgpack.encode(["offer", "grab", Outcome.confirmed, "seq", None, 1, 0, ""]))
def test_any_bytes_are_read_or_damaged(record: bytes) -> None:
    packed_values.unpacked(record)
    packed_values.in_fields(record, record)
    readers: list[Callable[[bytes], object]] = [
        packed_values.read_grab,
        packed_values.read_part,
        packed_values.read_order,
        packed_values.offer_of_payment,
        lambda record: packed_values.offer_of_answer(record, "campaign"),
        lambda record: packed_values.event_of_grab(record, Outcome.released),
        lambda record: packed_values.event_of_grab(record, Outcome.confirmed),
        lambda record: packed_values.event_of_payment(record, "offer", "grab", Outcome.confirmed),
    ]
    for read in readers:
        with suppress(Damaged):
            read(record)


@given(any_record, any_record)
def test_only_equal_records_compare_equal(one: bytes, other: bytes) -> None:
    """Records of other bytes may compare equal if both are packed: the order of fields is free in Lua."""
    if one != other and packed_values.unpacked(one) == packed_values.unpacked(other):
        assert not isinstance(packed_values.unpacked(one), bytes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("status", value) for value in (-1, 4, None, "held", [], 1.0, 1.5, True)),
        *((name, value) for name in ("held", "taken", "place") for value in ("x", None, {}, b"", 1.0)),
    ],
)
def test_a_grab_of_other_values_is_damaged(name: str, value: object) -> None:
    fields: list[object] = [0] * len(packed_values.GRAB_FIELDS)
    fields[packed_values.GRAB_FIELDS.index(name)] = value
    with pytest.raises(Damaged, match=name):
        packed_values.read_grab(msgspec.msgpack.encode(fields))
