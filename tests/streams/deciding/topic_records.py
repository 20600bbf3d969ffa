"""Reads topics from their beginning to their end."""

from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics


async def read_all(settings: Settings, topic: str) -> list[Any]:
    """All records of a topic; the order between partitions is arbitrary."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False
    )
    async with started(consumer):
        count = 1 if topic == Topics(settings.prefix).rejected else settings.shards
        partitions = [TopicPartition(topic, number) for number in range(count)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        all_records: list[Any] = []
        while len(all_records) < sum(ends.values()):
            for records in (await consumer.getmany(timeout_ms=1_000)).values():
                all_records += records
        return all_records
