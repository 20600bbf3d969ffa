"""Writes kept refusals to their topic, for programs that watch demand. A topic that cannot be written to is
handled by the refusal log (`gate/refusals.py`), which keeps or drops them; deciding never waits.
"""

import asyncio
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer

from grabstream.gate.refusals import Refusal
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.outcomes import OUTCOME_NAMES
from grabstream.models.refused import Refused, encode_refused
from grabstream.runtime.trouble import is_trouble
from grabstream.streams import brokers
from grabstream.streams.clients import close, error_text
from grabstream.streams.topics import record_time_ms

_HEADERS = [("content-type", b"application/json")]


class RefusalTopic:
    """The topic of refusals; its client is started by the first write."""

    def __init__(self, kafka: str, topic: str, shards: int) -> None:
        self._kafka = kafka
        self._topic = topic
        self._shards = shards
        self._producer: AIOKafkaProducer | None = None

    async def write(self, refusals: Sequence[Refusal]) -> None:
        """Returns when the brokers have all of them; raises OSError when they cannot be written now. Some may
        be written nevertheless, and are then written again.
        """
        try:
            if self._producer is None:
                await self._start()
            producer = self._producer
            assert producer is not None
            sent = [await self._send(producer, refusal) for refusal in refusals]
            await asyncio.gather(*sent)
        except BaseException as error:
            # A new client next time: waiting records of this one would be sent twice.
            await self.close()
            if not is_trouble(error):
                raise
            raise OSError(f"Kafka: {error_text(error)}") from None

    async def _start(self) -> None:
        producer = AIOKafkaProducer(**brokers.at(self._kafka, timeout_ms=8_000), linger_ms=20)
        self._producer = producer
        await producer.start()
        await producer.partitions_for(self._topic)

    async def _send(self, producer: AIOKafkaProducer, refusal: Refusal) -> "asyncio.Future[object]":
        """Puts a refusal into a batch; the future is done when the broker has it."""
        partition = shard_of(campaign_of(refusal.offer), self._shards)
        return await producer.send(  # type: ignore[no-any-return]
            self._topic, encode_refused(refused(refusal)), key=refusal.offer.encode(), partition=partition,
            timestamp_ms=record_time_ms(refusal.at), headers=_HEADERS,
        )  # fmt: skip

    async def close(self) -> None:
        """Closes the client; the next write starts another."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await close(producer.stop())


def refused(refusal: Refusal) -> Refused:
    """A refusal as the topic has it: without the text of the answer, which may quote what was sent."""
    return Refused(
        v=1, at=refusal.at, type=refusal.type, id=refusal.command, offer=refusal.offer, user=refusal.user,
        grab=refusal.grab, quantity=refusal.quantity, outcome=OUTCOME_NAMES[refusal.code], code=refusal.code,
        limit=refusal.limit_name, limit_left=refusal.limit_left, left=refusal.units_left,
        retry_at=refusal.retry_at,
    )  # fmt: skip
