"""The id of a topic in Kafka (KIP-516). A topic that is deleted and created again has another id, and so has
a topic of the same name on other brokers.

aiokafka requests metadata in a version without ids, so this module sends the request in a newer version (12,
Kafka
2.8 and later).
"""

from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from grabstream.streams import brokers
from grabstream.streams.clients import started

REQUEST_TIMEOUT_MS = 8_000


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


class _MetadataRequest(Request[_MetadataRequestBody]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, name: str) -> None:
        self._name = name

    def build(self, request_struct_class: type[_MetadataRequestBody]) -> _MetadataRequestBody:
        return request_struct_class([(bytes(16), self._name, {})], False, False, {})


class Topic(NamedTuple):
    """A topic: its id, 32 hex digits, its number of partitions, and the id of its cluster."""

    id: str
    partitions: int
    cluster: str


async def find_topic(bootstrap: str, name: str) -> Topic | None:
    """The topic with a name, None if it does not exist; raises aiokafka's errors if the brokers cannot be
    reached.
    """
    client = AIOKafkaAdminClient(**brokers.at(bootstrap, timeout_ms=REQUEST_TIMEOUT_MS))
    async with started(client):
        answer = await client._send_request(_MetadataRequest(name))
    [(code, _, topic_id, _, partitions, *_)] = answer.topics
    if code == UnknownTopicOrPartitionError.errno:
        return None
    if code:
        raise for_code(code)(f"topic {name}")
    return Topic(topic_id.hex(), len(partitions), answer.cluster_id or "")
