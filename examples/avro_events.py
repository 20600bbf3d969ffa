"""Writes all events as Avro to a topic, with a schema registry: a sink for

    SCHEMA_REGISTRY_URL=http://127.0.0.1:8081 grabstream follow avro_events:SINK

The topic is `grab.events-avro`, partition = shard, key = offer. A value has the wire format of Confluent's
serializers (a zero byte, the id of the schema in four bytes, the record), so their deserializers read it. The
registry may be any with Confluent's REST API. It refuses a schema that breaks readers of the one before.

The cursor is in the file `avro-events.cursor`. It is stored after the events, so after a crash some come
again: (`shard`, `seq`) identifies them, as on `grab.events`.
"""

import asyncio
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import fastavro
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code

from grabstream import CursorMoved, Fact, SinkDamaged, load_settings
from grabstream.streams.clients import started

#: Fields that an event may lack. A field that is added later must be one of them.
OPTIONAL = {
    "command": "string", "user": "string", "grab": "string", "quantity": "long", "amount": "long",
    "asset": "string", "place": "long", "left": "long", "payment": "string", "paid": "long",
    "currency": "string",
}  # fmt: skip
SCHEMA = {
    "type": "record",
    "name": "Event",
    "namespace": "grabstream",
    "doc": "An event of grabstream; `body` is its text as on `grab.events`, with all fields.",
    "fields": [
        {"name": "shard", "type": "int"},
        {"name": "seq", "type": "long"},
        {"name": "type", "type": "string"},
        {"name": "offer", "type": "string"},
        {"name": "offer_seq", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        *({"name": name, "type": ["null", kind], "default": None} for name, kind in OPTIONAL.items()),
        {"name": "body", "type": "string"},
    ],
}
_parsed = fastavro.parse_schema(SCHEMA)
#: What registries with Confluent's REST API expect.
_HEADERS = {"Content-Type": "application/vnd.schemaregistry.v1+json"}


def encoded(fact: Fact, schema_id: int) -> bytes:
    """An event in the wire format."""
    text = fact.line.decode()
    value = io.BytesIO(b"\0" + schema_id.to_bytes(4, "big"))
    value.seek(0, io.SEEK_END)
    # What the schema does not have is left out.
    fastavro.schemaless_writer(value, _parsed, {**json.loads(text), "body": text})
    return value.getvalue()


class AvroTopic:
    """The topic, its schema in the registry, and the cursor."""

    def __init__(self, registry: str, cursor: Path) -> None:
        self._registry = registry
        self._cursor = cursor
        self._settings = load_settings()
        self._topic = f"{self._settings.prefix}.events-avro"
        self._producer: AIOKafkaProducer | None = None
        self._schema_id = 0

    async def load(self) -> str | None:
        """Registers the schema, connects to Kafka, and returns the stored cursor."""
        self._schema_id = await self._registered()
        await self._create_topic()
        # After an error, an idempotent producer may refuse all that follows: each load gets a new one.
        before, self._producer = self._producer, None
        if before is not None:
            await before.stop()
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.kafka, acks="all", enable_idempotence=True
        )
        await producer.start()
        self._producer = producer
        return self._stored()

    async def apply(self, facts: Sequence[Fact], before: str | None, after: str) -> None:
        """Sends the events, and stores the cursor when all of them are in Kafka."""
        if self._stored() != before:
            raise CursorMoved("another process writes this cursor")
        assert self._producer is not None
        sent = [
            await self._producer.send(
                self._topic,
                encoded(fact, self._schema_id),
                key=fact.event.offer.encode(),
                partition=fact.event.shard,
                timestamp_ms=fact.event.at,
            )
            for fact in facts
        ]
        await asyncio.gather(*sent)
        part = self._cursor.with_suffix(".new")
        with part.open("w") as file:
            file.write(after)
            file.flush()
            # Otherwise the name may be there after a loss of power, and the content not.
            os.fsync(file.fileno())
        part.replace(self._cursor)

    def _stored(self) -> str | None:
        return self._cursor.read_text() if self._cursor.exists() else None

    async def _registered(self) -> int:
        """The id of the schema, which the registry checks for compatibility."""
        path = f"{self._registry}/subjects/{self._topic}-value/versions"
        try:
            async with (
                aiohttp.ClientSession(headers=_HEADERS, timeout=aiohttp.ClientTimeout(60)) as session,
                session.post(path, data=json.dumps({"schema": json.dumps(SCHEMA)})) as reply,
            ):
                status, body = reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionError(f"the schema registry cannot be reached: {error!r}") from error
        if status >= 500:
            raise ConnectionError(f"the schema registry answers {status}")
        if status != 200:
            raise SinkDamaged(f"the schema registry refuses the schema: {body[:500]}")
        found: dict[str, Any] = json.loads(body)
        return int(found["id"])

    async def _create_topic(self) -> None:
        """Creates the topic if it does not exist, with one copy: a cluster needs more."""
        async with started(AIOKafkaAdminClient(bootstrap_servers=self._settings.kafka)) as client:
            # Kept without limit, as `grab.events` is: records have the times of their events, which may be
            # old.
            topic = NewTopic(
                self._topic,
                num_partitions=self._settings.shards,
                replication_factor=1,
                topic_configs={"retention.ms": "-1"},
            )
            for _, code, *message in (await client.create_topics([topic])).topic_errors:
                error = for_code(code)
                if error in (NoError, TopicAlreadyExistsError):
                    continue
                if error.retriable:
                    raise error(*message)
                raise SinkDamaged(f"{self._topic} cannot be created: {error.__name__} {message}")
            [found] = await client.describe_topics([self._topic])
        if found["error_code"]:
            raise for_code(found["error_code"])(f"{self._topic}: not known to all brokers yet")
        count = len(found["partitions"])
        if count < self._settings.shards:
            raise SinkDamaged(f"{self._topic} has {count} partitions, not one for each shard")


SINK = AvroTopic(os.environ.get("SCHEMA_REGISTRY_URL", "http://127.0.0.1:8081"), Path("avro-events.cursor"))
