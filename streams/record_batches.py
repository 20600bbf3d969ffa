"""Reading batches of Kafka records that another client may have made: no byte of them stops a reader.

A broker stores what a client sends, and checks little of it: names of headers need not be UTF-8, a record may
claim any offset, and its attributes may be anything. aiokafka raises at some of this, in every reader of the
topic for ever, and believes the rest: a reader that took such an offset for its position would skip all that
follows. So every consumer of this process reads batches by `Records`, which this module puts in the place of
aiokafka's own class:

- A header's name that is not UTF-8 is escaped (`\\xff`), so it is none of the names that mean something.
- Offsets are those that the broker gave the batch, one after another, if the records claim others.
- A batch that cannot be read is one record with the bytes of the batch, without key and headers: it is not a
  command, and no relay has signed it. Where it stands in the batch, nothing else is read.

A wrong checksum is still an error: brokers refuse such batches, so a disk or the network has changed it.
"""

import logging
from collections.abc import Iterator
from itertools import pairwise
from struct import Struct
from typing import Any, Final, NamedTuple

from aiokafka.consumer import fetcher
from aiokafka.record.memory_records import MemoryRecords

log = logging.getLogger(__name__)

#: The head of a batch: base offset, length, leader epoch, version, checksum, attributes, last offset delta,
#: first and newest time, producer id and epoch, base sequence, number of records.
_HEAD: Final = Struct(">qiibIhiqqqhii")
_LENGTH: Final = Struct(">i")
_LENGTH_AT: Final = 8
_VERSION_AT: Final = 16
_LOG_OVERHEAD: Final = 12
_CODEC_MASK: Final = 0x07
_TIME_OF_BROKER: Final = 0x08
_VARINT_BITS_MAX: Final = 63


class Unreadable(ValueError):
    """The bytes of a batch are not records."""


class Record(NamedTuple):
    """A record, with aiokafka's names."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


class Records:
    """The batches in a part of a partition, as a fetch returns them."""

    def __init__(self, data: bytes) -> None:
        self._data, self._batches, self._at = data, MemoryRecords(data), 0

    def size_in_bytes(self) -> int:
        """The size of the part."""
        return len(self._data)

    def has_next(self) -> bool:
        """Whether there is another whole batch."""
        return bool(self._batches.has_next())

    def next_batch(self) -> Any:
        """The next batch. Batches of versions before 2, which brokers convert before they store them, are as
        aiokafka reads them.
        """
        start = self._at
        batch = self._batches.next_batch()
        if batch is None:
            return None
        (length,) = _LENGTH.unpack_from(self._data, start + _LENGTH_AT)
        self._at = start + _LOG_OVERHEAD + length
        if self._data[start + _VERSION_AT] < 2:
            return batch
        return Batch(batch, memoryview(self._data)[start : self._at])


class Batch:
    """A batch of aiokafka whose records can be read, whatever they are."""

    def __init__(self, batch: Any, data: memoryview) -> None:
        self._batch, self._data = batch, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        # Only asked of control batches, which brokers alone write.
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        batch = self._batch
        try:
            records: list[Any] = list(batch)
        except MemoryError:
            raise
        except Exception as error:  # whatever the library, or a codec, raises at some bytes
            records = self._read_again(error)
        first, after = batch.base_offset, batch.next_offset
        offsets = [record.offset for record in records]
        if offsets == list(range(first, after)) or _is_thinned(offsets, first, after):
            return iter(records)
        log.info("a batch at offset %d claims other offsets than the broker gave it", first)
        return iter([_at(record, first + index) for index, record in enumerate(records)])

    def _read_again(self, error: Exception) -> list[Any]:
        first = self._batch.base_offset
        try:
            records = read_records(bytes(self._data))
        except Unreadable as reason:
            log.info("a batch at offset %d cannot be read: %s; %r", first, reason, error)
            return [Record(first, self._batch.max_timestamp, 0, None, bytes(self._data), [])]
        log.info("a batch at offset %d has headers, or attributes, that Kafka's rules exclude", first)
        return records


def _is_thinned(offsets: list[int], first: int, after: int) -> bool:
    """Whether these are offsets of a batch, in order, without those of records that a broker removed."""
    return (
        len(offsets) < after - first
        and all(one < other for one, other in pairwise(offsets))
        and (not offsets or (first <= offsets[0] and offsets[-1] < after))
    )


def _at(record: Any, offset: int) -> Record:
    return Record(
        offset, record.timestamp, record.timestamp_type, record.key, record.value, list(record.headers)
    )


def read_records(batch: bytes) -> list[Record]:
    """The records of a batch of version 2 that is not compressed; raises Unreadable."""
    if len(batch) < _HEAD.size:
        raise Unreadable(f"it has {len(batch)} bytes, fewer than the head of a batch")
    first, _, _, version, _, attributes, _, begun_at, newest_at, _, _, _, count = _HEAD.unpack_from(batch)
    if version != 2 or attributes & _CODEC_MASK:
        raise Unreadable(f"version {version}, compression {attributes & _CODEC_MASK}")
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
                raise Unreadable("a header has no name")
            headers.append((name.decode(errors="backslashreplace"), bytes_of.sized()))
        if bytes_of.at != end:
            raise Unreadable(f"a record of {size} bytes ends {bytes_of.at - end} bytes after its end")
        at_ms = newest_at if by_broker else begun_at + after_ms
        records.append(Record(first + delta, at_ms, int(by_broker), key, value, headers))
    if bytes_of.at != len(batch):
        raise Unreadable(f"{len(batch) - bytes_of.at} bytes are left after the last record")
    return records


class _Bytes:
    """Reads bytes from a position on; raises Unreadable at their end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self._data):
            raise Unreadable(f"{size} bytes are to be read at byte {self.at} of {len(self._data)}")
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
        raise Unreadable(f"a number at byte {self.at} does not end")


def install() -> None:
    """Makes all consumers of this process read by `Records`. `brokers` calls it, which every consumer needs
    for its options.
    """
    if not hasattr(fetcher, "MemoryRecords"):
        raise ImportError("aiokafka.consumer.fetcher has no MemoryRecords: this needs another version")
    fetcher.MemoryRecords = Records
