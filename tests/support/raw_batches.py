"""Batches of Kafka records byte for byte, as a client may send them that is not a library."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c, encode_varint

from grabstream.streams import brokers

_HEAD = struct.Struct(">qiibI")
_BODY = struct.Struct(">hiqqqhii")


class RawRecord(NamedTuple):
    """A record; header names are bytes. `offset_delta` is by default its index in the batch."""

    value: bytes | None
    headers: Sequence[tuple[bytes, bytes | None]] = ()
    key: bytes | None = None
    attributes: int = 0
    offset_delta: int | None = None
    timestamp_delta: int = 0


def varint(value: int) -> bytes:
    """A zigzag varint."""
    written = bytearray()
    encode_varint(value, written.append)
    return bytes(written)


def raw_batch(
    records: Sequence[RawRecord],
    timestamp_ms: int,
    base_offset: int = 0,
    attributes: int = 0,
    last_delta: int | None = None,
    data: bytes = b"",
) -> bytes:
    """A batch of version 2 with a right checksum; with `data`, these bytes are in place of its records."""
    data = data or b"".join(_record(record, index) for index, record in enumerate(records))
    last = len(records) - 1 if last_delta is None else last_delta
    body = _BODY.pack(attributes, last, timestamp_ms, timestamp_ms, -1, -1, -1, len(records)) + data
    return _HEAD.pack(base_offset, len(body) + 9, -1, 2, calc_crc32c(body)) + body


def _record(record: RawRecord, index: int) -> bytes:
    delta = index if record.offset_delta is None else record.offset_delta
    parts = [
        bytes([record.attributes]),
        varint(record.timestamp_delta),
        varint(delta),
        _sized(record.key),
        _sized(record.value),
        varint(len(record.headers)),
        *(_sized(name) + _sized(value) for name, value in record.headers),
    ]
    data = b"".join(parts)
    return varint(len(data)) + data


def _sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


async def produce_batch(kafka: str, topic: str, partition: int, batch: bytes) -> int:
    """Sends a batch as it is, and returns the offset of its first record; raises the broker's refusal."""
    client = AIOKafkaClient(**brokers.at(kafka))
    await client.bootstrap()
    try:
        await client.add_topic(topic)
        await client.force_metadata_update()
        leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
        request = ProduceRequest(
            transactional_id=None, required_acks=-1, timeout=10_000, topics=[(topic, [(partition, batch)])]
        )
        response = await client.send(leader, request)
    finally:
        await client.close()
    [(_, [(_, code, offset, *_)])] = response.topics
    if code:
        raise for_code(code)(f"the broker refuses the batch: {code}")
    return int(offset)
