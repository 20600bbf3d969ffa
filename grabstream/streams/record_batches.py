"""The records of a batch of Kafka, for batches at which aiokafka raises (`kafka_internals.Records`)."""

from struct import Struct
from typing import Final, NamedTuple

#: The head of a batch: base offset, length, leader epoch, version, checksum, attributes, last offset delta,
#: first and newest time, producer id and epoch, base sequence, number of records.
_HEAD: Final = Struct(">qiibIhiqqqhii")
_CODEC_MASK: Final = 0x07
_TIME_OF_BROKER: Final = 0x08
_VARINT_BITS_MAX: Final = 63


class UnreadableBatch(ValueError):
    """The bytes of a batch are not records."""


class BatchRecord(NamedTuple):
    """A record, with aiokafka's names."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


def read_records(batch: bytes) -> list[BatchRecord]:
    """The records of a batch of version 2 that is not compressed; raises Unreadable."""
    if len(batch) < _HEAD.size:
        raise UnreadableBatch(f"it has {len(batch)} bytes, fewer than the head of a batch")
    first, _, _, version, _, attributes, _, begun_at, newest_at, _, _, _, count = _HEAD.unpack_from(batch)
    if version != 2 or attributes & _CODEC_MASK:
        raise UnreadableBatch(f"version {version}, compression {attributes & _CODEC_MASK}")
    by_broker = bool(attributes & _TIME_OF_BROKER)
    bytes_of = _Bytes(batch, _HEAD.size)
    records = []
    for _ in range(count):
        size = bytes_of.varint()
        end = bytes_of.at + size
        bytes_of.take(1)  # attributes, of which none is in use
        after_ms, delta = bytes_of.varint(), bytes_of.varint()
        key, value = bytes_of.sized(), bytes_of.sized()
        headers = []
        for _ in range(bytes_of.varint()):
            name = bytes_of.sized()
            if name is None:
                raise UnreadableBatch("a header has no name")
            headers.append((name.decode(errors="backslashreplace"), bytes_of.sized()))
        if bytes_of.at != end:
            raise UnreadableBatch(f"a record of {size} bytes ends {bytes_of.at - end} bytes after its end")
        at_ms = newest_at if by_broker else begun_at + after_ms
        records.append(BatchRecord(first + delta, at_ms, int(by_broker), key, value, headers))
    if bytes_of.at != len(batch):
        raise UnreadableBatch(f"{len(batch) - bytes_of.at} bytes are left after the last record")
    return records


class _Bytes:
    """Reads bytes from a position; raises Unreadable at their end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self._data):
            raise UnreadableBatch(f"{size} bytes are to be read at byte {self.at} of {len(self._data)}")
        self.at += size
        return self._data[self.at - size : self.at]

    def sized(self) -> bytes | None:
        size = self.varint()
        return None if size < 0 else self.take(size)

    def varint(self) -> int:
        number = shift = 0
        while shift <= _VARINT_BITS_MAX:
            [byte] = self.take(1)
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7
        raise UnreadableBatch(f"a number at byte {self.at} does not end")
