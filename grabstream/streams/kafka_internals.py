"""All uses of what aiokafka does not document: its consumers' batches, its login with tokens, requests of its
admin client, and the protocol of Kafka. No other file has any, and pyproject.toml pins the version with which
this one was tested.

**Batches that another client may have made: no byte of them stops a reader.** A broker stores what a client
sends almost unchecked: names of headers need not be UTF-8, a record may claim any offset, and its attributes
may be anything. aiokafka raises at some of this, in every reader of the topic permanently, and trusts the
rest: a reader that took such an offset for its position would skip all that follows. So every consumer of
this process reads batches by `Records`, which `install` substitutes for aiokafka's class:

- A header's name that is not UTF-8 is escaped (`\\xff`), so it matches no known name.
- Offsets are those that the broker gave the batch, one after another, if the records claim others.
- A batch that cannot be read is one record with the bytes of the batch, without key and headers: it is not a
  command, and no relay has signed it. Nothing else is read of the batch.

A wrong checksum is still an error: brokers refuse such batches, so a disk or the network has changed it.

**Login with a token (SASL OAUTHBEARER): a broker that refuses it says so to this client.** A broker answers a
refused token with its reason (RFC 7628, 3.2.2), without an error: that follows when the client has
acknowledged the reason. aiokafka takes the reason for a success. Its next request then finds a closed
connection, so the client would retry without end and not report why. So every client of this process logs in
by `TokenAuthenticator`.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from struct import Struct
from typing import Any, Final

import msgspec
from aiokafka import conn
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaConnectionError, UnsupportedSaslMechanismError
from aiokafka.protocol.admin import CreateAclsRequest, SaslHandShakeRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields
from aiokafka.record.memory_records import MemoryRecords

from grabstream.streams.record_batches import BatchRecord, UnreadableBatch, read_records

log = logging.getLogger(__name__)

_LENGTH: Final = Struct(">i")
_LENGTH_AT: Final = 8
_VERSION_AT: Final = 16
_LOG_OVERHEAD: Final = 12
#: The message of a client after the reason (RFC 7628, 3.2.3).
ACKNOWLEDGED: Final = b"\x01"
#: How often brokers that name no controller are polled.
CONTROLLER_POLL_SECONDS: Final = 0.2


class ConsumedRecord(msgspec.Struct, gc=False):
    """A record as consumers return it, with aiokafka's names, in the order in which aiokafka gives them. Its
    own class takes three times as long to make one.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    checksum: int | None
    serialized_key_size: int
    serialized_value_size: int
    headers: tuple[tuple[str, bytes], ...]


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
        return RecordBatch(batch, memoryview(self._data)[start : self._at])


class RecordBatch:
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
        except UnreadableBatch as reason:
            log.info("a batch at offset %d cannot be read: %s; %r", first, reason, error)
            return [BatchRecord(first, self._batch.max_timestamp, 0, None, bytes(self._data), [])]
        log.info("a batch at offset %d has headers, or attributes, that Kafka's rules exclude", first)
        return records


def _is_thinned(offsets: list[int], first: int, after: int) -> bool:
    """Whether these are offsets of a batch, in order, without those of records that a broker removed."""
    return (
        len(offsets) < after - first
        and all(one < other for one, other in pairwise(offsets))
        and (not offsets or (first <= offsets[0] and offsets[-1] < after))
    )


def _at(record: Any, offset: int) -> BatchRecord:
    return BatchRecord(
        offset, record.timestamp, record.timestamp_type, record.key, record.value, list(record.headers)
    )


class TokenAuthenticator(conn.OAuthAuthenticator):  # type: ignore[misc]
    """Sends a token of its provider. When the broker refuses it, the login raises SaslAuthenticationFailed,
    and the provider forgets the token: the broker may know another one.
    """

    async def step(self, payload: bytes | None) -> tuple[Any, bool] | None:
        """What to send next; None at the end. `payload` is what the broker has answered last."""
        if payload:
            self._sasl_oauth_token_provider.forget()
            return ACKNOWLEDGED, True
        step: tuple[Any, bool] | None = await super().step(payload)
        return step


def install() -> None:
    """Makes all clients of this process read by `Records` and log in by `TokenAuthenticator`. `brokers` calls
    it, which every client needs for its options.
    """
    for name in ("MemoryRecords", "ConsumerRecord"):
        if not hasattr(fetcher, name):
            raise ImportError(f"aiokafka.consumer.fetcher has no {name}: this needs another version")
    fetcher.MemoryRecords = Records
    fetcher.ConsumerRecord = ConsumedRecord
    conn.OAuthAuthenticator = TokenAuthenticator


async def until_controller_is_known(client: AIOKafkaAdminClient) -> None:
    """Asks until the brokers name their controller; raises KafkaConnectionError if they do not within the
    time of a request. A broker that was paused for seconds names none until it has found it again, and
    requests of aiokafka then fail with an AttributeError.
    """
    connection = client._client
    deadline = time.monotonic() + connection._request_timeout_ms / 1000
    while connection.cluster.controller is None:
        if time.monotonic() > deadline:
            raise KafkaConnectionError(f"the brokers at {connection._bootstrap_servers} name no controller")
        await asyncio.sleep(CONTROLLER_POLL_SECONDS)
        await connection.force_metadata_update()


async def send(client: AIOKafkaAdminClient, request: Any) -> Any:
    """The answer to a request that the admin client has no method for; raises aiokafka's errors."""
    return await client._send_request(request)


async def create_acl(client: AIOKafkaAdminClient, *acl: Any) -> Any:
    """Adds a permission, by Kafka's numbers and names in the order of the protocol; returns the answer."""
    return await send(client, CreateAclsRequest(*acl))


async def connect(host: str, port: int, **options: Any) -> Any:
    """A single connection to a broker, which has logged in if `options` say how; the caller closes it. Raises
    aiokafka's errors and OSError.
    """
    return await conn.create_conn(host, port, **options)


async def wants_login(connection: Any) -> bool:
    """Whether a broker asks for SASL on this connection, on which no user has logged in. One that does not
    refuses the question.
    """
    answer = await connection.send(SaslHandShakeRequest("PLAIN"))
    return answer.error_code in (0, UnsupportedSaslMechanismError.errno)


class _Uuid:
    """16 bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: Any) -> bytes:
        return bytes(data.read(16))

    @classmethod
    def repr(cls, value: bytes) -> str:
        return value.hex()


class _Metadata(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _MetadataRequestBody(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Metadata
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicMetadataRequest(Request[_MetadataRequestBody]):  # type: ignore[misc]
    """Asks for the topic with a name, with its id (`topic_ids`)."""

    API_KEY = 3

    def __init__(self, name: str) -> None:
        self._name = name

    def build(self, request_struct_class: type[_MetadataRequestBody]) -> _MetadataRequestBody:
        """The body of the request."""
        return request_struct_class([(bytes(16), self._name, {})], False, False, {})
