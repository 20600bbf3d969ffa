"""Records in Redis that no script has written are reported as damaged; they never raise anything else."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grabstream.lua import records
from grabstream.lua.records import Damaged

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
@example(msgspec.msgpack.encode([None] * len(records.GRAB_FIELDS)))
@example(msgspec.msgpack.encode([[]] * len(records.GRAB_FIELDS)))
def test_any_bytes_are_read_or_damaged(record: bytes) -> None:
    records.unpacked(record)
    records.in_fields(record, record)
    for read in (records.read_grab, records.read_part, records.offer_of_payment):
        with suppress(Damaged):
            read(record)
    with suppress(Damaged):
        records.offer_of_answer(record, "campaign")


@given(any_record, any_record)
def test_only_equal_records_compare_equal(one: bytes, other: bytes) -> None:
    """Records of other bytes may compare equal if both are packed: the order of fields is free in Lua."""
    if one != other and records.unpacked(one) == records.unpacked(other):
        assert not isinstance(records.unpacked(one), bytes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("status", value) for value in (-1, 4, None, "held", [], 1.0, 1.5, True)),
        *((name, value) for name in ("held", "taken", "place") for value in ("x", None, {}, b"", 1.0)),
    ],
)
def test_a_grab_of_other_values_is_damaged(name: str, value: object) -> None:
    fields: list[object] = [0] * len(records.GRAB_FIELDS)
    fields[records.GRAB_FIELDS.index(name)] = value
    with pytest.raises(Damaged, match=name):
        records.read_grab(msgspec.msgpack.encode(fields))
