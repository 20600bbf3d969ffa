"""The id of a topic in Kafka (KIP-516). A topic that is deleted and created again has another id, and so has
a topic of the same name on other brokers.

aiokafka requests metadata in a version without ids, so `kafka_internals` sends the request in a newer version
(12, Kafka 2.8 and later).
"""

from typing import NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import UnknownTopicOrPartitionError, for_code

from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.kafka_internals import TopicMetadataRequest, send

REQUEST_TIMEOUT_MS = 8_000


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
        answer = await send(client, TopicMetadataRequest(name))
    [(code, _, topic_id, _, partitions, *_)] = answer.topics
    if code == UnknownTopicOrPartitionError.errno:
        return None
    if code:
        raise for_code(code)(f"topic {name}")
    return Topic(topic_id.hex(), len(partitions), answer.cluster_id or "")
